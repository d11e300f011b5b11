"""A fake SGLang server that unpickles buckets with real PyTorch, and shards of a small Llama-like model."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

SHAPES = {
    "model.embed_tokens.weight": (10, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.mlp.gate_proj.weight": (12, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.norm.weight": (8,),
}


CONFIG = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "intermediate_size": 12,
    "vocab_size": 10,
    "tie_word_embeddings": True,
}


class AShard(NamedTuple):
    """Not the package's class: shards are matched by structure."""

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    box: tuple[tuple[int, int], ...]
    tensor: torch.Tensor


def weights(version: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    """Random weights of one version; the first element of each tensor is the version."""
    generator = torch.Generator().manual_seed(version)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for tensor in tensors.values():
        tensor.view(-1)[0] = float(version)
    return tensors


def shards(tensors: dict[str, torch.Tensor], rank: int = 0, size: int = 1) -> Iterator[AShard]:
    """What one of `size` ranks holds: rows like FSDP2 (uneven, maybe none), norms replicated, down_proj by columns."""
    for name, tensor in tensors.items():
        box = [(0, n) for n in tensor.shape]
        if "norm" not in name:
            dim = 1 if "down_proj" in name else 0
            step = math.ceil(tensor.shape[dim] / size)
            start = min(rank * step, tensor.shape[dim])
            box[dim] = (start, min(start + step, tensor.shape[dim]))
        block = tensor[tuple(slice(*span) for span in box)]
        yield AShard(name, tuple(tensor.shape), tensor.dtype, tuple(box), block)


def shm_names(pid: int | None = None) -> list[str]:
    """Names in /dev/shm that a process owns, this one by default; those of other pushers are none of our business."""
    prefix = f"miles-weightsync-{pid or os.getpid()}-"
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith(prefix))


class FakeEngine:
    """Answers like SGLang 0.5.23 where a pusher looks; keeps what it was told."""

    def __init__(
        self, *, tp: int = 1, dtype: str = "float32", architecture: str = "LlamaForCausalLM", dp: int = 1
    ) -> None:
        self.tp, self.dp, self.dtype, self.architecture = tp, dp, dtype, architecture
        self.params = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, shape in SHAPES.items()}
        self._folder = tempfile.TemporaryDirectory()
        self.folder = self._folder.name
        (Path(self.folder) / "config.json").write_text(json.dumps(CONFIG))
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.fail_at: int | None = None
        """Index of the request that is answered with 500 and not carried out."""
        self.corrupt: str | None = None
        """Parameter whose next load is damaged."""
        self.busy_flushes = 0
        """How many flushes are still refused because retracted requests have not let go."""
        self.is_paused = self.has_session = self.is_running = False
        self.version = "default"
        self.resumed_mixed = False
        self.on_request: Callable[[str], None] = lambda path: None
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 65536  # head and body in one packet: no wait for a delayed acknowledgement

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = engine.answer(self.path.partition("?")[0], json.loads(body) if body else {})
                data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # the client gave up
                    self.wfile.write(data)
                    self.wfile.flush()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._folder.cleanup()

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    @property
    def is_mixed(self) -> bool:
        return len({float(tensor.view(-1)[0]) for tensor in self.params.values()}) > 1

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        index = len(self.requests)
        self.requests.append((path, body))
        self.on_request(path)
        if index == self.fail_at:
            return 500, {"success": False, "message": "scripted failure"}
        return getattr(self, "do_" + path.strip("/").replace("/", "_"))(body)

    def do_server_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {
            "tp_size": self.tp,
            "dp_size": self.dp,
            "dtype": self.dtype,
            "device": "cpu",
            "model_path": self.folder,
        }

    def do_model_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"architectures": [self.architecture], "weight_version": self.version}

    def do_pause_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.is_paused = True
        self.is_running = self.is_running and body["mode"] == "in_place"
        return 200, {"status": "ok"}

    def do_flush_cache(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.busy_flushes, busy = max(self.busy_flushes - 1, 0), self.busy_flushes
        return (400, "Flush cache failed.\n") if self.is_running or busy else (200, "Cache flushed.\n")

    def do_begin_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.has_session:
            return 400, {"success": False, "message": "a weight-update session is already open; call end first"}
        self.has_session = True
        return 200, {"success": True, "message": "Success"}

    def do_update_weights_from_tensor(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not self.has_session or body["flush_cache"]:
            return 400, {"success": False, "message": "outside a session, or a flush was asked for"}
        payloads = body["serialized_named_tensors"]
        assert len(payloads) == self.tp
        for payload in payloads:
            self._load(list(unpack(payload)))
        return 200, {"success": True, "message": "Success"}

    def do_update_weights_from_disk(self, body: dict[str, Any]) -> tuple[int, Any]:
        for path in Path(body["model_path"]).glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                self._load([(name, file.get_tensor(name)) for name in file.keys()])  # noqa: SIM118
        return 200, {"success": True, "message": "Success", "num_paused_requests": 0}

    def do_end_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not self.has_session:
            return 400, {"success": False, "message": "no weight-update session is open"}
        self.has_session = False
        return 200, {"success": True, "message": "Success"}

    def do_weights_checker(self, body: dict[str, Any]) -> tuple[int, Any]:
        ranks = [{"checksums": {n: sha(t) for n, t in fused(self.params, self.tp, r).items()}} for r in range(self.tp)]
        return 200, {"success": True, "message": "Success.", "ranks": ranks}

    def do_update_weight_version(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert body["abort_all_requests"] is False
        self.version = body["new_version"]
        return 200, {"success": True, "message": ""}

    def do_continue_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.resumed_mixed = self.resumed_mixed or self.is_mixed
        self.is_paused = False
        return 200, {"status": "ok"}

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.params[name].copy_(tensor)
            if name == self.corrupt:
                self.params[name].view(-1)[-1] += 1
                self.corrupt = None


def unpack(payload: str) -> Iterator[tuple[str, torch.Tensor]]:
    """What SGLang does with a payload: unpickle, then views into the flat tensor."""
    content = pickle.loads(base64.b64decode(payload, validate=True))
    for meta in content["metadata"]:
        assert meta.numel == meta.end_idx - meta.start_idx
        yield meta.name, content["flattened_tensor"][meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)


def fused(params: dict[str, torch.Tensor], tp: int, rank: int) -> dict[str, torch.Tensor]:
    """The parameters of one tensor-parallel rank under SGLang's names, written out for this one model."""

    def rows(name: str) -> torch.Tensor:
        return params[name].chunk(tp)[rank]

    result = dict(params)
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    if attention + "q_proj.weight" in result:
        wide = -(-params[mlp + "up_proj.weight"].shape[0] // (32 * tp)) * 32 * tp
        parts = [attention + f"{p}_proj.weight" for p in "qkv"]
        result[attention + "qkv_proj.weight"] = torch.cat([rows(p) for p in parts])
        gates = [mlp + f"{p}_proj.weight" for p in ("gate", "up")]
        result[mlp + "gate_up_proj.weight"] = torch.cat([padded(params[p], wide).chunk(tp)[rank] for p in gates])
        for part in parts + gates:
            del result[part]
        result[attention + "o_proj.weight"] = params[attention + "o_proj.weight"].chunk(tp, dim=1)[rank]
        result[mlp + "down_proj.weight"] = padded(params[mlp + "down_proj.weight"].T, wide).chunk(tp)[rank].T
    result["model.embed_tokens.weight"] = padded(params["model.embed_tokens.weight"], 64).chunk(tp)[rank]
    return result


def padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
