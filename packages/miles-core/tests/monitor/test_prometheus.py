"""The endpoint that Prometheus scrapes, read with the real client library's parser."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from miles_core.monitor import MonitoredRun
from miles_core.monitor.base import RunSummary
from miles_core.monitor.config import PrometheusConfig
from miles_core.monitor.prometheus import PrometheusError, PrometheusMonitor
from prometheus_client.parser import text_string_to_metric_families


def monitor_of(name: str, *, port: int) -> PrometheusMonitor:
    run = MonitoredRun(path=Path("runs") / name, total_steps=4, config={})
    return PrometheusMonitor(run, config=PrometheusConfig(enabled=True, port=port))


def scrape(url: str) -> dict[str, tuple[float, dict[str, str]]]:
    with urllib.request.urlopen(url, timeout=5) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {sample.name: (sample.value, sample.labels) for family in families for sample in family.samples}


def test_the_latest_value_of_every_metric_is_exposed_under_the_run() -> None:
    monitor = monitor_of('night "run"', port=0)
    try:
        assert scrape(monitor.url) == {}
        monitor.log(3, {"reward/mean": 0.25, "eval/pass@8": 0.5, "loss/total": float("nan")})
        monitor.log(4, {"reward/mean": 0.75})
        found = scrape(monitor.url)
    finally:
        monitor.finish(RunSummary(status="finished", steps=4, seconds=1.0))
    assert found["miles_reward_mean"] == (0.75, {"run": 'night "run"'})
    assert found["miles_step"][0] == 4
    assert found["miles_eval_pass_8"][0] == 0.5
    assert found["miles_loss_total"][0] != found["miles_loss_total"][0], "not a number stays one"


def test_the_port_is_free_again_after_the_run_and_a_taken_one_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PrometheusError, match=f"127.0.0.1:{port}.*monitor.prometheus.port"):
            monitor_of("run", port=port)
    first = monitor_of("run", port=0)
    port = int(first.url.split(":")[2].split("/")[0])
    first.finish(RunSummary(status="finished", steps=0, seconds=0.0))
    monitor_of("run", port=port).finish(RunSummary(status="finished", steps=0, seconds=0.0))
