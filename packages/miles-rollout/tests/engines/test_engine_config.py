from __future__ import annotations

from typing import Any

import pytest
from miles_rollout.engines import EngineConfig, EngineConfigError, resolve_device
from miles_rollout.engines.command import core_groups, server_command, server_environment
from miles_rollout.engines.config import RESERVED, to_arguments


def command(config: EngineConfig) -> list[str]:
    return server_command(config, model_path="/m", host="127.0.0.1", port=1234, weight_version=7)


def value_of(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_options_become_the_arguments_that_sglang_parses():
    options = {
        "enable_metrics": True,
        "disable-radix-cache": False,
        "mem-fraction-static": 0.8,
        "cuda-graph-bs": [1, 2, 4],
        "load-format": "dummy",
    }
    assert to_arguments(options) == [
        *("--enable-metrics", "--mem-fraction-static", "0.8"),
        *("--cuda-graph-bs", "1", "2", "4", "--load-format", "dummy"),
    ]


def test_the_cpu_launcher_gets_float32_a_bounded_cache_and_the_version():
    arguments = command(EngineConfig(device="cpu", context_length=512))
    assert arguments[1:3] == ["-m", "miles_rollout.engines.sglang_cpu"]
    wanted = {
        "--model-path": "/m",
        "--host": "127.0.0.1",
        "--port": "1234",
        "--weight-version": "7",
        "--dtype": "float32",
        "--max-total-tokens": "32768",
        "--context-length": "512",
    }
    assert {flag: value_of(arguments, flag) for flag in wanted} == wanted
    assert "--sleep-on-idle" in arguments


def test_the_stock_server_runs_on_a_gpu_with_every_option_and_no_cpu_default():
    arguments = command(EngineConfig(device="cuda", tp=2, dp=4, options={"mem_fraction_static": 0.7}))
    assert arguments[1:3] == ["-m", "sglang.launch_server"]
    assert value_of(arguments, "--tp-size") == "2"
    assert value_of(arguments, "--dp-size") == "4"
    assert value_of(arguments, "--mem-fraction-static") == "0.7"
    assert not {"--dtype", "--max-total-tokens", "--sleep-on-idle"} & set(arguments)


def test_an_option_of_the_user_wins_over_a_default():
    assert "--sleep-on-idle" not in command(EngineConfig(device="cpu", options={"sleep_on_idle": False}))


@pytest.mark.parametrize("key", [*RESERVED, "model_path", "--port"])
def test_options_that_miles_sets_are_refused_with_the_reason(key: str):
    with pytest.raises(EngineConfigError, match="cannot be set: "):
        EngineConfig(options={key: "x"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"count": 0}, "`count` is 0; it must be at least 1"),
        ({"threads": -1}, "`threads` is -1"),
        ({"start_timeout_s": 0.0}, r"`start_timeout_s` is 0\.0"),
        ({"urls": ("host:1",)}, "'host:1' does not start with http"),
        ({"urls": ("http://a", "http://a/")}, "names a server twice"),
        ({"urls": ("http://a",), "options": {"x": 1}}, "`options` have no effect on the 1 servers"),
    ],
)
def test_a_table_that_cannot_be_is_refused_with_its_numbers(fields: dict[str, Any], message: str):
    with pytest.raises(EngineConfigError, match=message):
        EngineConfig(**fields)


def test_external_servers_are_counted_instead_of_count():
    assert EngineConfig(urls=("http://a/", "http://b")).num_servers == 2
    assert EngineConfig(urls=("http://a/", "http://b")).urls == ("http://a", "http://b")
    assert EngineConfig(count=3).num_servers == 3


def test_cores_are_shared_by_the_servers_of_a_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert server_environment(EngineConfig(device="cpu", count=3), model_path="m")["OMP_NUM_THREADS"] == "2"
    assert server_environment(EngineConfig(device="cpu", threads=5), model_path="m")["OMP_NUM_THREADS"] == "5"
    assert (
        server_environment(EngineConfig(device="cpu", env={"OMP_NUM_THREADS": "9"}), model_path="m")["OMP_NUM_THREADS"]
        == "9"
    )


@pytest.mark.parametrize(
    ("cores", "ranks", "groups"),
    [([0, 1, 2, 3], 2, "0,1|2,3"), ([0, 1], 2, "0|1"), ([4, 5, 6], 2, "4|5,6"), ([0, 1], 4, "0|0|1|1")],
)
def test_every_rank_of_a_cpu_server_has_cores(cores: list[int], ranks: int, groups: str):
    assert core_groups(cores, ranks) == groups


def test_a_server_of_several_ranks_is_told_their_cores():
    environment = server_environment(EngineConfig(device="cpu", tp=2), model_path="m")
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in server_environment(EngineConfig(device="cpu"), model_path="m")


def test_a_hidden_gpu_is_no_gpu():
    assert resolve_device("auto", {"CUDA_VISIBLE_DEVICES": ""}) == "cpu"
    assert resolve_device("cuda", {"CUDA_VISIBLE_DEVICES": ""}) == "cuda"
