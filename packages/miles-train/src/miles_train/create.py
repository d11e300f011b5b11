"""The trainer that a configuration asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from miles_tito.shared.plugins import call, check_call, load

from .backends import BACKENDS

if TYPE_CHECKING:
    from .config import TrainConfig
    from .trainer import Trainer

_WHAT = "train.backend"


def create_trainer(
    config: TrainConfig, *, model_path: str | Path, rank: int = 0, init_method: str | None = None
) -> Trainer:
    """One rank of the configured backend, not yet set up; torch is imported only here.

    Args:
        model_path: a Hugging Face folder.
        rank: of this process, among `config.ranks`.
        init_method: where the ranks meet (`tcp://HOST:PORT` of rank 0); not needed for a single rank.

    Raises:
        ImportStringError: `backend` leads to no factory, or it does not take `backend_args`.
    """
    target = BACKENDS.get(config.backend, config.backend)
    keywords = {"rank": rank, "init_method": init_method, **config.backend_args}
    return call(target, Path(model_path), keywords=keywords, what=_WHAT)


def check_backend(config: TrainConfig) -> None:
    """Import a backend of the user's own, and check that it takes `backend_args`; starts nothing.

    Raises:
        ImportStringError: it is not there, or does not take them.
    """
    if config.backend not in BACKENDS:
        keywords = {"rank": 0, "init_method": None, **config.backend_args}
        check_call(load(config.backend, what=_WHAT), 1, keywords, what=_WHAT, target=config.backend)
