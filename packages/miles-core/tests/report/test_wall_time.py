"""Where the time and the tokens of a run went, from its ledger."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from long_run import SAMPLED, LongRun, play
from miles_core.durable.ledger import reading
from miles_core.report.fates import read_fates
from miles_core.report.history import RunHistory, Start, Step, read_history
from miles_core.report.run_data import read_run
from miles_core.report.wall_time import KINDS, covered, load, split_time
from miles_rollout.fates import Fate
from miles_tito.records.summary import GroupRef

times = st.floats(0, 100, allow_nan=False)
intervals = st.lists(st.tuples(times, times).map(lambda pair: (min(pair), max(pair))), max_size=12)


def seconds_of(path) -> dict[str, float]:
    """Kind -> seconds, zeros left out."""
    split = read_run(path).time
    assert split is not None
    return {kind: round(value, 3) for kind, value in split.seconds.items() if value}


def test_an_undisturbed_run_is_start_up_steps_and_what_lies_between(tmp_path):
    run = LongRun(tmp_path)
    run.start()
    run.clock.go(20)
    for step in (1, 2):
        names = run.issue(2)
        run.finish(names)
        run.step(step, names)
    run.checkpoint(2, pause=3, written=0)
    run.clock.go(2)
    run.evaluate(2, 0.5, seconds=5)
    assert seconds_of(run.write()) == {"start-up": 20, "steps": 20, "checkpoint": 3, "evaluation": 5, "other": 2}
    assert read_run(tmp_path).time.ratio == pytest.approx(0.4)


def test_a_step_that_a_rewind_took_back_is_lost_and_so_is_the_one_that_was_cut_off(tmp_path):
    run = LongRun(tmp_path)
    run.start()
    first, second = run.issue(2), run.issue(2)
    run.finish([*first, *second])
    run.step(1, first)
    run.checkpoint(1, pause=0, written=0)
    run.step(2, second)
    run.clock.go(4)
    run.issue()  # the last that this process did
    run.clock.go(100)
    run.start(1)
    run.clock.go(6)
    run.step(2, second)
    assert seconds_of(run.write()) == {"steps": 20, "lost": 10 + 4, "down": 100, "start-up": 6}


def test_a_trainer_that_died_is_recovery_from_its_death_on(tmp_path):
    run = LongRun(tmp_path)
    run.start()
    names = run.issue(2)
    run.finish(names)
    run.clock.go(3)
    run.ledger.event("trainer", "all ranks", "restarted: rank 1 died")
    run.clock.go(9)
    run.ledger.rewind(0)
    run.step(1, names)
    # no step had been made: all before the first one is start-up
    assert seconds_of(run.write()) == {"start-up": 12, "steps": 10}


def test_the_death_of_a_trainer_after_a_step_splits_into_lost_and_recovery(tmp_path):
    run = LongRun(tmp_path)
    run.start()
    first, second = run.issue(2), run.issue(2)
    run.finish([*first, *second])
    run.step(1, first)
    run.checkpoint(1, pause=0, written=0)
    run.clock.go(3)
    run.ledger.event("trainer", "all ranks", "restarted: rank 1 died")
    run.ledger.event("engine", "http://e", "suspect")
    run.clock.go(9)
    run.ledger.rewind(1)
    run.step(2, second)
    assert seconds_of(run.write()) == {"steps": 20, "lost": 3, "start-up": 9}


def test_a_pause_is_no_effective_time_and_an_evaluation_beside_training_costs_none(tmp_path):
    run = LongRun(tmp_path)
    run.start()
    names = run.issue(2)
    run.finish(names)
    run.ledger.event("run", "pause", "every engine is dead")
    run.ledger.event("run", "pause", "every engine is still dead")
    run.clock.go(6)
    run.ledger.event("run", "pause", "over")
    run.evaluate(0, 0.5, seconds=0)
    run.clock.go(-6)
    run.step(1, names, wait=8, train=1, sync=1)
    run.clock.go(-4)
    run.evaluate(0, 0.6, seconds=4)
    assert seconds_of(run.write()) == {"steps": 4, "paused": 6}


def test_a_pause_that_the_end_of_its_process_ended_does_not_last_until_the_next(tmp_path):
    run = LongRun(tmp_path)
    run.start()
    run.ledger.event("run", "pause", "every engine is dead")
    run.clock.go(5)
    run.issue()
    run.clock.go(1000)
    run.start(0)
    run.ledger.event("run", "pause", "none has started")
    run.clock.go(2)
    run.issue()
    run.write()
    with reading(tmp_path / "ledger.db") as db:
        assert [round(end - begin) for begin, end in read_history(db).pauses] == [5, 2]


def test_a_whole_life_adds_up_to_its_wall_time(tmp_path):
    play(tmp_path)
    run = read_run(tmp_path)
    assert run.ledger is not None
    split = run.time
    assert split.wall == pytest.approx(run.ledger.history.end - run.ledger.history.begin)
    assert all(split.seconds[kind] > 0 for kind in KINDS)
    assert 0 < split.ratio < 1


def test_a_run_that_has_only_begun_has_no_ratio(tmp_path):
    run = LongRun(tmp_path)
    run.start()
    assert read_run(run.write()).time.ratio is None


def test_an_empty_ledger_has_no_time_at_all(tmp_path):
    run = LongRun(tmp_path)
    run.write()
    read = read_run(tmp_path)
    assert read.time.ratio is None
    assert read.timeline() is None


@given(intervals, times, times)
def test_what_spans_cover_of_a_window_counts_each_moment_once(spans, begin, end):
    step = 0.01
    moments = np.arange(begin, end, step) + step / 2
    inside = np.zeros(len(moments), dtype=bool)
    for left, right in spans:
        inside |= (moments >= left) & (moments < right)
    (found,) = covered(spans, np.array([[begin, end]]))
    assert found == pytest.approx(inside.sum() * step, abs=step * (2 * len(spans) + 2))


@given(intervals)
def test_load_is_the_mean_number_of_open_spans_in_each_bin(spans):
    base = 1.7e9
    edges = base + np.linspace(0, 100, 11)
    found = load(np.array([(base + a, base + b) for a, b in spans]).reshape(-1, 2), edges)
    for i in range(10):
        left, right = 10 * i, 10 * (i + 1)
        expected = sum(max(min(b, right) - max(a, left), 0) for a, b in spans) / 10
        assert found[i] == pytest.approx(expected, abs=1e-5)


def fates_of(path):
    with reading(path / "ledger.db") as db:
        return read_fates(db)


def test_every_group_and_token_is_in_the_waterfall_once(tmp_path):
    play(tmp_path)
    fates = fates_of(tmp_path)
    with reading(tmp_path / "ledger.db") as db:
        issued, tokens = db.execute(
            "SELECT (SELECT count(*) FROM groups), (SELECT sum(loss_tokens) FROM episodes)"
        ).fetchone()
    assert (fates.issued, fates.sampled) == (issued, tokens)
    trained = sum(e.tokens - e.masked_tokens for e in fates.of(Fate.TRAINED))
    assert trained + fates.wasted == tokens, "the run is over: nothing is open"
    assert trained == fates.trained
    assert sum(total.groups for totals in fates.by_fate().values() for total in totals) == issued


def test_tokens_are_wasted_by_their_cause(tmp_path):
    run = LongRun(tmp_path)
    run.start()
    kept, back, again, old, queued = (run.issue()[0] for _ in range(5))
    run.finish([kept, back, again, queued])
    run.finish([old], buffered=False)
    run.end([old], Fate.STALE, "two versions behind")
    run.step(1, [kept])
    run.checkpoint(1)
    run.step(2, [back, again])
    run.start(1)
    run.step(2, [again])
    run.end([back], Fate.STALE, "stale")
    fates = fates_of(run.write())
    group = 2 * SAMPLED
    assert {name: tokens for name, tokens, _ in fates.causes()} == {
        "stale: two versions behind": group,
        "taken back by a rewind, then not trained": group,
    }
    assert (fates.sampled, fates.retrained) == (5 * group, group)


def test_masked_episodes_are_waste_although_their_group_was_trained(tmp_path):
    run = LongRun(tmp_path)
    run.start()
    names = run.issue()
    run.finish(names)
    run.step(1, names)
    run.ledger.close()
    import sqlite3

    with sqlite3.connect(tmp_path / "ledger.db") as db:
        db.execute("UPDATE episodes SET is_masked = 1 WHERE episode = 0")
    (cause,) = fates_of(tmp_path).causes()
    assert cause == ("too old: counted for the baseline alone", SAMPLED, None)


def test_rows_without_seconds_leave_the_time_between_steps_to_other(tmp_path):
    run = LongRun(tmp_path)
    run.start()
    names = run.issue(2)
    run.finish(names)
    run.clock.go(7)
    run.ledger.step(1, [GroupRef(id=name, prompt_id="", episodes=()) for name in names])
    for name in names:
        run.end([name], Fate.TRAINED, "", version=1)
    run.write()
    with reading(tmp_path / "ledger.db") as db:
        split = split_time(read_history(db), [])
    assert split.seconds["start-up"] == pytest.approx(7)
    assert split.ratio == 0
    assert not math.isnan(split.wall)


@st.composite
def histories(draw) -> RunHistory:
    """Starts and steps at any times, in order or not: clocks are set back, and steps recorded late."""
    moments = st.floats(0, 1000, allow_nan=False)
    starts = [
        Start(number=i, at=at, from_step=i or None, is_in_place=draw(st.booleans()), returned=0, end=at + draw(moments))
        for i, at in enumerate(draw(st.lists(moments, min_size=1, max_size=4)))
    ]
    steps = [
        Step(
            version=i,
            start=start,
            at=draw(moments),
            seconds=draw(moments),
            is_live=draw(st.booleans()),
            committed_at=None,
            has_checkpoint=False,
        )
        for i, start in enumerate(sorted(draw(st.lists(st.integers(0, len(starts) - 1), max_size=8))))
    ]
    return RunHistory(
        starts=starts,
        steps=steps,
        evaluations=draw(intervals),
        pauses=draw(intervals),
        trainer_deaths=sorted(draw(st.lists(moments, max_size=3))),
    )


@given(histories())
def test_no_kind_of_time_is_negative_and_none_is_counted_twice(history):
    split = split_time(history, [{"step": 1.0, "time/checkpoint": 50.0, "time/step": 1.0}])
    assert all(value >= 0 for value in split.seconds.values())
    ends = [start.at for start in history.starts[1:]] + [history.starts[-1].end]
    spans = [max(end - start.at, 0) for start, end in zip(history.starts, ends, strict=True)]
    assert split.wall == pytest.approx(sum(spans), abs=1e-6)
