"""A scripted SGLang server: takes weights like the fake of miles-weightsync, and answers /generate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import torch
from miles_rollout.engines.versions import SUPPORTED
from weightsync_fakes import FakeEngine

Script = Callable[[Sequence[int]], Sequence[int]]
"""The ids sampled for a prompt's ids, stop token included."""


class FakeSGLang(FakeEngine):
    """Serves whatever model is pushed to it; requests wait while it is paused."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._running = 0
        self.is_starting = False
        """Answers like a server that still loads its model."""
        self._open = threading.Event()
        self._open.set()
        super().__init__(architecture="Qwen3ForCausalLM")
        self.params = {}

    def stop(self) -> None:
        self._open.set()
        super().stop()

    def do_model_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return (HTTPStatus.SERVICE_UNAVAILABLE, "loading") if self.is_starting else super().do_model_info(body)

    def do_server_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        status, facts = super().do_server_info(body)
        return status, facts | {"version": list(SUPPORTED)[-1], "model_path": "whatever is pushed"}

    def do_ready(self, body: dict[str, Any]) -> tuple[int, Any]:
        is_ready = self._open.is_set() and not self.is_starting
        return (HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE), ""

    def do_health_generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        return self.do_ready(body)

    def do_pause_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self._open.clear()
        return super().do_pause_generation(body)

    def do_continue_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self._open.set()
        return super().do_continue_generation(body)

    def do_abort_request(self, body: dict[str, Any]) -> tuple[int, Any]:
        return HTTPStatus.OK, ""

    def do_v1_loads(self, body: dict[str, Any]) -> tuple[int, Any]:
        load = {"dp_rank": 0, "num_running_reqs": self._running, "num_waiting_reqs": 0, "token_usage": 0.0}
        return HTTPStatus.OK, {"loads": [load]}

    def do_generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        self._running += 1
        self._open.wait()
        self._running -= 1
        ids = list(self.script(body["input_ids"]))
        return HTTPStatus.OK, {
            "output_ids": ids,
            "meta_info": {
                "id": body["rid"],
                "finish_reason": {"type": "stop"},
                "completion_tokens": len(ids),
                "output_token_logprobs": [[-1.0, token, None] for token in ids],
                "weight_version": self.version,
            },
        }

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self.params.update((name, tensor.clone()) for name, tensor in tensors)
