"""What a run would start, where, and how much memory it would take: `--dry-run`.

The estimate counts weights, gradients, optimizer state, KV cache and activations. It leaves out the libraries
themselves (about a gigabyte for each process that imports torch) and what an environment allocates.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from miles_quant import QuantError, Recipe
from miles_rollout.engines import EngineConfig, resolve_device
from miles_tito.shared.safetensors import read_header
from miles_tito.shared.settings import SettingError
from miles_train.config import TrainConfig

from miles_core.config import Config

GIB = 2**30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CPU_KV_TOKENS = 32768
"""KV cache of an engine on a CPU, see `EngineConfig.max_total_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a model that memory depends on, read off its folder by the plan and by `miles doctor`."""

    num_parameters: int
    num_layers: int
    hidden: int
    intermediate: int
    num_kv_heads: int
    head_dim: int

    @property
    def kv_values_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Process:
    """One kind of process of a run, a line of the plan."""

    name: str
    note: str
    count: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """What takes memory -> bytes in one process; empty where it is little or unknown."""

    @property
    def num_bytes(self) -> float:
        return sum(self.parts.values())


def make_plan(config: Config, kind: Literal["rl", "sft"]) -> str:
    """The plan as text.

    Raises:
        SettingError: the recipe of `[quant]` does not fit the model.
    """
    folder = model_folder(config)
    shape = read_shape(folder)
    processes = list_processes(config, kind, shape)
    lines = [_headline(config, kind), _model_line(config, shape)]
    if config.quant is not None:
        lines.append(quant_line(config.quant, folder))
    return "\n".join([*lines, "", *_table(processes), _total(processes), _checkpoint_line(config, shape)])


def model_folder(config: Config) -> Path | None:
    """What `model.path` names, None where a builder makes the model."""
    return Path(config.model.path).expanduser() if config.model.path else None


def read_shape(folder: Path | None) -> ModelShape | None:
    """The shape of a Hugging Face folder; None where there is none, or it has no config.json."""
    if folder is None or not (folder / "config.json").is_file():
        return None
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    shape = {
        "num_layers": int(config["num_hidden_layers"]),
        "hidden": hidden,
        "intermediate": int(config.get("intermediate_size") or 4 * hidden),
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or hidden // heads),
    }
    return ModelShape(
        num_parameters=sum(map(math.prod, stored_shapes(folder).values())) or _computed_parameters(config, shape),
        **shape,
    )


def list_processes(config: Config, kind: Literal["rl", "sft"], shape: ModelShape | None) -> list[Process]:
    """Every process of the run, the driver last."""
    train, device = config.train, resolve_device(config.train.device)
    trainer = Process(
        "trainer rank",
        f"{train.backend}, {train.dtype}, {_threads(train.threads)}",
        count=train.ranks,
        device=device,
        parts=trainer_memory(train, shape, device=device) if shape else {},
    )
    driver = Process("driver, Ray", "loop, monitors, ledger")
    if kind == "sft":
        return [trainer, driver]
    episodes = config.rollout.max_concurrent_episodes
    evaluation = {
        "dedicated": [Process("session server", "of the evaluation"), Process("worker", "of the evaluation")],
        "external": [Process("evaluation", "while one runs")],
        "shared": [],
    }
    return [
        trainer,
        *(_engine(name, engine, train, shape) for name, engine in config.engines.items()),
        *(Process(f"router {name}", "smg") for name, engine in config.engines.items() if engine.num_servers > 1),
        Process("session server", "records tokens", count=config.sessions.count),
        Process("worker", f"{episodes} episodes at once over all", count=config.workers.count),
        *evaluation[config.eval.mode if config.eval.enabled else "shared"],
        driver,
    ]


def trainer_memory(train: TrainConfig, shape: ModelShape, *, device: str) -> dict[str, float]:
    """Bytes of one rank by what takes them, on its device."""
    width, master = _BYTES[train.dtype], _BYTES[train.master_dtype]
    sharded = shape.num_parameters / train.ranks
    per_layer = shape.hidden if train.fsdp.activation_checkpointing else 10 * shape.hidden + 4 * shape.intermediate
    parts = {
        "weights": sharded * master,
        "gradients": sharded * master,
        "AdamW": 2 * sharded * master,
        "activations": float(width * train.token_budget * shape.num_layers * per_layer),
        "logits": 3.0 * train.logit_chunk_mb * 2**20,
    }
    if "reference" in train.loss.needs:
        parts["reference"] = sharded * width
    if width != master:
        parts["a layer in " + train.dtype] = shape.num_parameters * width / shape.num_layers
    if device == "cpu":  # of a GPU it lies in host memory
        parts["copy for checkpoints"] = checkpoint_bytes(train, shape) / train.ranks
    return parts


def checkpoint_bytes(train: TrainConfig, shape: ModelShape) -> float:
    """Size of one checkpoint on disk: weights and the two moments of AdamW in the optimizer's type."""
    return 3.0 * shape.num_parameters * _BYTES[train.master_dtype]


def disk_bytes(config: Config, shape: ModelShape) -> float:
    """What checkpoints take at most: those that are kept, and the one that is being written."""
    kept = config.checkpoint.keep
    if config.checkpoint.keep_every is not None:
        kept += config.run.steps // config.checkpoint.keep_every
    return (kept + 1) * checkpoint_bytes(config.train, shape)


def existing_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there already."""
    absolute = folder.expanduser().absolute()
    return next(place for place in (absolute, *absolute.parents) if place.exists())


def free_disk(folder: Path) -> int:
    """Bytes free where `folder` is, or will be made."""
    return shutil.disk_usage(existing_folder(folder)).free


def engine_memory(engine: EngineConfig, train: TrainConfig, shape: ModelShape, *, device: str) -> dict[str, float]:
    """Bytes of one server by what takes them; on a GPU the KV cache takes what SGLang leaves free."""
    width = _BYTES.get(engine.dtype or ("float32" if device == "cpu" else train.dtype), 2)
    parts = {"weights": shape.num_parameters * width / engine.tp}
    tokens = engine.max_total_tokens or (_CPU_KV_TOKENS if device == "cpu" else 0)
    if tokens:
        parts[f"KV cache of {tokens} tokens"] = float(tokens * shape.kv_values_per_token * width / engine.tp)
    return parts


def available_memory() -> int:
    """Bytes that this machine can still give out (`MemAvailable`)."""
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _engine(name: str, engine: EngineConfig, train: TrainConfig, shape: ModelShape | None) -> Process:
    if engine.urls:
        return Process(f"engine {name}", f"runs at {', '.join(engine.urls)}", count=0)
    device = resolve_device(engine.device)
    layout = f"tp {engine.tp}, dp {engine.dp}" if device == "cuda" else _threads(engine.threads)
    parts = engine_memory(engine, train, shape, device=device) if shape else {}
    return Process(f"engine {name}", f"SGLang, {engine.role}, {layout}", engine.count, device, parts)


def _headline(config: Config, kind: str) -> str:
    if kind == "sft":
        return f"sft · {config.run.name} · {config.sft.steps} steps of {config.sft.batch_size} conversations"
    rollout = config.rollout
    warm_up = f"{config.sft.steps} steps of SFT, then " if config.sft.steps else ""
    return (
        f"rl · {config.run.name} · {warm_up}{config.run.steps} steps of {rollout.groups_per_step} groups of "
        f"{rollout.group_size} · max_staleness {rollout.max_staleness}, at most {rollout.num_credits} groups open"
    )


def _model_line(config: Config, shape: ModelShape | None) -> str:
    if shape is not None:
        return f"model {config.model.path} · {shape.num_parameters / 1e6:,.1f} M parameters, {shape.num_layers} layers"
    if config.model.builder:
        return f"model from {config.model.builder} · its size is known once that has run, so no memory is estimated"
    return f"model {config.model.path} has no config.json: no memory is estimated"


def quant_line(recipe: Recipe, model: Path | None) -> str:
    """What of the model is in low precision, and what engines get.

    Raises:
        SettingError: the recipe does not fit the model.
    """
    held = "codes and scales" if recipe.quantize_activations else "the values of the codes as plain weights"
    shape = read_shape(model)
    shapes = stored_shapes(model) if model is not None and shape is not None else {}
    if shape is None or not shapes:
        return f"quant {recipe.format} · engines get {held} · which matrices is known once the weights are there"
    try:
        chosen = recipe.for_model(shape.num_layers).select(shapes)
    except QuantError as error:
        raise SettingError(f"`quant` does not fit {model}: {error}") from error
    share = sum(math.prod(shapes[name]) for name in chosen) / sum(map(math.prod, shapes.values()))
    return (
        f"quant {recipe.format} · {len(chosen)} of {len(shapes)} tensors, {share:.0%} of the parameters · "
        f"engines get {held}"
    )


def _table(processes: Sequence[Process]) -> list[str]:
    lines = [f"{'process':<22}{'count':>6}  {'device':<7}{'memory each':>12}  what"]
    for process in processes:
        parts = " + ".join(f"{name} {_gib(size)}" for name, size in process.parts.items() if size >= 0.005 * GIB)
        memory = _gib(process.num_bytes) if process.parts else "-"
        what = f"{process.note} ({parts})" if parts else process.note
        lines.append(f"{process.name:<22}{process.count:>6}  {process.device:<7}{memory:>12}  {what}")
    return lines


def _total(processes: Sequence[Process]) -> str:
    needed = sum(p.num_bytes * p.count for p in processes if p.device == "cpu")
    free = available_memory()
    if not needed:
        return f"\n{_gib(free)} of memory is free on {os.cpu_count()} CPUs"
    line = f"\nhost memory {_gib(needed)} of {_gib(free)} free on {os.cpu_count()} CPUs, libraries not counted"
    return line if needed < free else f"{line}\nwarning: this does not fit"


def _checkpoint_line(config: Config, shape: ModelShape | None) -> str:
    section, free = config.checkpoint, free_disk(Path(config.run.dir))
    when = f"every {section.every} steps" if section.every else "at the end" if section.at_end else "on request"
    if shape is None:
        return f"checkpoints {when}, {section.keep} kept; {_gib(free)} of disk is free at {config.run.dir}"
    each, needed = checkpoint_bytes(config.train, shape), disk_bytes(config, shape)
    line = (
        f"checkpoints {when} of {_gib(each)} each; with those kept and one being written {_gib(needed)} of "
        f"{_gib(free)} of disk free at {config.run.dir}"
    )
    return line if needed < free else f"{line}\nwarning: this does not fit; lower checkpoint.keep, or set run.dir"


def _threads(threads: int | None) -> str:
    return "threads auto" if threads is None else f"{threads} threads"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in the folder's safetensors files, read off their headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in folder.glob("*.safetensors"):
        shapes |= {name: tensor.shape for name, tensor in read_header(file).tensors.items()}
    return shapes


def _computed_parameters(config: Mapping[str, Any], shape: Mapping[str, int]) -> int:
    """A Llama-like decoder's parameters, experts included."""
    hidden, heads = shape["hidden"], int(config["num_attention_heads"])
    attention = hidden * shape["head_dim"] * 2 * (heads + shape["num_kv_heads"])
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    width = int(config.get("moe_intermediate_size") or shape["intermediate"]) if experts else shape["intermediate"]
    feed_forward = 3 * hidden * width * max(experts, 1) + hidden * experts
    embeddings = int(config["vocab_size"]) * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return embeddings + shape["num_layers"] * (attention + feed_forward + 2 * hidden) + hidden
