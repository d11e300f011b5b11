"""What a run depends on, in a few bytes, so that a resumed run can tell what has changed since.

model    config.json, every byte of the tokenizer's files; of weights the names, sizes, safetensors headers, and some
         bytes of every tensor: another model, or a further step of training, shows; a change of single values may not
prompts  number, content whatever the order, order of the ids, and a few prompts by id, to name one that differs
config   compared key by key; a key must agree unless `MAY_CHANGE` lists it, so a new one does by default
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from miles_tito.records import Prompt
from miles_tito.shared.safetensors import read_header

from miles_core.config import Config, to_dict
from miles_core.config.keys import is_plugin, leaves
from miles_core.config.layers import translate

MAY_CHANGE = (
    *("run.name", "run.dir", "run.steps", "sft.steps", "model.path"),
    *("monitor.*", "checkpoint.*", "eval.*", "ray.*", "sessions.*", "workers.*"),
    *("rollout.max_concurrent_episodes", "rollout.episode_timeout_s", "rollout.deadline_grace_s"),
    *("rollout.retries", "rollout.retry_backoff_s"),
    *("rollout.max_empty_batches", "rollout.max_failure_rate", "rollout.failure_window", "rollout.min_failures"),
    *("engines.*.count", "engines.*.tp", "engines.*.dp", "engines.*.device", "engines.*.threads", "engines.*.urls"),
    *("engines.*.env.*", "engines.*.max_total_tokens", "engines.*.start_timeout_s", "engines.*.health.*"),
    *("sync.way", "sync.staging", "sync.bucket_bytes", "sync.timeout_s", "sync.verify", "sync.disk_*"),
    *("train.ranks", "train.device", "train.threads", "train.token_budget", "train.logit_chunk_mb", "train.fsdp.*"),
    "train.collective_timeout_s",
)
"""Keys that decide how fast a run is, how long it goes on or what it says, but not what it learns. `model.path` is one
because the folder's content is compared."""

TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*")
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
_SAMPLE = 256
_BLOCKS = 64
_NAMED = 64
_VOLATILE = ("transformers_version", "_name_or_path")


class Changes(NamedTuple):
    """What differs between a run as it was and as it is to go on, a sentence each."""

    refused: list[str]
    """A run does not go on with these unless the user accepts them."""
    allowed: list[str]
    """Worth a line in the log."""


def fingerprint_model(folder: Path) -> dict[str, Any]:
    """Of a Hugging Face folder; plain data for a checkpoint's state."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name in _VOLATILE:
        config.pop(name, None)
    weights = _matching(folder, WEIGHTS)
    return {
        "config": _digest([json.dumps(config, sort_keys=True).encode()]),
        "tokenizer": {file.name: _digest([file.read_bytes()]) for file in _matching(folder, TOKENIZER)},
        "weights": {
            "bytes": sum(file.stat().st_size for file in weights),
            "digest": _digest(part for file in weights for part in (file.name.encode(), *_sampled(file))),
        },
    }


def fingerprint_prompts(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Of the prompts of a split, in their order."""
    order, total = hashlib.blake2b(digest_size=16), 0
    some: dict[str, str] = {}
    stride = max(len(prompts) // _NAMED, 1)
    for index, prompt in enumerate(prompts):
        digest = _digest([_ENCODER.encode(prompt)])
        order.update(f"{prompt.id}\0".encode())
        total += int(digest, 16)
        if index % stride == 0:
            some[prompt.id] = digest
    content = f"{total % 2**128:032x}"
    return {"count": len(prompts), "content": content, "order": order.hexdigest(), "some": some}


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Changes:
    """What changed between two fingerprints `{"model": …, "prompts": …, "config": …}`; parts may be left out.

    `config` is a configuration as plain data (`to_dict`).
    """
    changes = Changes([], [])
    for part, differences in (("model", _model), ("prompts", _prompts)):
        if part in old and part in new:
            changes.refused.extend(differences(old[part], new[part]))
    if "config" in old and "config" in new:
        for key, sentence in _config(old["config"], new["config"]):
            is_free = any(fnmatchcase(key, pattern) for pattern in MAY_CHANGE)
            (changes.allowed if is_free else changes.refused).append(sentence)
    return changes


def _model(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    if old["config"] != new["config"]:
        yield "The model's config.json has changed."
    names = sorted(old["tokenizer"].keys() | new["tokenizer"].keys())
    if changed := [name for name in names if old["tokenizer"].get(name) != new["tokenizer"].get(name)]:
        yield f"The tokenizer has changed: {', '.join(changed)}."
    if old["weights"] != new["weights"]:
        sizes = f"{old['weights']['bytes']:,} bytes before, {new['weights']['bytes']:,} now"
        yield f"The model folder holds other weights than the run started from ({sizes})."


def _prompts(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    if old["count"] != new["count"]:
        yield f"The data had {old['count']:,} entries and has {new['count']:,}."
    elif old["content"] != new["content"]:
        known = new["some"]
        example = next((name for name, digest in old["some"].items() if known.get(name, digest) != digest), None)
        example = f", for instance that of {example!r}" if example else ""
        yield f"The content of the {new['count']:,} entries of the data has changed{example}."
    elif old["order"] != new["order"]:
        yield f"The {new['count']:,} entries of the data come in another order, so the run would go on with other ones."


def _config(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Key and sentence of each difference; a key that an older Miles did not have counts with its default."""
    defaults = dict(_flat(to_dict(Config())))
    before, after = defaults | dict(_flat(translate(old))), defaults | dict(_flat(translate(new)))
    for key in sorted(before.keys() | after.keys()):
        if (was := before.get(key, _ABSENT)) != (now := after.get(key, _ABSENT)):
            yield key, f"{key} was {_shown(was)} and is {_shown(now)}."


_ABSENT = object()


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        here = f"{prefix}{name}"
        if isinstance(value, Mapping) and here in _plugins():
            yield here, value.get("name")
            value = {"args": value.get("args", {})}
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{here}.")
        elif not isinstance(value, Mapping):
            yield here, list(value) if isinstance(value, tuple) else value


@functools.cache
def _plugins() -> frozenset[str]:
    """Keys whose value is a name or a table with one."""
    return frozenset(str(key) for key in leaves(Config) if is_plugin(key.type))


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else json.dumps(value, default=str)


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def _sampled(file: Path) -> Iterator[bytes]:
    """Enough of a weight file to tell it from another: its size, its header, bytes of every tensor."""
    size = file.stat().st_size
    yield str(size).encode()
    with file.open("rb") as stream:
        if file.suffix != ".safetensors":
            for block in range(_BLOCKS):
                stream.seek(size * block // _BLOCKS)
                yield stream.read(_SAMPLE)
            return
        header = read_header(file)
        stream.seek(8)
        yield stream.read(header.data_start - 8)
        for tensor in header.tensors.values():
            for offset in (tensor.start, tensor.start + (tensor.end - tensor.start) // 2):
                stream.seek(offset)
                yield stream.read(min(_SAMPLE, tensor.end - offset))


def _digest(parts: Iterator[bytes] | Sequence[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """What msgpack has no form for: arrays by content, other objects by their type alone."""
    if isinstance(value, np.ndarray):
        return [str(value.dtype), list(value.shape), np.ascontiguousarray(value).tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    return f"{type(value).__module__}.{type(value).__qualname__}"


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain, order="deterministic")
