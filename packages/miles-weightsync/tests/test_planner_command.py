"""`miles-weightsync plan`: the answer, its baselines, and what it says to unusable input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from miles_weightsync.cli import main
from miles_weightsync.planner import Layout, SGLang, fsdp_layout, full_layout, make_plan
from miles_weightsync.planner.estimate import baselines, seconds
from planner_models import DENSE

FIELDS = {
    "copies", "bytes_moved", "bytes_needed", "moved_over_needed", "sender_max_over_mean", "receiver_max_over_mean",
    "bytes_broadcast", "bytes_allgather", "plan_seconds",
}  # fmt: skip


def write(path: Path, layout: Layout) -> str:
    path.write_text(json.dumps(layout.to_json()))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    source = write(tmp_path / "src.json", fsdp_layout(DENSE, ranks=4))
    target = write(tmp_path / "dst.json", SGLang(model=DENSE, engines=2, tp=2).layout())
    return ["--src", source, "--dst", target]


def test_the_json_answer_has_every_field(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *files, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) >= FIELDS
    plan = make_plan(fsdp_layout(DENSE, ranks=4), SGLang(model=DENSE, engines=2, tp=2).layout())
    assert answer["copies"] == len(plan.copies)
    assert answer["bytes_moved"] == answer["bytes_needed"] == plan.bytes_moved
    assert answer["moved_over_needed"] == 1.0
    assert 0 < answer["plan_seconds"] < 60


def test_every_copy_can_be_written_out(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *files, "--json", "--copies", str(tmp_path / "copies.jsonl")]) == 0
    answer = json.loads(capsys.readouterr().out)
    copies = [json.loads(line) for line in (tmp_path / "copies.jsonl").read_text().splitlines()]
    assert len(copies) == answer["copies"]
    assert sum(copy["bytes"] for copy in copies) == answer["bytes_moved"]
    assert set(copies[0]) == {"src", "dst", "name", "box", "src_block", "dst_block", "bytes"}


def test_a_preset_prints_its_figures_and_says_that_times_are_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "qwen3-235b-a22b", "--nic", "200"]) == 0
    text = capsys.readouterr().out
    assert "64 → 64" in text
    assert "= 1.000 x needed" in text
    assert "estimate at 200 Gbit/s" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give either --preset"),
        (["--src", "a.json"], "Give either --preset"),
        (["--preset", "glm-5", "--src", "a.json"], "Give either --preset"),
        (["--src", "a.json", "--dst", "b.json"], "a.json: "),
        (["--preset", "glm-5", "--nic", "0"], "--nic 0.0 must be more than 0"),
    ],
)
def test_unusable_input_ends_with_status_2_and_a_reason(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_layouts_that_cannot_be_planned_and_figures_that_are_none_are_told(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep, empty = tmp_path / "deep.json", tmp_path / "empty.json"
    deep.write_text("[" * 100_000)
    empty.write_text(json.dumps({"ranks": []}))
    source, before = files[1], Path(files[1]).read_bytes()
    for arguments, message in (
        (["--src", str(deep), "--dst", files[3]], "deep.json: lists or objects are nested too deeply"),
        (["--src", str(empty), "--dst", str(empty)], "empty.json: no rank needs a tensor"),
        ([*files, "--nic", "nan"], "--nic nan must be more than 0"),
        ([*files, "--copies", source], "would overwrite the layout that is read"),
    ):
        assert main(["plan", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert Path(source).read_bytes() == before


def test_baselines_count_whole_tensors_for_every_rank_and_whole_layers_for_every_holder() -> None:
    model = replace(DENSE, num_hidden_layers=2)
    nbytes = sum(tensor.nbytes for tensor in full_layout(model).tensors.values())
    target = SGLang(model=model, tp=2).layout()
    flat = baselines(fsdp_layout(model, ranks=4), target)
    assert flat.bytes_broadcast == 2 * nbytes
    assert flat.bytes_allgather == 3 * nbytes
    assert baselines(full_layout(model, ranks=3), target).bytes_allgather == 0


def test_the_estimate_is_the_busiest_rank_over_its_nic_and_leaves_out_copies_within_a_host() -> None:
    source, target = fsdp_layout(DENSE, ranks=4), SGLang(model=DENSE, tp=2).layout()
    plan = make_plan(source, target)
    busiest = max(*plan.sent.values(), *plan.received.values())
    assert seconds(plan, source, target, nic_gbit_s=8).plan == pytest.approx(busiest / 1e9)
    here = Layout({rank: "trainer-0" for rank in target.hosts}, target.tensors)
    assert seconds(make_plan(source, here), source, here, nic_gbit_s=8).plan == 0
