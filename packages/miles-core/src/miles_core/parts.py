"""What an RL run is made of, as the run sees it: `cluster` makes each part of Ray actors, `chaos` of scripts.

trainers ──push──▶ fleet ◀── sessions ◀── workers
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from miles_rollout.dispatch import RunGroup
from miles_tito.errors import MilesError
from miles_tito.records import Prompt
from miles_train.config import TrainConfig
from miles_weightsync.config import PushConfig

from .config import ModelConfig
from .evaluation.dedicated import EvalServing
from .monitor.metering import Counters
from .run.loop import Sync, TrainerGroup

logger = logging.getLogger(__name__)

Note = Callable[[str, str, str], None]
"""Told what happened: kind of part, which one, what."""


class TrainerLost(MilesError, RuntimeError):
    """A trainer rank's process is gone, and with it the step it was in. The others cannot go on without it."""


class Trainers(TrainerGroup, Sync, Protocol):
    """Every trainer rank. Any method raises TrainerLost when a rank's process has died."""

    async def prepare_model(self, config: ModelConfig, out: Path) -> Path:
        """The given model folder, or the one that `model.builder` makes at `out`."""
        ...

    async def serving_folder(self, model: Path, out: Path) -> Path:
        """What engines start from: `model`, or its low-precision copy, made at `out`, where they hold codes."""
        ...

    async def setup(self, config: TrainConfig, model: Path) -> Any:
        """Load `model` into every rank; returns rank 0's layout."""
        ...

    async def load(self, path: Path) -> None:
        """Weights, moments, schedule, random states and version of a checkpoint."""
        ...

    async def connect(self, engines: Sequence[str], config: PushConfig) -> None:
        """Name the engines that `push` serves."""
        ...

    async def begin_save(self, path: Path) -> None:
        """Copy what a checkpoint holds; training may go on when this returns, and `path` is being written."""
        ...

    async def finish_save(self) -> None:
        """Wait until what `begin_save` started is on disk; raises what kept it from getting there."""
        ...

    async def export(self, path: Path) -> None:
        """Write a Hugging Face folder of the master weights."""
        ...

    async def export_serving(self, path: Path) -> None:
        """Write a Hugging Face folder of what engines hold: the same, but for a run in low precision."""
        ...

    async def restart(self) -> None:
        """New processes in place of all of them; `setup` comes next."""
        ...

    async def stop(self) -> None: ...


class Fleet(Protocol):
    """The engines, and what routes to them."""

    @property
    def url(self) -> str:
        """Where sessions send requests."""
        ...

    @property
    def urls(self) -> Sequence[str]:
        """Where weights are pushed to, one an engine."""
        ...

    async def start(self) -> None: ...

    async def watch(self) -> None:
        """Runs as long as the fleet can serve; raises when it cannot any more."""
        ...

    def metrics(self) -> dict[str, float]:
        """Engines by state, restarts."""
        ...

    async def stop(self) -> None: ...


class Sessions(Protocol):
    """The session servers."""

    async def start(self, engine_url: str, *, tokenizer: Path, family: str, max_context: int) -> None: ...

    async def counters(self) -> list[Counters]: ...

    async def stop(self) -> None: ...


class Workers(Protocol):
    """The processes that run environments."""

    @property
    def run_group(self) -> RunGroup:
        """Groups for training; durable in the spool when the reference comes back."""
        ...

    def evaluate_into(self, folder: Path | None) -> RunGroup:
        """Groups for evaluation: summaries only; their conversations are written to `folder`."""
        ...

    async def open(self) -> None:
        """Build the environment in every worker."""
        ...

    async def connect(self, sessions: Any) -> None: ...

    async def prompts(self, split: str, limit: int | None) -> list[Prompt]: ...

    async def stop(self) -> None: ...


class Parts(Protocol):
    """Makes the parts of one run; each is started, and in the end stopped, by the run."""

    def tell(self, note: Note) -> None:
        """Name who is told of what happens to the parts."""
        ...

    def trainers(self) -> Trainers: ...

    def fleet(self, model: Path) -> Fleet: ...

    def sessions(self) -> Sessions: ...

    def workers(self) -> Workers: ...

    def evaluation(self, model: Path) -> EvalServing:
        """Engines with `role = "eval"` and what belongs to them; started and stopped by the evaluation."""
        ...


async def stop_parts(parts: Sequence[Any]) -> None:
    """Stop every part at once; none keeps the others waiting, and none raises."""
    results = await asyncio.gather(*(part.stop() for part in parts), return_exceptions=True)
    for part, result in zip(parts, results, strict=True):
        if isinstance(result, BaseException):
            logger.warning("%s did not stop cleanly: %s: %s", type(part).__name__, type(result).__name__, result)
