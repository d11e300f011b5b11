"""Everything that a configuration names by import string is tried before anything starts, and nothing is called."""

from __future__ import annotations

import subprocess
import sys

import pytest
from miles_core.config import ConfigError, load_config
from miles_core.config.plugins import check_plugins

OWN = """
from miles_core.monitor import Monitor

def env(): ...
def build(path, *, size): ...
def data(n=1): ...
def score(checkpoint, step): ...
def advantage(rewards, *, scale): ...
def policy(group, *, staleness, max_staleness): ...
def loss(inputs, *, coef): ...
def trainer(model_path, *, rank, init_method, depth): ...
class Mine(Monitor):
    def __init__(self, run, *, url): ...
number = 3
"""


@pytest.fixture(autouse=True)
def own_code(tmp_path, monkeypatch):
    (tmp_path / "own_code.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_code", raising=False)


def problems_of(*words: str, kind=None) -> list[str]:
    loaded = load_config(words)
    try:
        check_plugins(loaded.config, kind, sources=loaded.sources)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_what_fits_passes():
    assert not problems_of(
        *("--env.target", "own_code:env", "--sft.data", "own_code:data", "--sft.data-args.n", "3"),
        *("--model.builder", "own_code:build", "--model.builder-args.size", "3"),
        *("--eval.mode", "external", "--eval.external", "own_code:score"),
        *("--rollout.advantage", "own_code:advantage", "--rollout.advantage.args.scale", "2"),
        *("--rollout.put-policy", "own_code:policy"),
        *("--train.loss.kind", "own_code:loss", "--train.loss.args.coef", "2"),
        *("--train.backend", "own_code:trainer", "--train.backend-args.depth", "2"),
        *("--monitor.custom", '[{name = "own_code:Mine", args = {url = "x"}}]'),
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--env.target", "own_code:evn"),
            "--env.target is 'own_code:evn' but own_code has no 'evn'. Did",
        ),
        (("--env.target", "own_code:number"), "--env.target is 'own_code:number', a int that cannot be called."),
        (("--env.target", "own_code:env", "--env.args.x", "1"), "got an unexpected keyword argument 'x'"),
        (("--env.target", "env"), "--env.target is 'env'; write it as \"package.module:attribute\"."),
        (("--model.builder", "own_code:build"), "--model.builder is 'own_code:build' and takes (path, *, size)"),
        (("--sft.data", "own_code:data", "--sft.data-args.m", "1"), "got an unexpected keyword argument 'm'"),
        (
            ("--eval.mode", "external", "--eval.external", "own_code:env"),
            "--eval.external is 'own_code:env' and takes ()",
        ),
        (("--rollout.advantage", "own_code:advantage"), "--rollout.advantage is 'own_code:advantage' and takes"),
        (("--rollout.advantage.name", "own_code:advantage"), "--rollout.advantage.name: rollout.advantage is"),
        (("--rollout.filter", "own_code:fliter"), "--rollout.filter is 'own_code:fliter' but own_code has no"),
        (("--rollout.take-policy", "own_code:env"), "--rollout.take-policy is 'own_code:env' and takes ()"),
        (("--rollout.failure-policy", "no_such:f"), "--rollout.failure-policy is 'no_such:f' but there is no module"),
        (("--train.loss.kind", "own_code:lost"), "--train.loss.kind is 'own_code:lost' but own_code has no 'lost'"),
        (("--train.loss.kind", "own_code:loss"), "--train.loss.kind is 'own_code:loss' and takes (inputs, *, coef)"),
        (
            ("--train.backend", "own_code:trainer"),
            "--train.backend is 'own_code:trainer' and takes (model_path",
        ),
        (("--monitor.custom", '["own_code:Mine"]'), "--monitor.custom is 'own_code:Mine' and takes (run, *, url)"),
        (("--model.builder", "miles_train.models.tiny:build_tinny"), "has no 'build_tinny'. Did you mean build_tiny?"),
    ],
)
def test_what_does_not_fit_is_told_with_who_said_it(words, told):
    (problem,) = problems_of(*words)
    assert told in problem


def test_all_of_it_is_told_at_once_and_sft_runs_no_environments():
    words = ("--env.target", "no_such:env", "--sft.data", "no_such:data", "--rollout.filter", "no_such:filter")
    assert len(problems_of(*words)) == 3
    assert len(problems_of(*words, kind="rl")) == 3
    (problem,) = problems_of(*words, kind="sft")
    assert problem.startswith("--sft.data")


def test_an_error_inside_the_users_module_is_not_hidden(tmp_path):
    (tmp_path / "broken_code.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        problems_of("--env.target", "broken_code:env")


def test_the_driver_does_not_import_torch_for_what_miles_ships():
    code = (
        "import sys\nfrom miles_core.config import load_config\nfrom miles_core.config.plugins import check_plugins\n"
        "check_plugins(load_config(['@', 'quickstart']).config, 'rl')\nprint('torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "False"
