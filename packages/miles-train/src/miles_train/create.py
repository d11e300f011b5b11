"""The trainer that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_tito.shared.plugins import check_call, load
from miles_tito.shared.settings import SettingError

from .backends import BACKENDS

if TYPE_CHECKING:
    from .config import TrainConfig
    from .trainer import Trainer


def create_trainer(
    config: TrainConfig, *, model_path: str | Path, rank: int = 0, init_method: str | None = None
) -> Trainer:
    """One rank of the configured backend, not yet set up; torch is imported only here.

    Args:
        model_path: a Hugging Face folder.
        rank: of this process, among `config.ranks`.
        init_method: where the ranks meet (`tcp://HOST:PORT` of rank 0); not needed for a single rank.

    Raises:
        SettingError: `backend` leads to no factory, or it does not take `backend_args`.
    """
    return _factory(config)(Path(model_path), rank=rank, init_method=init_method, **config.backend_args)


def check_backend(config: TrainConfig) -> None:
    """Import a backend of the user's own, and check that it takes `backend_args`; starts nothing.

    Raises:
        SettingError: it is not there, or does not take them.
    """
    if config.backend not in BACKENDS:
        _factory(config)


def _factory(config: TrainConfig) -> Callable[..., Trainer]:
    target, what = BACKENDS.get(config.backend, config.backend), "train.backend"
    given: dict[str, Any] = {"rank": 0, "init_method": None}
    if taken := sorted(given.keys() & config.backend_args.keys()):
        raise SettingError(f"`backend_args` sets {', '.join(taken)}, which every backend is given anyway. Remove it.")
    factory = load(target, what=what)
    check_call(factory, 1, given | dict(config.backend_args), what=what, target=target)
    return factory
