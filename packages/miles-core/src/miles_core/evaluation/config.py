"""The `[eval]` section: what is evaluated, when, and on which engines."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from miles_tito.records import Sampling
from miles_tito.shared.settings import SettingError, at_least, require

EvalConfigError = SettingError
"""The name that the error of this section had before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """One set of problems, `[eval.datasets.NAME]`."""

    split: str = "heldout"
    """The environment's split to draw problems from."""
    num_prompts: int | None = None
    """Problems to use of it; none uses all."""
    samples_per_prompt: int = 1
    """Episodes of each problem: avg@k and pass@k are taken over them."""
    success_reward: float = 1.0
    """A reward of at least this much is a pass, for pass@k."""
    sampling: Sampling | None = None
    """How the policy samples; none samples as in training."""

    def __post_init__(self) -> None:
        at_least(self, 1, "num_prompts", "samples_per_prompt")
        require(math.isfinite(self.success_reward), "success_reward", self.success_reward, "a finite number")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Scores on problems that are never trained on."""

    every: int = 0
    """Steps between evaluations; 0 evaluates only at the start and the end."""
    at_start: bool = True
    """Evaluate the weights that training starts from."""
    at_end: bool = True
    """Evaluate the last weights."""
    mode: Literal["shared", "dedicated", "external"] = "shared"
    """Who evaluates. `shared`: the rollout engines, while training waits. `dedicated`: the engines of a table with
    `role = "eval"`, from a snapshot of the weights, while training goes on. `external`: code of yours that gets the
    snapshot."""
    overlap: Literal["backpressure", "skip"] = "backpressure"
    """When an evaluation is due and the one before still runs: `backpressure` lets training wait for it, `skip` leaves
    the new one out. Without effect in shared mode, where nothing overlaps."""
    timeout_s: float = 3600.0
    """Longest time of one evaluation; one that takes longer is stopped, and its point is skipped."""
    external: str | None = None
    """With `mode = "external"`: an import string of `function(checkpoint, step)` that returns metrics, or a command
    line with `{checkpoint}`, and `{step}` if wanted, whose last line of output is a JSON object of metrics. `score` is
    the one that is drawn first."""
    keep: int = 2
    """Evaluations whose conversations stay under `eval/` of the run directory, to be read; older ones are removed."""
    split: str = "heldout"
    """The environment's split to draw problems from. This key and the four below are for a single set of problems;
    for several, write a table `[eval.datasets.NAME]` for each."""
    num_prompts: int | None = None
    """Problems to use of it; none uses all."""
    samples_per_prompt: int = 1
    """Episodes of each problem: avg@k and pass@k are taken over them."""
    success_reward: float = 1.0
    """A reward of at least this much is a pass, for pass@k."""
    sampling: Sampling | None = None
    """How the policy samples in evaluation; none samples as in training."""
    datasets: Mapping[str, DatasetConfig] = field(default_factory=dict[str, DatasetConfig])
    """Several sets of problems, a table each."""

    def __post_init__(self) -> None:
        at_least(self, 0, "every", "keep")
        is_time = math.isfinite(self.timeout_s) and self.timeout_s > 0
        require(is_time, "timeout_s", self.timeout_s, "a positive number of seconds")
        self._check_datasets()
        self._check_external()

    @property
    def enabled(self) -> bool:
        return bool(self.every) or self.at_start or self.at_end

    @property
    def all_datasets(self) -> Mapping[str, DatasetConfig]:
        """By name; the simple form is one that is called `eval`."""
        if self.mode == "external":
            return {}
        return self.datasets or {"eval": self._single_dataset()}

    def is_due(self, step: int) -> bool:
        """Whether the weights after `step` are evaluated."""
        return self.every > 0 and step > 0 and step % self.every == 0

    def _single_dataset(self) -> DatasetConfig:
        return DatasetConfig(**{key.name: getattr(self, key.name) for key in fields(DatasetConfig)})

    def _check_datasets(self) -> None:
        single, default = self._single_dataset(), DatasetConfig()
        given = [key.name for key in fields(single) if getattr(single, key.name) != getattr(default, key.name)]
        if given and self.datasets:
            raise SettingError(
                f"`{given[0]}` is {getattr(self, given[0])!r} beside {len(self.datasets)} tables [eval.datasets.NAME], "
                "each of which has its own. Move it there."
            )
        if self.mode == "external" and (given or self.datasets):
            name = given[0] if given else "datasets"
            raise SettingError(f"`{name}` has no effect with `mode` = 'external'; remove it.")
        for name in self.datasets:
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
                raise SettingError(
                    f"`datasets` has the name {name!r}; use letters, digits, '_', '.', '-': it goes into URLs."
                )

    def _check_external(self) -> None:
        if self.mode != "external":
            if self.external is not None:
                raise SettingError(
                    f'`external` is {self.external!r} but `mode` is {self.mode!r}. Set `mode = "external"`.'
                )
            return
        if self.external is None:
            raise SettingError("`mode` is 'external' but `external` is not set: name a function or a command for it.")
        if not is_import_string(self.external) and "{checkpoint}" not in self.external:
            raise SettingError(
                f"`external` is {self.external!r}, which is no import string `module:function`; as a command it must "
                "say where the checkpoint's path goes, `{checkpoint}`."
            )


def is_import_string(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", text) is not None
