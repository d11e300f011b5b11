"""The examples that people copy."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from miles_envs import SingleTurn
from miles_tito.records import Outcome
from scripted_model import calls, ctx

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\b.*?\n(.*?)```", README, flags=re.DOTALL)
    assert found
    return found[1]


@pytest.mark.parametrize(("answer", "reward"), [("7", 1.0), ("8", 0.0)])
async def test_the_twenty_line_task_runs(scripted, policy, tmp_path, monkeypatch, answer, reward):
    assert len([line for line in block("python").splitlines() if line]) <= 20
    (tmp_path / "readme_shop.py").write_text(block("python"))
    monkeypatch.syspath_prepend(str(tmp_path))
    import readme_shop  # pyright: ignore[reportMissingImports]

    env = readme_shop.make()
    (first, _), (heldout,) = env.tasks("train"), env.tasks("heldout")
    model = scripted(calls(("count", '{"item": "apples"}')), answer)
    result = await env.run(first, policy, ctx())
    await env.aclose()
    assert (result.outcome, result.reward) == (Outcome.GRADED, reward)
    assert model.requests[1]["messages"][-1]["content"] == "7"
    assert heldout.task == {"label": 12}


async def test_the_task_without_python_runs(scripted, policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f'{{"prompt": "{i}+1?", "label": {i + 1}}}' for i in range(1000)]
    Path("problems.jsonl").write_text("\n".join(rows))
    config = tomllib.loads(block("toml"))["env"]
    assert config["target"] == "miles_envs:SingleTurn"
    env = SingleTurn(**config["args"])
    first, *others = env.tasks("heldout")
    assert (first.id, len(others)) == ("problems-900", 99)
    scripted(r"so \boxed{901}")
    assert (await env.run(first, policy, ctx())).reward == 1.0
    await env.aclose()
