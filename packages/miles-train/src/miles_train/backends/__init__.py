"""Trainer backends. A new one is a folder here and its line in `BACKENDS`; the user's own is an import string."""

BACKENDS = {
    "fsdp": "miles_train.backends.fsdp.trainer:FSDPTrainer",
}
"""Import string of each built-in backend's factory: `factory(model_path, rank=…, init_method=…)` gives a `Trainer`.

The settings of a backend stand under its name in `TrainConfig`, those of the user's own in `backend_args`, which the
factory gets as keyword arguments."""
