from __future__ import annotations

import json
import resource
import shutil
import socket
import sys
from collections import namedtuple
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from miles_core import cli
from miles_core.config import Config, ModelConfig, RunConfig, load_config
from miles_core.doctor import CheckResult, checks, diagnose, to_json, to_text
from miles_rollout.engines import EngineVersionError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

GIB = 2**30


def levels(findings) -> list[str]:
    return [finding.level for finding in findings]


@pytest.fixture(autouse=True)
def no_torch(monkeypatch):
    """Importing torch in a process of its own takes seconds; one test of its own does it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(checks, "torch", lambda config: [CheckResult(check="torch", level="ok", message="")])


@pytest.fixture
def disk_of(monkeypatch):
    usage = namedtuple("usage", "total used free")

    def set_free(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, free))

    return set_free


@pytest.mark.parametrize(("version", "level"), [((3, 10, 9), "fail"), ((3, 11, 0), "ok"), ((3, 13, 1), "ok")])
def test_an_old_python_fails(version, level):
    assert levels(checks.python(version)) == [level]


@pytest.mark.parametrize(("free", "level"), [(64 * 2**20, "fail"), (GIB, "warn"), (8 * GIB, "ok")])
def test_no_space_in_shared_memory_is_found_with_the_fix(disk_of, free, level):
    disk_of(free)
    (finding,) = checks.shared_memory(Config())
    assert finding.level == level
    assert "weight buckets and Ray's object store want 1.5 GiB" in finding.message
    if level != "ok":
        assert "docker run --shm-size=2g" in finding.fix


def test_updates_by_disk_need_no_buckets_in_shared_memory(disk_of):
    disk_of(int(1.2 * GIB))
    assert levels(checks.shared_memory(load_config(["--sync.way", "disk"]).config)) == ["ok"]
    assert levels(checks.shared_memory(Config())) == ["warn"]


def test_a_full_or_unwritable_disk_is_found(disk_of, tmp_path):
    def into(directory: object) -> Config:
        return replace(Config(), run=RunConfig(dir=str(directory)))

    disk_of(GIB)
    assert levels(checks.disk(into(tmp_path / "runs" / "deeper"))) == ["warn"]
    disk_of(0)
    assert levels(checks.disk(into(tmp_path))) == ["fail"]
    (finding,) = checks.disk(into("/proc/runs"))
    assert "/proc cannot be written to" in finding.message


def test_a_disk_without_room_for_the_checkpoints_is_found(disk_of, tmp_path):
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 100_000}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    config = replace(Config(), run=RunConfig(dir=str(tmp_path)), model=ModelConfig(path=str(tmp_path)))
    disk_of(22 * GIB)
    (finding,) = checks.disk(config)
    assert finding.level == "warn"
    assert "22.0 GiB free" in finding.message
    assert "; checkpoints take 20.4 GiB" in finding.message
    assert "checkpoint.keep" in finding.fix
    disk_of(GIB)
    assert levels(checks.disk(config)) == ["fail"]


def test_a_port_in_use_is_found_and_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        words = ["--engines.rollout.options.nccl-port", str(port)]
        (finding,) = checks.ports(load_config(words).config)
        assert finding.level == "fail"
        assert f"port {port} of engines.rollout.options.nccl-port is in use" in finding.message
        assert f"sport = :{port}" in finding.fix
    assert levels(checks.ports(load_config(words).config)) == ["ok"]


def test_a_server_that_should_run_already_and_does_not_is_found():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = ["--engines.rollout.urls", f'["http://127.0.0.1:{port}"]']
    (finding,) = checks.ports(load_config(words).config)
    assert finding.level == "fail"
    assert f"http://127.0.0.1:{port} of engines.rollout does not answer" in finding.message


def test_few_open_files_warn_with_the_number(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    (finding,) = checks.open_files(Config())
    assert (finding.level, finding.fix.split(",")[0]) == ("warn", "ulimit -n 3072")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    assert levels(checks.open_files(Config())) == ["ok"]


def test_little_memory_warns(monkeypatch):
    monkeypatch.setattr(checks, "available_memory", lambda: GIB)
    assert levels(checks.memory(Config())) == ["warn"]
    monkeypatch.setattr(checks, "available_memory", lambda: 16 * GIB)
    assert levels(checks.memory(Config())) == ["ok"]


@pytest.mark.parametrize("state", ["is not installed; Miles runs SGLang 0.5.23", "0.4.0 is installed"])
def test_a_missing_or_wrong_sglang_is_found_with_the_command(monkeypatch, state):
    def refuse(device):
        raise EngineVersionError(f"SGLang {state}. Install it: pip install sglang=={device}")

    monkeypatch.setattr(checks, "check_sglang", refuse)
    (finding,) = checks.sglang(load_config(["--engines.rollout.device", "cpu"]).config)
    assert finding == CheckResult(
        check="sglang", level="fail", message=f"SGLang {state}", fix="pip install sglang==cpu"
    )


def test_a_missing_router_only_warns_until_two_engines_need_it(monkeypatch):
    def refuse():
        raise EngineVersionError("smg is not installed. Install it: pip install smg")

    monkeypatch.setattr(checks, "check_smg", refuse)
    assert levels(checks.router(Config())) == ["warn"]
    assert levels(checks.router(load_config(["--engines.rollout.count", "2"]).config)) == ["fail"]


@pytest.fixture
def packages_are(monkeypatch):
    """`packages_are(versions, declared)`: what is installed, and what packages say that they require."""

    def are(versions: dict[str, str], declared: dict[str, list[str]]) -> None:
        monkeypatch.setattr(checks, "installed", versions.get)
        monkeypatch.setattr(metadata, "requires", declared.get)

    return are


def test_a_mismatched_megatron_is_named_with_both_versions_and_the_command(packages_are):
    versions = {"miles-train": "0.1.0", "megatron-core": "0.15.3", "numpy": "2.1.0"}
    declared = {
        "miles-train": ["numpy>=2.0", "megatron-core>=0.16.1; extra == 'megatron'", "gguf>=0.17; extra == 'smollm2'"]
    }
    packages_are(versions, declared)
    (finding,) = checks.requirements()
    assert finding.message == "megatron-core 0.15.3 is installed, but miles-train needs megatron-core>=0.16.1"
    assert finding.fix == "uv pip install 'megatron-core>=0.16.1'"


def test_a_missing_requirement_fails_and_a_missing_extra_does_not(packages_are):
    declared = {"miles-core": ["ray>=2.50", "wandb>=0.19; extra == 'wandb'"]}
    packages_are({"miles-core": "0.1.0"}, declared)
    (finding,) = checks.requirements()
    assert finding.message == "ray is not installed, but miles-core needs ray>=2.50"
    assert levels(checks.ray()) == ["fail"]
    packages_are({"miles-core": "0.1.0", "ray": "2.60.0"}, declared)
    (fine,) = checks.requirements()
    assert fine.level == "ok"


@pytest.mark.parametrize(
    ("code", "words", "level", "told"),
    [
        ("print('2.13.0+cpu 0')", ["--train.device", "cpu"], "ok", "torch 2.13.0+cpu on the CPU"),
        ("print('2.14.0 8')", [], "ok", "with 8 GPUs"),
        ("print('2.13.0+cpu 0')", ["--train.device", "cuda"], "fail", "sees no GPU"),
        ("raise ImportError('libc10.so: no such file')", [], "fail", "libc10.so: no such file"),
    ],
)
def test_torch_is_asked_in_a_process_of_its_own(monkeypatch, code, words, level, told):
    monkeypatch.undo()
    monkeypatch.setattr(checks, "ASK_TORCH", code)
    (finding,) = checks.torch(load_config(words).config)
    assert finding.level == level
    assert told in finding.message


APPEND_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COUNTS_MESSAGES = "{{ messages | length }} messages\n" + APPEND_ONLY


@pytest.fixture
def model(tmp_path):
    """`model(template)` -> a folder with a byte-level tokenizer and that chat template."""

    def write(chat_template: str) -> str:
        alphabet = {text: i for i, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        settings = {"chat_template": chat_template, "eos_token": "<|im_end|>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return str(tmp_path)

    return write


def test_a_template_that_is_append_only_passes(model):
    findings = list(checks.template(Path(model(APPEND_ONLY)), family="auto"))
    assert "fail" not in levels(findings)
    assert "is append-only in" in findings[-1].message


def test_a_template_that_rewrites_earlier_turns_is_found_with_the_case(model):
    findings = [f for f in checks.template(Path(model(COUNTS_MESSAGES)), family="auto") if f.level == "fail"]
    assert findings
    assert all("not append-only" in finding.message and "chat_template" in finding.fix for finding in findings)


def test_a_folder_without_a_tokenizer_fails(tmp_path):
    (finding,) = checks.template(tmp_path, family="auto")
    assert (finding.level, finding.check) == ("fail", "template")


def test_a_configuration_that_does_not_resolve_is_a_finding_and_the_other_checks_still_run():
    findings = diagnose(["--run.nmae", "x"])
    assert findings[0].message == "--run.nmae is no key. Did you mean run.name?"
    assert {"python", "sglang", "ports"} <= {finding.check for finding in findings}


def test_a_check_that_breaks_hides_no_other(monkeypatch):
    def broken(config):
        raise RuntimeError("no /proc here")

    monkeypatch.setattr(checks, "memory", broken)
    findings = diagnose([])
    assert "the check itself failed: RuntimeError: no /proc here" in [f.message for f in findings]
    assert findings[-1].check == "open files"


def test_the_command_fails_when_a_check_does_and_prints_json(capsys, monkeypatch):
    broken = [CheckResult(check="sglang", level="fail", message="missing", fix="install it")]
    monkeypatch.setattr("miles_core.doctor.diagnose", lambda words, model: broken)
    assert cli.main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == [
        {"check": "sglang", "level": "fail", "message": "missing", "fix": "install it"}
    ]
    assert to_json([]) == "[]"


def test_the_text_names_the_fix_below_the_finding():
    text = to_text(
        [
            CheckResult(check="python", level="ok", message="3.11"),
            CheckResult(check="disk", level="warn", message="little", fix="free some"),
        ]
    )
    assert text.splitlines() == [
        "ok    python  3.11",
        "warn  disk    little",
        "              fix: free some",
        "",
        "a run can start, 1 warnings",
    ]
