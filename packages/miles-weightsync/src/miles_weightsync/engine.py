"""One SGLang server's update endpoints, as plain blocking calls with one deadline for the whole push.

Read and driven live on SGLang 0.5.23; later versions may differ in the answers that this file interprets.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import httpx

from .config import Pause
from .errors import EngineRequestError, ShardError
from .payload import LOAD_FORMAT, encode_command
from .planner import ModelShape, SGLang

_FLUSH_WAIT_S = 30.0
"""How long a flush may wait for requests that are just being retracted or aborted."""
_FLUSH_INTERVAL_S = 0.05


class Deadline:
    """A point in time that every request of a push on one engine shares."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def left(self) -> float:
        return max(self._end - time.monotonic(), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the layout of weights inside an engine depends on."""

    url: str
    architecture: str
    """Class name in the model's config, "" when the engine does not say."""
    device: str
    tp: int
    dtype: str | None
    """Element type of its parameters; None when it was started with `auto` and its config file cannot be read."""
    layout: SGLang | None
    """How its parameters lie; None where that is not known."""
    dp: int
    """Data-parallel replicas of the whole model."""


class EngineClient:
    """Blocking calls to one engine. Not shared between threads."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # trust_env off: a proxy from the environment must not stand between trainer and engine.
        # Loading the certificate store costs 50 ms a client; plain HTTP needs none.
        is_secure = self.url.startswith("https:")
        self._http = httpx.Client(base_url=self.url, headers=headers, trust_env=False, verify=is_secure)

    def close(self) -> None:
        self._http.close()

    def facts(self, deadline: Deadline) -> EngineFacts:
        """Read how the engine was started."""
        args = self._call("GET", "/server_info", None, deadline)
        if "tp_size" not in args:
            raise EngineRequestError(f"/server_info: what answers at {self.url} is no SGLang server.")
        model = self._call("GET", "/model_info", None, deadline)
        config = _read_model_config(str(args.get("model_path", "")))
        architectures = model.get("architectures") or [""]
        return EngineFacts(
            url=self.url,
            architecture=str(architectures[0]),
            device=str(args.get("device") or "cuda"),
            tp=int(args.get("tp_size") or 1),
            dtype=_resolve_dtype(str(args.get("dtype") or "auto"), config),
            layout=_layout(args, {"architectures": architectures, **config}),
            dp=int(args.get("dp_size") or 1),
        )

    def pause(self, mode: Pause, deadline: Deadline) -> None:
        """Stop generating; requests that arrive from now on wait."""
        self._call("POST", "/pause_generation", {"mode": mode}, deadline)

    def flush_cache(self, deadline: Deadline, *, wait: bool) -> None:
        """Drop the prefix cache; refused while requests hold parts of it.

        Asked again and again rather than with the engine's own `timeout`: that one waits for an empty queue as well,
        and under pause mode retract the queue is full by design.
        """
        patience = min(_FLUSH_WAIT_S, deadline.left()) if wait else 0.0
        give_up = time.monotonic() + patience
        while True:
            try:
                self._call("POST", "/flush_cache", None, deadline)
                return
            except EngineRequestError as error:
                if error.status != 400 or time.monotonic() >= give_up:
                    raise
            time.sleep(_FLUSH_INTERVAL_S)

    def begin(self, deadline: Deadline, *, selector: Literal["all", "draft"] = "all") -> None:
        """Open an update session, closing one that an earlier, failed push left open.

        Args:
            selector: the models it is about.
        """
        body = {"selector": selector}
        try:
            self._call("POST", "/begin_weight_update", body, deadline)
        except EngineRequestError as error:
            if "already open" not in str(error):
                raise
            self._call("POST", "/end_weight_update", {}, deadline)
            self._call("POST", "/begin_weight_update", body, deadline)

    def load_tensors(self, payload_R: list[str], deadline: Deadline) -> None:
        """Load one bucket; one payload for each tensor-parallel rank R of the engine."""
        body = {"serialized_named_tensors": payload_R, "load_format": LOAD_FORMAT, "flush_cache": False}
        self._call("POST", "/update_weights_from_tensor", body, deadline)

    def open_session(self, deadline: Deadline) -> bool:
        """Open an update session. False if one is open already, which may be somebody else's."""
        try:
            self._call("POST", "/begin_weight_update", {}, deadline)
        except EngineRequestError as error:
            if "already open" not in str(error):
                raise
            return False
        return True

    def command(self, command: str, loader: str, *, ranks: int, selector: str, deadline: Deadline) -> None:
        """Have a custom loader carry out a command in every rank. Needs an open session."""
        payload = encode_command(command)
        body: dict[str, Any] = {"serialized_named_tensors": [payload] * ranks, "load_format": loader}
        body |= {"flush_cache": False, "selector": selector}
        self._call("POST", "/update_weights_from_tensor", body, deadline)

    def load_adapter(
        self, tag: str, config: Mapping[str, object], payload_R: list[str], deadline: Deadline
    ) -> tuple[str, ...]:
        """Load a LoRA adapter from staged tensors; one payload for each tensor-parallel rank R of the engine.

        Returns:
            Names of all adapters that are loaded now, as far as the engine says.
        """
        body = {"lora_name": tag, "config_dict": dict(config), "serialized_named_tensors": payload_R}
        answer = self._call("POST", "/load_lora_adapter_from_tensors", {**body, "load_format": LOAD_FORMAT}, deadline)
        return tuple(answer.get("loaded_adapters") or ())

    def unload_adapter(self, tag: str, deadline: Deadline) -> None:
        """Unload one that may be gone already; the engine waits for the requests that use it."""
        try:
            self._call("POST", "/unload_lora_adapter", {"lora_name": tag}, deadline)
        except EngineRequestError as error:
            if "does not exist" not in str(error):
                raise

    def is_paused(self, deadline: Deadline) -> bool:
        """Whether requests wait; `/ready` answers 503 then."""
        try:
            self._call("GET", "/ready", None, deadline)
        except EngineRequestError as error:
            if error.status == 503:
                return True
            raise
        return False

    def weight_version(self, deadline: Deadline) -> str:
        """What the engine says that it serves: the version stamped last, else what it was started with."""
        return str(self._call("GET", "/model_info", None, deadline).get("weight_version"))

    def server_info(self, deadline: Deadline) -> dict[str, Any]:
        """How the engine was started: all its options."""
        return self._call("GET", "/server_info", None, deadline)

    def load_disk(self, path: str, deadline: Deadline) -> None:
        """Load a whole checkpoint folder."""
        body = {"model_path": path, "flush_cache": False}
        self._call("POST", "/update_weights_from_disk", body, deadline)

    def end(self, deadline: Deadline) -> None:
        """Close the update session."""
        self._call("POST", "/end_weight_update", {}, deadline)

    def checksums(self, deadline: Deadline) -> list[dict[str, str]]:
        """Checksum of every parameter, for each tensor-parallel rank of each replica."""
        body = {"action": "checksum", "selector": "target"}
        answer = self._call("POST", "/weights_checker", body, deadline)
        ranks = cast("list[dict[str, dict[str, str]]]", answer.get("ranks") or [])
        return [rank.get("checksums", {}) for rank in ranks]

    def stamp(self, version: int, deadline: Deadline) -> None:
        """Name the version: tokens generated from here on carry it, also those of requests that are held."""
        body = {"new_version": str(version), "abort_all_requests": False}  # the engine's default is to abort
        self._call("POST", "/update_weight_version", body, deadline)

    def resume(self, deadline: Deadline) -> None:
        """Generate again."""
        self._call("POST", "/continue_generation", {}, deadline)

    def _call(self, method: str, path: str, body: dict[str, Any] | None, deadline: Deadline) -> dict[str, Any]:
        left = deadline.left()
        if left <= 0:
            raise EngineRequestError(f"{path}: the push passed its deadline of {deadline.timeout_s:g} s.")
        try:
            answer = self._http.request(method, path, json=body, timeout=left)
        except httpx.TimeoutException:
            raise EngineRequestError(f"{path}: no answer within the push's {deadline.timeout_s:g} s.") from None
        except httpx.HTTPError as error:
            raise EngineRequestError(f"{path}: {type(error).__name__}: {error}") from error
        content = _json_object(answer)
        if answer.status_code != 200 or content.get("success") is False:
            told = content.get("message") or content.get("error_message") or answer.text[:500]
            raise EngineRequestError(f"{path}: HTTP {answer.status_code}: {told}", status=answer.status_code)
        return content


def is_local(url: str) -> bool:
    """Whether an engine's address belongs to this host: only a local address can be bound to."""
    host = urlsplit(url).hostname or ""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _json_object(answer: httpx.Response) -> dict[str, Any]:
    """The body as an object; flush answers in plain text."""
    try:
        content = answer.json()
    except json.JSONDecodeError:
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}


def _layout(args: dict[str, Any], config: dict[str, Any]) -> SGLang | None:
    """The planner's layout of an engine whose live parameters are what was loaded."""
    runner = str(args.get("moe_runner_backend") or "auto")
    if args.get("quantization") is not None or runner not in ("auto", "triton"):  # others shuffle expert weights
        return None
    try:
        layout = SGLang.from_server_info(args, model=ModelShape.from_hf(config))
    except ShardError:
        return None
    may_fuse = layout.on_gpu and layout.model.n_shared_experts == 1 and not args.get("disable_shared_experts_fusion")
    return None if may_fuse else layout


def _read_model_config(model_path: str) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", json.loads((Path(model_path) / "config.json").read_text()))
    except (OSError, ValueError):  # a hub name, or another host's path
        return {}


def _resolve_dtype(dtype: str, config: dict[str, Any]) -> str | None:
    """SGLang's rule (`model_config.py`): `auto` is the config's dtype, except that float32 becomes float16."""
    short = {"float": "float32", "half": "float16"}.get(dtype, dtype)
    if short != "auto":
        return short
    stored = config.get("dtype") or config.get("torch_dtype")
    if not config or str(config.get("model_type", "")).startswith("gemma"):
        return None
    return "float16" if stored in (None, "float32", "float") else str(stored)
