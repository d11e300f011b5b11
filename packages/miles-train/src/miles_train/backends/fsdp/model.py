"""A Hugging Face causal language model that answers with log-probs, sharded over the ranks.

    PolicyModel (FSDP root: embeddings, final norm, head)
      └─ lm: Qwen3ForCausalLM, LlamaForCausalLM, …
           └─ decoder layers (one FSDP unit each)

The head is applied inside the root's forward pass, chunk by chunk, because only there its weight is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from miles_tito.shared.settings import SettingError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from miles_train.errors import UnsupportedModel
from miles_train.logprobs import TokenScores, token_logprobs
from miles_train.step.inputs import ModelInputs

from .attention import register

if TYPE_CHECKING:
    from miles_train.config import TrainConfig


class PolicyModel(nn.Module):
    """A Hugging Face language model (`lm`) that returns log-probs of chosen tokens: the policy, and the reference."""

    def __init__(self, lm: Any, *, padded: bool, chunk_bytes: int) -> None:
        super().__init__()
        self.lm = lm
        self.padded = padded
        self._chunk_bytes = chunk_bytes
        self._logit_scale = _logit_scale(lm)

    @property
    def vocab_size(self) -> int:
        return self.lm.config.get_text_config().vocab_size

    def forward(self, inputs: ModelInputs, *, entropy: bool) -> TokenScores:
        """Log-probs (and entropy) of `inputs.targets`, each at its own temperature."""
        extra = {} if inputs.packed is None else {"packed": inputs.packed}
        output = self.lm.base_model(
            input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, **extra
        )
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, inputs.sources)
        head = self.lm.get_output_embeddings()
        return token_logprobs(
            hidden,
            head.weight,
            inputs.targets,
            temperature_M=inputs.temperatures / self._logit_scale,
            bias_V=head.bias,
            entropy=entropy,
            chunk_bytes=self._chunk_bytes,
        )

    def reshard(self) -> None:
        """Give up gathered weights: a forward pass without a backward leaves them behind, and they would go stale."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def load_model(path: str | Path, config: TrainConfig) -> PolicyModel:
    """Load a Hugging Face folder on the CPU, in the type that the optimizer updates, with dropout off."""
    from transformers import AutoModelForCausalLM

    if not (Path(path) / "config.json").is_file():
        raise SettingError(f"{path} is not a model folder: it has no config.json.")
    with no_progress_bars():
        lm = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, config.master_dtype), local_files_only=True
        )
    can_pack = _has_plain_attention(lm)
    if config.fsdp.layout == "packed" and not can_pack:
        raise UnsupportedModel(
            f"{type(lm).__name__} has layers whose attention cannot be replaced (or that are not attention), so packed "
            'rows would see one another; use `fsdp.layout = "padded"`.'
        )
    padded = config.fsdp.layout == "padded" or not can_pack
    if not padded:
        lm.set_attn_implementation(register())
    disable_dropout(lm)
    return PolicyModel(lm, padded=padded, chunk_bytes=config.logit_chunk_mb << 20)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Transformers draws bars on stderr for every load and save; several ranks would draw over one another."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def disable_dropout(module: nn.Module) -> None:
    """The policy that is trained must be the policy that sampled, and that one had no dropout."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name, value in vars(part).items():
            if name.endswith("dropout") and isinstance(value, float):
                setattr(part, name, 0.0)


def shard_model(model: PolicyModel, mesh: DeviceMesh, config: TrainConfig) -> None:
    """Shard every parameter over the mesh along its first dimension, one FSDP unit a decoder layer."""
    mixed = config.dtype != config.master_dtype
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": config.fsdp.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, config.dtype) if mixed else None, reduce_dtype=torch.float32
        ),
    }
    for layer in decoder_layers(model.lm):
        fully_shard(layer, **options)
    fully_shard(model, **{**options, "reshard_after_forward": False})


def decoder_layers(lm: Any) -> list[nn.Module]:
    """The repeated blocks of the model, by the class names that Transformers declares unsplittable."""
    names = set(lm._no_split_modules or ())
    layers = [module for module in lm.base_model.modules() if type(module).__name__ in names]
    if not layers:
        raise UnsupportedModel(
            f"{type(lm).__name__} declares no decoder layers (`_no_split_modules`), so it cannot be sharded by layer."
        )
    return layers


def _has_plain_attention(lm: Any) -> bool:
    """Is every layer causal attention, whole or windowed, that goes through Transformers' attention interface?"""
    kinds = set(getattr(lm.config.get_text_config(), "layer_types", None) or ())
    return lm._supports_attention_backend and not lm._is_stateful and kinds <= {"full_attention", "sliding_attention"}


def _logit_scale(lm: Any) -> float:
    """What the model multiplies its logits by; anything but a constant is refused."""
    config = lm.config.get_text_config()
    if getattr(config, "final_logit_softcapping", None):
        raise UnsupportedModel(
            f"{type(lm).__name__} caps its logits at {config.final_logit_softcapping} (final_logit_softcapping), which "
            "the chunked head does not compute."
        )
    if not isinstance(lm.get_output_embeddings(), nn.Linear):
        raise UnsupportedModel(f"{type(lm).__name__} has no linear output head to take log-probs from.")
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere multiplies
    return scale / (getattr(config, "logits_scaling", None) or 1.0)  # Granite divides


def num_parameters(model: nn.Module) -> int:
    """Elements of the whole model; tied weights count once."""
    return sum(parameter.numel() for parameter in model.parameters())
