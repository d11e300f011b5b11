"""Start one server: check, prepare, import once, fork, serve.

    main ──imports sglang (once)──┬─ fork ─▶ scheduler      loads the model
                                  ├─ fork ─▶ detokenizer
                                  └─ HTTP server, tokenizer, one warm-up request

SGLang spawns its processes, and each then spends 8 to 20 s importing the same modules. A fork costs nothing and shares
the memory. It is safe while this process has one thread, which is checked at that moment; otherwise, and with data
parallel ranks (whose controller forks from a threaded process), the processes are spawned as SGLang has it.
`MILES_SGLANG_START_METHOD=spawn` in the environment forces that.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from miles_tito.shared.http import NoAnswer, call_once

from miles_rollout.engines.errors import EngineVersionError
from miles_rollout.engines.sglang_cpu import absent, kernels, models, patches
from miles_rollout.engines.versions import check_sglang

START_METHOD = "MILES_SGLANG_START_METHOD"
WARM_UP_S = 120.0
RETRY_S = 0.05
USAGE_ERROR = 2


def main(argv: Sequence[str]) -> int:
    """Serve until terminated. Returns an exit status."""
    try:
        print(f"miles: {check_sglang('cpu')}", flush=True)
    except EngineVersionError as problem:
        print(f"miles: {problem}", file=sys.stderr)
        return USAGE_ERROR
    prepare()
    options = with_defaults(argv)
    models.import_only_served_model(options)
    gc.disable()  # importing makes millions of objects and no garbage; collecting meanwhile costs a tenth of the start
    engine = importlib.import_module("sglang.srt.entrypoints.engine")
    http_server = importlib.import_module("sglang.srt.entrypoints.http_server")
    importlib.import_module("sglang.srt.models.registry")
    gc.enable()
    patches.before_processes_start(engine.Engine, choose_start_method)
    importlib.import_module("sglang.srt.plugins").load_plugins()
    server_args = importlib.import_module("sglang.srt.server_args").prepare_server_args(options)
    try:
        http_server.launch_server(server_args, execute_warmup_func=warm_up)
    finally:
        importlib.import_module("sglang.srt.utils").kill_process_tree(os.getpid(), include_parent=False)
    return 0


def prepare() -> None:
    """Make SGLang importable here. Runs in the main process and in every spawned one, before any sglang module."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # Nothing is compiled: torch.compile would need a C++ compiler and minutes on small models.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    absent.install()
    kernels.install()
    patches.install()


def with_defaults(argv: Sequence[str]) -> list[str]:
    """Add the options without which the stock server does not come up on a CPU."""
    options = list(argv)
    for flag, value in (("--device", "cpu"), ("--attention-backend", "torch_native")):
        if not any(option == flag or option.startswith(f"{flag}=") for option in options):
            options += [flag, value]
    return options


def choose_start_method(dp_size: int) -> str:
    """`fork` where that cannot copy a lock in somebody else's hands, `spawn` elsewhere."""
    forced = os.environ.get(START_METHOD)
    alone = len(os.listdir("/proc/self/task")) == 1
    method = forced or ("fork" if alone and dp_size == 1 else "spawn")
    multiprocessing.set_start_method(method, force=True)
    if method == "fork":
        gc.freeze()  # the collector would otherwise write to, and so copy, every inherited page
    print(f"miles: starting the engine's processes by {method}", flush=True)
    return method


def warm_up(server_args: Any) -> bool:
    """One short request before the server says it is ready: a broken model fails here and not in the first episode.

    SGLang's own warm-up waits in steps of a second and asks for eight tokens.
    """
    http_server = importlib.import_module("sglang.srt.entrypoints.http_server")
    url = server_args.url()
    body = {"input_ids": [0, 1], "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}}
    try:
        _until_listening(f"{url}/model_info")
        answer = call_once("POST", f"{url}/generate", json=body, timeout_s=WARM_UP_S)
        problem = "" if answer.is_ok else f"status {answer.status} {answer.excerpt(2000)}"
    except NoAnswer as error:
        problem = str(error)
    if problem:
        print(f"miles: the warm-up request failed: {problem}", file=sys.stderr, flush=True)
        importlib.import_module("sglang.srt.utils").kill_process_tree(os.getpid())
        return False
    tokenizer_manager = importlib.import_module("sglang.srt.managers.tokenizer_manager")
    http_server._global_state.tokenizer_manager.server_status = tokenizer_manager.ServerStatus.Up
    return True


def _until_listening(url: str) -> None:
    deadline = time.monotonic() + WARM_UP_S
    while True:
        try:
            call_once("GET", url, timeout_s=WARM_UP_S)
            return
        except NoAnswer:
            if time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_S)


if __name__ == "__mp_main__":
    prepare()
