"""A `/metrics` endpoint with the latest value of everything, for Prometheus to scrape."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from miles_tito.errors import MilesError, MissingDependency

from .base import Monitor, MonitoredRun, RunSummary
from .config import PrometheusConfig
from .names import describe

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import GaugeMetricFamily
except ImportError as error:
    raise MissingDependency(
        "`monitor.prometheus` needs the prometheus_client package: pip install 'miles-core[prometheus]'"
    ) from error

logger = logging.getLogger(__name__)


class PrometheusError(MilesError, OSError):
    """The endpoint cannot be opened."""


class PrometheusMonitor(Monitor):
    """Gauges `miles_<part>_<what>{run="<name>"}`; a metric that a step does not report keeps its last value."""

    def __init__(self, run: MonitoredRun, *, config: PrometheusConfig) -> None:
        """
        Raises:
            PrometheusError: the port is taken.
        """
        self._run_name = run.name
        self._latest: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(config.port, addr=config.host, registry=registry)
        except OSError as error:
            raise PrometheusError(
                f"No metrics endpoint at {config.host}:{config.port}: {error}. Set `monitor.prometheus.port` to a free "
                "port, or to 0 for any."
            ) from error
        self.url = f"http://{config.host}:{self._server.server_port}/metrics"
        logger.info("Prometheus metrics at %s", self.url)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.log_late(step, {**metrics, "step": step})

    def log_late(self, step: int, metrics: Mapping[str, float]) -> None:
        # a new dict: a scrape in another thread sees one step or the next
        self._latest = self._latest | {name: float(value) for name, value in metrics.items()}

    def finish(self, summary: RunSummary) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Any:
        """Called by prometheus_client at every scrape."""
        for name, value in sorted(self._latest.items()):
            exposed = "miles_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)  # `logprob_gap/mean`: miles_logprob_gap_mean
            family = GaugeMetricFamily(exposed, describe(name) or name, labels=["run"])
            family.add_metric([self._run_name], value)
            yield family
