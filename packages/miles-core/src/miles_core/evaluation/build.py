"""The evaluator that the configuration asks for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from miles_rollout.dispatch import RunGroup
from miles_rollout.producer import Gate
from miles_tito.records import Prompt

from miles_core.monitor import Monitor

from .background import BackgroundEvaluator, SnapshotScorer
from .config import EvalConfig
from .evaluator import Evaluator, SharedEvaluator
from .external import ExternalScorer
from .points import EvalLog
from .scoring import DatasetScorer, DedicatedScorer

if TYPE_CHECKING:
    from miles_core.cluster import EvalEngines
    from miles_core.durable.rundir import RunDir


async def build_evaluator(
    config: EvalConfig,
    *,
    run_dir: RunDir,
    log: EvalLog,
    monitor: Monitor,
    gate: Gate,
    idle: Callable[[], Awaitable[None]],
    prompts: Callable[[str, int | None], Awaitable[list[Prompt]]],
    run_group_into: Callable[[Path | None], RunGroup],
    export: Callable[[Path], Awaitable[None]],
    serving: Callable[[], EvalEngines],
) -> Evaluator:
    """Read the held-out prompts, and put the parts together; nothing is started.

    Args:
        prompts: reads a split of the environment; what it raises is the user's mistake and ends the run.
        idle: waits until no group of training runs.
        run_group_into: runs groups on the rollout engines.
        export: writes the present weights as engines hold them, as a Hugging Face folder.
        serving: makes engines of their own for the evaluation.
    """
    if not config.enabled:
        return Evaluator()
    scorer: SnapshotScorer
    if config.mode == "external":
        assert config.external is not None, "checked with the configuration"
        scorer = ExternalScorer(config.external, log=lambda step: run_dir.log / f"eval-step-{step:06d}.log")
    else:
        heldout = {name: await prompts(d.split, d.num_prompts) for name, d in config.all_datasets.items()}
        datasets = DatasetScorer(
            config.all_datasets, prompts=heldout, conversations=run_dir.evaluations, keep=config.keep
        )
        if config.mode == "shared":
            return SharedEvaluator(
                datasets,
                run_group_into=run_group_into,
                gate=gate,
                idle=idle,
                log=log,
                timeout_s=config.timeout_s,
            )
        scorer = DedicatedScorer(datasets, serving=serving)
    return BackgroundEvaluator(
        scorer,
        snapshots=run_dir.evaluations / "snapshots",
        export=export,
        log=log,
        log_late=monitor.log_late,
        overlap=config.overlap,
        timeout_s=config.timeout_s,
    )
