"""A trainer is made by the name of its backend, or by the import string of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from miles_tito.shared.settings import SettingError
from miles_train import FSDPConfig, Layout, TrainConfig, check_backend, create_trainer
from miles_train.fsdp import FSDPTrainer


class Own:
    """As much of a backend as making one takes."""

    def __init__(self, model_path: Path, *, rank: int, init_method: str | None, stages: int = 1) -> None:
        self.made = (model_path, rank, init_method)
        self.stages = stages

    def setup(self, config: TrainConfig) -> Layout:
        shape = {"ranks": config.ranks, "data_ranks": config.ranks // self.stages, "num_parameters": 1, "vocab_size": 2}
        return Layout(rank=self.made[1], data_rank=self.made[1] // self.stages, device="cpu", **shape)


OWN = f"{__name__}:Own"


def test_the_built_in_backend_is_made_by_its_name(tmp_path):
    assert isinstance(create_trainer(TrainConfig(), model_path=tmp_path), FSDPTrainer)


def test_a_backend_of_ones_own_gets_its_arguments():
    config = TrainConfig(backend=OWN, backend_args={"stages": 2}, ranks=4)
    check_backend(config)
    trainer = create_trainer(config, model_path="here", rank=3, init_method="tcp://a:1")
    assert isinstance(trainer, Own)
    assert trainer.made == (Path("here"), 3, "tcp://a:1")
    layout = trainer.setup(config)
    assert (layout.data_rank, layout.data_ranks) == (1, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "fdsp"}, "No trainer backend is called 'fdsp'. Did you mean fsdp"),
        ({"backend_args": {"stages": 2}}, r"`backend_args` is \{'stages': 2\} but `backend` is \"fsdp\""),
        ({"backend": OWN, "fsdp": FSDPConfig(layout="padded")}, "`fsdp` is .*which does not read it. Remove"),
    ],
)
def test_settings_that_the_chosen_backend_does_not_read_are_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        TrainConfig(**settings)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TrainConfig(backend=f"{__name__}:Owm"), "has no 'Owm'. Did you mean Own"),
        (TrainConfig(backend=OWN, backend_args={"stage": 2}), "unexpected keyword argument 'stage'"),
        (TrainConfig(backend=OWN, backend_args={"rank": 2}), "`backend_args` sets rank, which every backend is given"),
    ],
)
def test_arguments_are_compared_with_the_signature_before_anything_is_made(config, message):
    with pytest.raises(SettingError, match=message):
        check_backend(config)
    with pytest.raises(SettingError, match=message):
        create_trainer(config, model_path="here")
