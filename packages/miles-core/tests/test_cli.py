from __future__ import annotations

import subprocess
import sys
import types

import pytest
from miles_core import cli
from miles_core.config import Config, load_config, to_dict
from miles_core.durable import rundir
from miles_core.durable.rundir import RunDir
from miles_core.monitor import JsonlMonitor


@pytest.fixture(autouse=True)
def own_import_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What `miles_core.run.command.main` was called with; it returns 7. Runs go to a folder of the test's."""
    calls: list[tuple[Config, str]] = []
    monkeypatch.chdir(tmp_path)

    def main(config: Config, kind: str, run_dir: RunDir) -> int:
        assert run_dir.path.is_relative_to(tmp_path)
        calls.append((config, kind))
        return 7

    monkeypatch.setitem(sys.modules, "miles_core.run.command", types.SimpleNamespace(main=main))
    return calls


@pytest.mark.parametrize("words", [["--help"], ["rl", "--help"], ["--version"], []])
def test_help_imports_nothing_heavy(words):
    code = (
        "import sys\n"
        "from miles_core.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'pydantic', 'ray', 'torch', 'numpy', 'rich', 'msgspec', 'tokenizers', 'httpx', 'miles_tito'}\n"
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"


def test_configuration_report_doctor_and_plan_need_neither_torch_nor_ray():
    code = (
        "import sys, miles_core.config, miles_core.report, miles_core.doctor\n"
        "import miles_core.run.dry_run, miles_core.monitor\n"
        "miles_core.config.load_config([])\n"
        "print(sorted({'torch', 'ray', 'transformers', 'sglang'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_a_run_starts_with_the_configuration_and_its_exit_status_is_the_command_s(started):
    words = ["rl", "--model.path", "m", "--env.target", "builtins:dict", "--rollout.group-size", "4"]
    assert cli.main(words) == 7
    ((config, kind),) = started
    assert (config.rollout.group_size, kind) == (4, "rl")


def test_sft_is_the_same_command_with_another_kind(started):
    assert cli.main(["sft", "--model.path", "m", "--sft.steps", "2", "--sft.data", "builtins:list"]) == 7
    assert started[0][1] == "sft"


def test_quickstart_is_its_recipe_and_takes_overrides(started):
    assert cli.main(["quickstart", "--run.steps", "3"]) == 7
    ((config, kind),) = started
    assert (config.run.steps, kind) == (3, "rl")
    assert config.env.target is not None


def test_a_wrong_configuration_starts_nothing_and_exits_with_2(started, capsys):
    assert cli.main(["rl", "--run.stepps", "3"]) == 2
    assert "--run.stepps is no key. Did you mean run.steps?" in capsys.readouterr().err
    assert started == []


def test_ctrl_c_exits_with_130(started, monkeypatch):
    def interrupted(config, kind, run_dir):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["miles_core.run.command"], "main", interrupted)
    assert cli.main(["rl", "--model.path", "m", "--env.target", "builtins:dict"]) == 130


def test_an_error_raised_on_purpose_has_no_traceback_and_exits_with_1(capsys):
    assert cli.main(["report", "/nowhere/run"]) == 1
    assert "/nowhere/run is not a directory" in capsys.readouterr().err


def test_an_unknown_command_or_word_exits_with_2(capsys):
    for words in (["trian"], ["report", "x", "--fast"]):
        with pytest.raises(SystemExit) as exited:
            cli.main(words)
        assert exited.value.code == 2
    assert "`miles report` does not know: --fast" in capsys.readouterr().err
    assert cli.main([]) == 2


def test_report_prints_the_path_of_the_page(tmp_path, capsys):
    JsonlMonitor(tmp_path).log(1, {"reward/mean": 0.5})
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")


def test_config_prints_toml_that_loads_back(tmp_path, capsys):
    assert cli.main(["config", "--rollout.group-size", "4", "--explain"]) == 0
    file = tmp_path / "resolved.toml"
    file.write_text(capsys.readouterr().out)
    assert cli.main(["config", "@", str(file)]) == 0
    assert f"group_size = 4  # {file}" in capsys.readouterr().out


def test_config_docs_is_the_reference(capsys):
    assert cli.main(["config", "--docs"]) == 0
    assert "| `rollout.max_staleness` | whole number | `1` |" in capsys.readouterr().out


def test_a_dry_run_shows_the_plan_and_starts_nothing(started, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_task.py").write_text("def make(): ...\n")
    (tmp_path / "my.toml").write_text('[model]\npath = "m"\n[env]\ntarget = "my_task:make"\n')
    assert cli.main(["rl", "@", "my.toml", "--dry-run", "--train.ranks", "2"]) == 0
    assert "trainer rank               2" in capsys.readouterr().out
    assert cli.main(["rl", "@", "my.toml", "--dry-run", "--env.target", "my_task:mak"]) == 2
    assert "Did you mean make?" in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize("command", [["rl", "--dry-run"], ["sft"], ["quickstart"]])
def test_plugins_that_cannot_be_used_start_nothing_and_exit_with_2(started, tmp_path, capsys, command):
    (tmp_path / "my_model.py").write_text("def build(path, *, size=1): ...\n")
    (tmp_path / "my.toml").write_text('[sft]\nsteps = 1\ndata = "no_such:data"\n[env]\ntarget = "builtins:dict"\n')
    words = ["@", "my.toml", "--model.builder", "my_model:build", "--model.builder-args.siez", "3"]
    assert cli.main([*command, *words]) == 2
    told = capsys.readouterr().err
    assert "2 problems in the configuration:" in told
    assert "my.toml: sft.data is 'no_such:data' but there is no module 'no_such'." in told
    assert "--model.builder is 'my_model:build' and takes (path, *, size=1), which" in told
    assert "got an unexpected keyword argument 'siez'" in told
    assert started == []
    assert not (tmp_path / "runs").exists(), "a run has a directory once it can start"


def test_a_run_whose_code_is_gone_does_not_go_on_and_keeps_its_configuration(started, tmp_path, capsys):
    config = load_config(["--model.path", "m", "--env.target", "my_old_task:make"], kind="rl").config
    run_dir = rundir.create(tmp_path, "run", config=to_dict(config), kind="rl")
    assert run_dir.lock is not None
    run_dir.lock.release()
    before = (run_dir.path / rundir.CONFIG).read_text()
    assert cli.main(["resume", str(run_dir.path), "--workers.count", "2"]) == 2
    told = "config.json: env.target is 'my_old_task:make' but there is no module 'my_old_task'."
    assert told in capsys.readouterr().err
    assert (run_dir.path / rundir.CONFIG).read_text() == before
    assert started == []


def test_warnings_go_to_stderr(started, capsys):
    cli.main(
        ["rl", "--model.path", "m", "--env.target", "builtins:dict", "--eval.at-start=false", "--eval.at-end=false"]
    )
    assert "warning: eval is off" in capsys.readouterr().err


def test_chaos_says_where_it_went(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chaos", "--seeds", "200"]) == cli.WRONG
    assert "`make chaos SEEDS=200`" in capsys.readouterr().err
