"""An engine without SGLang: real receivers around plain torch modules, behind the update endpoints that a pusher calls.

Its `/generate` answers with a digest of everything a rank would compute from, so that a mixed model cannot hide.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from miles_weightsync.config import LOADER
from miles_weightsync.planner import ModelShape, SGLang
from miles_weightsync.receiver import Receiver
from weightsync_fakes import AShard

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 150,
    "dtype": "float32",
}
SHAPE = ModelShape.from_hf(CONFIG)
EMBEDDING = "model.embed_tokens.weight"


def checkpoint(version: int, *, steps: int = 0) -> dict[str, torch.Tensor]:
    """Weights of one version; `steps` change a few elements each, as optimizer steps do."""
    generator = torch.Generator().manual_seed(version)
    tensors = {t.name: torch.randn(t.shape, generator=generator) for t in SHAPE.tensors()}
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 * version + step)
        for tensor in tensors.values():
            index = torch.randint(tensor.numel(), (max(1, tensor.numel() // 100),), generator=generator)
            tensor.view(-1)[index] *= 1.001
    return tensors


def shards(tensors: dict[str, torch.Tensor], rank: int = 0, size: int = 1) -> Iterator[AShard]:
    """FSDP2's rows."""
    for name, tensor in tensors.items():
        step = -(-tensor.shape[0] // size)
        start = min(rank * step, tensor.shape[0])
        rows = (start, min(start + step, tensor.shape[0]))
        box = (rows, *((0, n) for n in tensor.shape[1:]))
        yield AShard(name, tuple(tensor.shape), tensor.dtype, box, tensor[slice(*rows)])


class Model(torch.nn.Module):
    """The parameters of one rank, laid out as SGLang's are, and one tensor derived from them."""

    def __init__(self, engine: SGLang, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = _Config()
        for part in engine.parts(rank):
            module: torch.nn.Module = self
            *path, leaf = part.param.split(".")
            for name in path:
                if not hasattr(module, name):
                    module.add_module(name, torch.nn.Module())
                module = getattr(module, name)
            if not hasattr(module, leaf):
                module.register_parameter(leaf, torch.nn.Parameter(torch.zeros(part.shape, dtype=dtype), False))
        self.derived = torch.zeros(0)

    def fill(self, engine: SGLang, rank: int, tensors: dict[str, torch.Tensor]) -> None:
        """Load as a server does when it starts."""
        live = dict(self.named_parameters())
        for part in engine.parts(rank):
            source = tensors[part.name][tuple(slice(*span) for span in part.box)]
            live[part.param].data[part.slices(part.box)] = source.to(live[part.param].dtype)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.derived = self._derive()

    @property
    def is_derived_fresh(self) -> bool:
        return torch.equal(self.derived, self._derive())

    def digest(self) -> str:
        state = hashlib.sha256()
        for name, parameter in sorted(self.named_parameters()):
            state.update(name.encode() + parameter.data.contiguous().view(torch.uint8).numpy().tobytes())
        return state.hexdigest()[:16]

    def _derive(self) -> torch.Tensor:
        return dict(self.named_parameters())["model.norm.weight"].data.float() * 2


class _Config:
    def to_dict(self) -> dict[str, Any]:
        return dict(CONFIG)


def digests(version: int, tp: int, *, steps: int = 0, dtype: torch.dtype = torch.float32) -> list[str]:
    """What the ranks of an engine answer that serves a version."""
    engine = SGLang(model=SHAPE, tp=tp, on_gpu=False)
    found: list[str] = []
    for rank in range(tp):
        model = Model(engine, rank, dtype)
        model.fill(engine, rank, checkpoint(version, steps=steps))
        found.append(model.digest())
    return found


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no news here."""


class BedEngine:
    """Serves version 0 at first. `on_step(name)` is called before and after every request.

    Args:
        loaded: what it starts from, instead of `checkpoint(0)`.
        says: the version that it was started as.
    """

    def __init__(
        self,
        *,
        tp: int = 1,
        dtype: torch.dtype = torch.float32,
        on_step: Callable[[str], None] = lambda name: None,
        loaded: dict[str, torch.Tensor] | None = None,
        says: str = "default",
    ) -> None:
        self.says = says
        self.tp = tp
        self.layout = SGLang(model=SHAPE, tp=tp, on_gpu=False)
        self.models = [Model(self.layout, rank, dtype) for rank in range(tp)]
        for rank, model in enumerate(self.models):
            model.fill(self.layout, rank, loaded or checkpoint(0))
        self.receivers = [Receiver(rank=rank, world=tp) for rank in range(tp)]
        self.version = "0"
        self.is_paused = self.has_session = False
        self.pause_mode = ""
        self.is_busy = False
        """Requests hold parts of the cache, so that it cannot be flushed."""
        self.is_dead = False
        self.load_cpu_s = 0.0
        """CPU seconds of the thread that carried out the last command in the engine."""
        self.requests: list[str] = []
        self.fails: dict[str, int] = {}
        """Path to the number of its next requests that fail after having been carried out."""
        self._gpu = threading.Lock()
        """Held by whatever reads or changes parameters, as the engine's one thread does."""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 65536

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                path = self.path.partition("?")[0]
                if engine.is_dead:
                    self.close_connection = True
                    return
                on_step(f"before {path}")
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = engine.answer(path, json.loads(body) if body else {})
                on_step(f"after {path}")
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(data)
                    self.wfile.flush()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> None:
        self.is_dead = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for receiver in self.receivers:
            receiver.close()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.requests.append(path)
        status, answer = getattr(self, "do_" + path.strip("/"))(body)
        if self.fails.get(path, 0) > 0:
            self.fails[path] -= 1
            return 500, {"success": False, "message": "scripted failure"}
        return status, answer

    def generate(self) -> dict[str, Any] | None:
        """What a token would be computed from; None while paused."""
        with self._gpu:
            if self.is_paused:
                return None
            return {
                "version": self.version,
                "digests": [model.digest() for model in self.models],
                "fresh": all(model.is_derived_fresh for model in self.models),
            }

    def do_generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        found = self.generate()
        return (503, {}) if found is None else (200, found)

    def do_server_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        facts = {"tp_size": self.tp, "dp_size": 1, "device": "cpu", "custom_weight_loader": [LOADER]}
        return 200, facts | {"weight_version": self.says}

    def do_ready(self, body: dict[str, Any]) -> tuple[int, Any]:
        return (503 if self.is_paused else 200), {}

    def do_pause_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self._gpu:
            self.is_paused = True
            self.pause_mode = body["mode"]
        return 200, {}

    def do_continue_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self._gpu:
            self.is_paused = False
        return 200, {}

    def do_flush_cache(self, body: dict[str, Any]) -> tuple[int, Any]:
        return (400 if self.is_busy else 200), {}

    def do_begin_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.has_session:
            return 400, {"success": False, "message": "a weight-update session is already open; call end first"}
        self.has_session = True
        return 200, {"success": True}

    def do_end_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not self.has_session:
            return 400, {"success": False, "message": "no weight-update session is open"}
        self.has_session = False
        return 200, {"success": True}

    def do_update_weight_version(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert body["abort_all_requests"] is False
        self.version = body["new_version"]
        return 200, {"success": True}

    def do_update_weights_from_tensor(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not self.has_session:
            return 400, {"success": False, "message": "must run between begin and end"}
        assert body["load_format"] == LOADER
        assert not body["flush_cache"]
        started = time.thread_time()
        with self._gpu:
            for rank, payload in enumerate(body["serialized_named_tensors"]):
                ((command, tensor),) = pickle.loads(base64.b64decode(payload, validate=True))
                assert tensor.numel() == 0
                self.receivers[rank].run(self.models[rank], json.loads(command))
        self.load_cpu_s = time.thread_time() - started
        return 200, {"success": True}
