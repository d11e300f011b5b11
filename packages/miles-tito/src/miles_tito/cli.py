"""The console script `miles-tito`."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit status."""
    from .errors import MilesError

    args = _parser().parse_args(argv)
    try:
        if args.command == "verify":
            return _verify(args)
        _run(_serve(args))
    except (MilesError, OSError) as error:  # OSError: the port is taken, or the host is not ours
        print(f"miles-tito: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="miles-tito", description="Token-in-token-out sessions for agents.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run a session server in front of an engine")
    serve.add_argument(
        "--engine",
        required=True,
        nargs="+",
        type=_url,
        metavar="URL",
        help="SGLang servers, or the router before several",
    )
    serve.add_argument("--tokenizer", required=True, help="folder with tokenizer.json and the chat template")
    serve.add_argument("--family", default="auto", help="model family; auto proves the template (default)")
    serve.add_argument("--model", default="policy", help="model name that answers carry (default: policy)")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=_number(0, 65535), default=8300, help="0 takes a free one (default: 8300)")
    serve.add_argument(
        "--max-context", type=_number(1), help="default: max_position_embeddings of the folder's config.json"
    )
    serve.add_argument("--temperature", type=float, default=1.0, help="for sessions that open without sampling")
    serve.add_argument(
        "--max-tokens", type=_number(1), default=512, help="a turn, for sessions that open without sampling"
    )
    serve.add_argument("--api-key", help="needed to open sessions; none: anybody may")
    serve.add_argument("--engine-api-key")
    serve.add_argument("--routed-experts", action="store_true", help="record each token's experts")
    serve.add_argument("--idle-timeout-s", type=_seconds, default=3600.0, help="remove a session unused for this long")
    serve.add_argument("--state-dir", help="folder where sessions outlive this server; none: they end with it")
    serve.add_argument("--grace-s", type=_seconds, default=10.0, help="for turns under way at the end (default: 10)")
    verify = commands.add_parser(
        "verify", help="prove exact joins for a tokenizer folder, or name the case that breaks"
    )
    verify.add_argument("--tokenizer", required=True, help="folder with tokenizer.json and the chat template")
    verify.add_argument("--family", default="auto", help="model family; auto reads it off the template (default)")
    verify.add_argument("--seed", type=int, default=0, help="of the random conversations (default: 0)")
    verify.add_argument("--conversations", type=_number(0), default=200, help="random ones to play (default: 200)")
    verify.add_argument("--json", action="store_true", help="every case as JSON instead of a table")
    return parser


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is no URL like http://127.0.0.1:30000")
    return text


def _number(least: int, most: int | None = None) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.lstrip("-").isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(
                f"{text!r} is no integer {f'from {least} to {most}' if most else f'of at least {least}'}"
            )
        return int(text)

    return read


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


def _run(work: Coroutine[Any, Any, None]) -> None:
    """With uvloop's event loop where it is installed, which takes less time for a turn."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


def _verify(args: argparse.Namespace) -> int:
    from .verification import verify

    report = verify(args.tokenizer, family=args.family, seed=args.seed, conversations=args.conversations)
    print(report.as_json().decode() if args.json else report.table())
    return 0 if report.ok else 1


async def _serve(args: argparse.Namespace) -> None:
    from .engine.expert_routing import ExpertLayout
    from .engine.generation import EnginePool
    from .engine.lost_requests import WatchedEngine
    from .engine.sglang import SGLangEngine
    from .errors import RecordError
    from .records import Sampling
    from .server import create_app, serve
    from .tokens.tokenizer import load_tokenizer, read_max_context

    experts = ExpertLayout.from_folder(args.tokenizer) if args.routed_experts else None
    if args.routed_experts and experts is None:
        raise RecordError(f"--routed-experts: the model in {args.tokenizer} has no experts by its config.json.")
    max_context: int = args.max_context or read_max_context(args.tokenizer)
    engines = [WatchedEngine(SGLangEngine(url, api_key=args.engine_api_key, experts=experts)) for url in args.engine]
    app = create_app(
        engine=EnginePool(engines) if len(engines) > 1 else engines[0],
        tokenizer=load_tokenizer(args.tokenizer),
        family=args.family,
        model=args.model,
        max_context=max_context,
        default_sampling=Sampling(temperature=args.temperature, max_tokens=args.max_tokens),
        api_key=args.api_key,
        idle_timeout_s=args.idle_timeout_s,
        state_dir=args.state_dir,
    )
    await serve(
        app,
        host=args.host,
        port=args.port,
        ready=lambda url: print(f"miles-tito: serving {url} (context {max_context}), Ctrl-C ends it", flush=True),
        signals=True,
        grace_s=args.grace_s,
    )
