"""How `miles rl` ends when somebody presses Ctrl-C or something is wrong: soon, with the right status, leaving nothing.

The command runs as a shell would start it, with Ray, sessions, a trainer and a worker; the engine is a scripted server
in this process, attached by its URL.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from fake_sglang import FakeSGLang
from miles_command import START_S, Command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def test_ctrl_c_in_the_middle_of_a_run_ends_it_and_accounts_for_every_group(
    miles: Callable[..., Command], engine: FakeSGLang
) -> None:
    command = miles()
    command.wait_until(lambda: command.steps >= 2)
    status, output = command.interrupt()
    assert command.processes() == []
    assert status == 130, output
    summary = command.summary()
    assert (summary["status"], summary["error"]) == ("interrupted", None)
    assert summary["steps"] == command.steps
    fates = summary["fates"]
    assert fates["trained"] == 2 * command.steps
    assert fates["in_flight"] >= 2, "some were asleep, and a resumed run takes them up"
    fates_of_all = ("trained", "filtered", "stale", "failed", "aborted", "in_flight")
    assert fates["issued"] == sum(fates[fate] for fate in fates_of_all)
    assert (fates["aborted"], fates["twice"]) == (0, 0)
    assert f"interrupted after {command.steps} steps" in output
    page = (command.run_dir / "report.html").read_text(encoding="utf-8")
    assert [title for title in ("Fates", "Where the time went", "Timeline") if f"<h2>{title}</h2>" not in page] == []
    assert not engine.is_paused, "the engine is left as it was"
    assert int(engine.version) >= command.steps


@pytest.mark.parametrize("moment", ["while Ray starts", "while the engine starts"])
def test_ctrl_c_during_the_start_ends_it(miles: Callable[..., Command], engine: FakeSGLang, moment: str) -> None:
    engine.is_starting = True
    command = miles()
    if moment == "while Ray starts":
        command.wait_until((command.run_dir / "log" / "driver.log").exists)
        status, output = command.interrupt(within_s=START_S)  # Ray cannot be interrupted; it starts, and then stops
    else:
        command.wait_until(lambda: "/model_info" in engine.paths)
        status, output = command.interrupt()
    assert command.processes() == []
    assert status == 130, output
    assert command.summary()["status"] == "interrupted"
    assert "Traceback" not in output


def test_an_engine_that_nobody_answers_for_is_told_with_its_address(miles: Callable[..., Command]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    command = miles("--engines.rollout.urls", f'["{url}"]', "--engines.rollout.start_timeout_s", "2")
    status, output = command.end(START_S)
    assert command.processes() == []
    assert status == 1, output
    assert f"No SGLang server answers at {url}" in output
    assert "Traceback" not in output
    assert command.summary()["status"] == "failed"


def test_a_wrong_import_string_is_told_before_anything_starts(
    miles: Callable[..., Command], engine: FakeSGLang
) -> None:
    engine.is_starting = True
    command = miles("--env.target", "nap:Naping")
    status, output = command.end(START_S)
    assert command.processes() == []
    assert status == 2, output
    assert "--env.target is 'nap:Naping' but nap has no 'Naping'. Did you mean Napping?" in output
    assert "Traceback" not in output
    assert not command.run_dir.exists()
