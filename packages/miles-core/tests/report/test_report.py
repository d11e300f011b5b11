from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from core_records import make_group
from miles_core import report
from miles_core.durable.ledger import Ledger
from miles_core.durable.spool import SpoolWriter
from miles_core.monitor import JsonlMonitor
from miles_core.report.charts import by_lag, main_charts, other_charts, thin
from miles_core.report.conversations import pick_episodes
from miles_core.report.run_data import _sparse, read_run
from miles_core.text import visible
from miles_rollout.fates import Fate, FateEvent
from miles_tito.records import Episode, Group, Outcome
from miles_tito.records.summary import summarize

HOSTILE = '</i></p><script>alert(1)</script><img src=x onerror="alert(2)">\u202egnihsihp'


class Page(HTMLParser):
    """The page as a browser would take it apart."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        (self.scripts if self.lasttag == "script" and self.cdata_elem else self.text).append(data)

    @property
    def words(self) -> str:
        """What is read without scripting."""
        return " ".join("".join(self.text).split())

    @property
    def data(self) -> dict:
        """What the script draws."""
        return json.loads(self.scripts[0])

    @property
    def conversations(self) -> str:
        """The text of all token strips."""
        items = [item for strip in self.data["strips"] for block in strip for item in block["items"]]
        return "".join(item[1] for item in items if isinstance(item, list))

    def titles(self, charts: str) -> list[str]:
        return [chart["title"] for chart in self.data["charts"][charts]]


def page_of(run_dir) -> Page:
    return Page(report.write(run_dir).read_text(encoding="utf-8"))


def test_a_finished_run_shows_its_result_every_chart_and_both_ends_of_the_conversation(make_run):
    page = page_of(make_run())
    assert "held-out score0.910+0.600 from 0.310" in page.words
    assert "issued 1080 = trained 960 + filtered 120" in page.words
    assert {"Reward", "Episode length", "Staleness", "Log-prob gap", "Time of a step", "Fates"} <= {
        *page.titles("main")
    }
    assert "env/format_ok" in page.titles("more")
    assert all("y_axis" in chart for charts in page.data["charts"].values() for chart in charts), "none is empty"
    assert "worst of its group" in page.words
    assert "Answer: 395" in page.conversations


def test_the_page_loads_nothing_and_forbids_every_script_but_its_own(make_run):
    page = page_of(make_run())
    assert not [value for _, attrs in page.tags for name, value in attrs.items() if name in ("src", "href", "srcset")]
    assert [attrs.get("type") for tag, attrs in page.tags if tag == "script"] == ["application/json", None]
    assert not re.search(r"@import|url\(", "".join(page.text))
    (policy,) = [attrs["content"] for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs]
    _, script = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" == policy


def test_hostile_text_stays_text(make_run):
    run = make_run("<b>name</b>", texts=[(HOSTILE, "b"), (HOSTILE,), (HOSTILE, "<|im_end|>"), ("\x00",), (HOSTILE,)])
    (run / "config.json").write_text(json.dumps({"model": {"path": HOSTILE}, HOSTILE: HOSTILE}))
    JsonlMonitor(run).log(61, {f"env/{HOSTILE}": 1.0, "eval/score": math.inf})
    page = page_of(run)
    allowed = "html head meta title style body main header div h1 span button p ul li small strong section figure "
    allowed += "h2 details summary i b pre footer code script table thead tbody tr th td noscript"
    assert {tag for tag, _ in page.tags} <= set(allowed.split())
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert "<script>alert(1)</script>" in page.words
    assert "<script>alert(1)</script>" in page.conversations
    assert f"env/{visible(HOSTILE)}" in page.titles("more")
    assert not set(page.scripts[0]) & set("<>&\u2028\u2029"), "nothing can end the element or begin another"
    assert "\u202e" not in page.words + page.scripts[0]
    assert "\\u202e" in page.words
    assert "\\u202e" in page.conversations
    assert "\x00" not in report.write(run).read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["</script>", "</ScRiPt ", "<!--<script>", "]]>", "&lt;/script&gt;", "\u2028"])
def test_no_text_ends_the_element_that_the_data_stands_in(make_run, text):
    run = make_run(steps=2, texts=[(text, "b"), ("c",), ("d", "<|im_end|>"), ("e",), (text,)])
    JsonlMonitor(run).log(3, {f"env/{text}": 1.0})
    html = report.write(run).read_text(encoding="utf-8")
    assert html.lower().count("<script") == html.lower().count("</script") == 2
    assert "<!--" not in html
    page = Page(html)
    assert f"env/{visible(text)}" in page.titles("more")
    assert page.conversations.startswith(visible(text))


def test_head_figures_and_fates_are_tables_that_need_no_script(make_run):
    html = report.write(make_run()).read_text(encoding="utf-8")
    without = Page(re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL))
    assert "quickstart" in without.words
    assert "held-out score0.910" in without.words
    assert "issued 1080 = trained 960" in without.words
    assert "which is switched off" in without.words
    assert [attrs.get("class") for tag, attrs in without.tags if tag == "table"] == ["figures"]


def test_a_killed_run_says_so_and_shows_what_it_has(make_run):
    run = make_run(finished=False)
    with (run / "metrics.jsonl").open("ab") as metrics:
        metrics.write(b'{"step": 61, "rew')
    with (run / "trajectories" / "worker-0.000.spool").open("ab") as spool:
        spool.write(b"MSPL\xff\x00")
    page = page_of(run)
    assert "not finished" in page.words
    assert "it is still going on, or it was killed" in page.words
    assert "60 steps" in page.words
    assert "Answer: 395" in page.conversations


def test_an_empty_run_says_that_nothing_was_logged(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    page = page_of(tmp_path)
    assert "No step has been logged yet." in page.words
    assert "no steps yet" in page.words


def test_a_run_without_its_tokenizer_shows_ids(make_run):
    run = make_run()
    (run / "model" / "tokenizer.json").unlink()
    assert "[0] [1] [2]" in page_of(run).conversations


def test_damaged_files_become_notes(make_run):
    run = make_run(steps=3)
    (run / "environment.json").write_text("{")
    assert "environment.json could not be read" in page_of(run).words


def test_something_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(report.ReportError, match="is not a directory"):
        report.write(tmp_path / "absent")
    with pytest.raises(report.ReportError, match=r"is no run: it has none of config\.json, metrics\.jsonl"):
        report.write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_report_is_replaced_whole(make_run):
    run = make_run(steps=2)
    first = report.write(run)
    assert report.write(run) == first
    assert not list(run.glob("*.partial"))


def test_conversations_come_from_the_start_to_the_end_of_the_run(make_run):
    shown = read_run(make_run(steps=60)).shown
    assert [s.episode.prompt_id for s in shown if s.label.startswith("worst")] == [
        "multiply-0",
        "multiply-20",
        "multiply-35",
        "multiply-55",
    ]
    assert [s.episode.reward for s in shown] == [0.0, 1.0] * 4


def test_held_out_conversations_of_the_newest_evaluation_are_shown(make_run):
    run = make_run(steps=4)
    for step, rewards in ((9, [0.5]), (10, [0.2, 0.9, 0.1, 0.6])):
        spool = SpoolWriter(run / "eval" / f"step-{step:06d}", "worker-0")
        for reward in rewards:
            spool.append(make_group(f"e{reward}", [[6]], [reward]))
        spool.close()
    shown = [s for s in read_run(run).shown if s.fate.startswith("held out")]
    assert [(s.episode.reward, s.fate) for s in shown] == [(r, "held out, weights of step 10") for r in (0.1, 0.9)]
    assert {s.label for s in shown} == {"alone in its group"}
    assert "held out, weights of step 10" in page_of(run).words


def test_the_ledger_is_preferred_and_names_the_step(make_run):
    run = make_run(steps=60)
    spool = SpoolWriter(run / "trajectories", "worker-1")
    ledger = Ledger.open(run / "ledger.db", create=True)
    ledger.start(0)
    for number, group in enumerate(_groups_of(run)):
        ledger(FateEvent(group_id=group.id, prompt_id=group.prompt_id, fate=Fate.IN_FLIGHT, reason="", version=0))
        address = spool.append(group)
        ledger.finished(replace(summarize(group), metadata={"spool": (address.file, address.offset)}))
        fate = Fate.TRAINED if number % 2 else Fate.FILTERED
        version = number // 2 + 1
        ledger(FateEvent(group_id=group.id, prompt_id=group.prompt_id, fate=fate, reason="", version=version))
    fates = [shown.fate for shown in read_run(run).shown]
    assert fates[0] == "trained at step 1", "while the run still writes"
    ledger.close()
    assert (fates[0], fates[-1]) == ("trained at step 1", f"trained at step {version}")
    assert f"trained at step {version} · worst of its group" in page_of(run).words


def test_a_damaged_ledger_becomes_a_note(make_run):
    run = make_run(steps=3)
    (run / "ledger.db").write_bytes(b"SQLite format 3\0" + bytes(5000))
    page = page_of(run)
    assert "The ledger could not be read" in page.words
    assert "Answer: 395" in page.conversations, "the spools still hold conversations"


def _groups_of(run):
    from miles_core.durable.spool import read_groups

    return read_groups(run / "trajectories" / "worker-0.000.spool")


@pytest.mark.parametrize("count", [0, 5, 127, 128, 129, 1000])
def test_a_huge_spool_is_read_sparsely_from_its_start_to_its_end(count):
    kept = _sparse(iter(range(count)))
    assert len(kept) <= 128
    assert len(kept) >= min(count, 64)
    gaps = {b - a for a, b in itertools.pairwise(kept)}
    assert len(gaps) <= 1
    assert not kept or (kept[0] == 0 and count - kept[-1] <= max(gaps, default=1))


def test_an_episode_without_a_reward_is_shown_beside_the_scored_ones(make_run):
    (group, *_) = _groups_of(make_run(steps=3))
    failed = Episode(
        id="f",
        prompt_id=group.prompt_id,
        group_id=group.id,
        outcome=Outcome.INFRA_ABORT,
        error="engine gone",
        trajectories=group.episodes[0].trajectories,
    )
    alike = Group(id=group.id, prompt_id=group.prompt_id, episodes=(group.episodes[0], failed))
    assert [s.label for s in pick_episodes([(alike, "")])] == ["all of its group alike", "without a reward"]
    assert pick_episodes([]) == []


def test_sft_shows_the_loss_on_demonstrations_and_no_empty_charts(tmp_path):
    monitor = JsonlMonitor(tmp_path)
    for step in (1, 2, 3):
        monitor.log(step, {"loss/nll": 2.0 / step, "time/step": 0.1, "time/train": 0.1})
    page = page_of(tmp_path)
    assert page.titles("main") == ["Demonstrations", "Time of a step"]
    assert all("y_axis" in chart for charts in page.data["charts"].values() for chart in charts), "none is empty"


def test_the_warm_up_before_rl_has_a_chart(make_run):
    run = make_run(steps=3)
    (run / "sft").mkdir()
    JsonlMonitor(run / "sft").log(1, {"loss/nll": 2.0})
    assert "Warm-up" in page_of(run).titles("main")


def test_a_long_run_is_thinned_with_maxima_counts_and_means_kept():
    rows = [{"step": float(i), "reward/mean": i % 2, "staleness/max": i, "fate/trained": i} for i in range(1, 1001)]
    thinned = thin(rows, limit=100)
    assert len(thinned) == 100
    assert thinned[-1] == {"step": 1000.0, "reward/mean": 0.5, "staleness/max": 1000, "fate/trained": 1000}
    assert thin(rows[:50], limit=100) == rows[:50]


def test_the_gap_is_drawn_by_lag_whatever_the_version():
    rows = by_lag([{"step": 9.0, "logprob_gap/version_8": 1e-6, "logprob_gap/version_7": 1e-2}])
    assert rows == [{"step": 9.0, "logprob_gap/lag_0": 1e-6, "logprob_gap/lag_1": 1e-2}]
    (gap,) = [chart for chart in main_charts(rows) if chart.title == "Log-prob gap"]
    assert [series.name for series in gap.series] == ["mean, lag 0", "mean, lag 1"]


def test_every_metric_is_drawn_once():
    rows = [{"step": 1.0, "time": 5.0, "mine/own": 1.0, "reward/mean": 0.5, "fate/trained": 3.0, "loss/total": 0.1}]
    others = other_charts(rows, drawn=main_charts(rows))
    assert [chart.title for chart in others] == ["loss/total", "mine/own"]
