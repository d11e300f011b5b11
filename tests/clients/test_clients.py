"""Agents that people use, unchanged, against `miles-tito serve`: what they do is recorded under its right name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]  # the first run installs the agents

CREATED = "Done: hello.txt created."


def kinds(result: dict[str, Any]) -> list[str]:
    return [node["kind"] for node in result["nodes"]]


def parents(result: dict[str, Any]) -> list[int | None]:
    return [node["parent"] for node in result["nodes"]]


def check_all_trained_once(result: dict[str, Any]) -> None:
    """Every sampled token of what was not left out is trained exactly once, under the episode's denominator."""
    left_out = {entry["node"] for entry in result["dropped"]}
    sampled = sum(node["num_completion_tokens"] for node in result["nodes"] if node["id"] not in left_out)
    assert sum(sample["loss_tokens"] for sample in result["samples"]) == sampled
    assert {sample["loss_denominator"] for sample in result["samples"]} == {sampled}


@pytest.mark.parametrize("agent", ["claude", "codex", "mini"])
def test_an_agent_makes_a_file_in_one_trajectory(agent: str, run_agent: Run):
    result = run_agent(agent, agent)
    assert result["file"] == "hello"
    assert kinds(result) == ["root", "turn"]
    [sample] = result["samples"]
    assert sample["text"].startswith("Creating the file.\n")
    check_all_trained_once(result)
    assert {version for node in result["nodes"] for _, _, version in node["versions"]} == {3}


def test_opencode_makes_a_file_and_its_title_call_is_left_out(run_agent: Run):
    result = run_agent("opencode", "opencode")
    assert result["file"] == "hello"
    assert sorted(kinds(result)) == ["root", "title", "turn"]
    [sample] = result["samples"]
    assert sample["kind"] == "main"
    assert sample["text"].endswith(CREATED)
    check_all_trained_once(result)
    assert [entry["why"] for entry in result["dropped"]] == ["title: the picker left it out."]


@pytest.mark.parametrize("agent", ["claude", "codex", "opencode"])
def test_an_engine_that_fails_once_costs_no_turn_and_adds_none(agent: str, run_agent: Run):
    result = run_agent(agent, agent, fail_at=1 if agent == "opencode" else 0)
    assert result["file"] == "hello"
    assert sorted(kind for kind in kinds(result) if kind != "title") == ["root", "turn"]
    assert result["num_discarded"] == 1
    [sample] = result["samples"]
    assert sample["text"].endswith(CREATED)
    check_all_trained_once(result)


@pytest.mark.parametrize("agent", ["claude", "codex"])
def test_a_sub_agent_is_a_trajectory_of_its_own_that_names_its_caller(agent: str, run_agent: Run):
    result = run_agent(agent, f"{agent}-subagent")
    assert result["file"] == "hello"
    assert sorted(sample["kind"] for sample in result["samples"]) == ["main", "subagent"]
    [called] = [node for node in result["nodes"] if node["kind"] == "subagent"]
    assert (called["parent"], called["origin"]) == (None, 0)
    assert sorted(kinds(result)).count("root") == 1
    check_all_trained_once(result)
    assert result["dropped"] == []


def test_claude_code_compacts_on_demand_and_both_sides_are_kept(run_agent: Run):
    result = run_agent("claude", "claude", "Now say thanks", "/compact", "And again")
    assert result["file"] == "hello"
    assert kinds(result) == ["root", "turn", "turn", "compaction", "compaction"]
    summary, restart = result["nodes"][3:]
    assert (summary["parent"], restart["parent"], restart["origin"]) == (1, None, 3)
    assert [sample["kind"] for sample in result["samples"]] == ["main", "compaction", "compaction"]
    check_all_trained_once(result)


def test_codex_compacts_when_its_context_is_full_and_both_sides_are_kept(run_agent: Run):
    result = run_agent("codex", "codex-long", compact_at=45_000)
    assert result["file"] == "hello"
    assert kinds(result) == ["root", "compaction", "compaction"]
    assert [node["origin"] for node in result["nodes"]] == [None, 0, 1]
    assert [sample["kind"] for sample in result["samples"]] == ["main", "compaction", "compaction"]
    check_all_trained_once(result)
