"""`miles-weightsync follow`: keep engines of this host at the newest version that a trainer put into a store."""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ..config import PushConfig
from ..errors import PushConfigError, WeightSyncError

if TYPE_CHECKING:
    from .follow import Follower

_MAX_WAIT_S = 30.0
"""Between tries of what failed; the wait doubles up to this."""
_NOTICE_S = 0.1

_log = logging.getLogger(__name__)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # pyright: ignore[reportPrivateUsage]
    """Register the command."""
    about = "engines fetch new weights from a store"
    parser = commands.add_parser("follow", help=about, description=__doc__)
    default = PushConfig()
    parser.add_argument("store", metavar="STORE", help="`store` of the trainer's push: a path, or a URL of fsspec")
    parser.add_argument("--engine", action="append", required=True, metavar="URL", help="may be given several times")
    parser.add_argument("--way", choices=("tensor", "staged"), default="tensor", help="how to push, default tensor")
    parser.add_argument("--transport", choices=("shm", "tcp"), help="of `--way staged`, default shm")
    parser.add_argument("--pause", choices=("retract", "in_place", "abort"), default=default.pause)
    parser.add_argument("--timeout-s", type=float, default=default.timeout_s, metavar="S", help="of one push")
    parser.add_argument("--poll-s", type=float, default=1.0, metavar="S", help="between looks at the store, default 1")
    parser.add_argument("--once", action="store_true", help="one look; status 1 unless every engine serves the newest")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable with the engines' API key")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Follow until SIGTERM or Ctrl-C. Returns the exit status: 0, 1 for `--once` in vain, 2 for unusable input."""
    from .follow import Follower  # needs torch, which `plan` can do without

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request
    try:
        follower = Follower(options.store, options.engine, _config(options), api_key=_api_key(options.api_key_env))
    except (WeightSyncError, ImportError, ValueError) as error:  # fsspec: no such protocol, or its package is missing
        print(f"miles-weightsync follow: {error}", file=sys.stderr)
        return 2
    with follower:
        if options.once:
            return _once(follower)
        _follow(follower, poll_s=options.poll_s)
    return 0


def _once(follower: Follower) -> int:
    try:
        follower.step()
    except (WeightSyncError, OSError) as error:
        _log.error("%s", error)
        return 1
    except Exception as error:  # an object store's client has errors of its own
        _log.error("%s: %s", type(error).__name__, error)
        return 1
    if follower.version is None:
        _log.error("%s has no version", follower.store)
    return 0 if follower.is_current else 1


def _follow(follower: Follower, *, poll_s: float) -> None:
    def end(number: int, frame: object) -> None:
        follower.stop()
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _step_until_stopped(follower, poll_s=poll_s)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    _log.info("ends, holding version %s", follower.version)


def _step_until_stopped(follower: Follower, *, poll_s: float) -> None:
    failures, told, is_told_of_waiting = 0, "", False
    while not follower.is_stopped:
        try:
            follower.step()
            failures, told = 0, ""
            if follower.version is None and not is_told_of_waiting:
                is_told_of_waiting = True
                _log.info("%s has no version yet; waiting for the first", follower.store)
        except WeightSyncError as error:
            failures += 1
            if str(error) != told:
                _log.error("%s", error)
            told = str(error)
        except Exception:  # an object store's own errors, or a bug of ours: engines are better off with another try
            failures += 1
            _log.exception("the step failed")
        until = time.monotonic() + min(poll_s * 2 ** min(failures, 10), max(poll_s, _MAX_WAIT_S))
        while not follower.is_stopped and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _NOTICE_S))  # not a wait for an event: a signal handler must not take its lock


def _config(options: argparse.Namespace) -> PushConfig:
    if not 0 < options.poll_s < math.inf:
        raise PushConfigError(f"`--poll-s` is {options.poll_s}; it must be positive, and finite.")
    if options.way != "staged" and options.transport is not None:
        raise PushConfigError(f"`--transport` has no effect with `--way {options.way}`; remove it.")
    config = PushConfig(way=options.way, pause=options.pause, timeout_s=options.timeout_s)
    if options.way != "staged":
        return config
    # A delta between two processes of one host saves no time, and takes another copy of the weights.
    return replace(config, transport=options.transport or "shm", delta="off")


def _api_key(name: str | None) -> str | None:
    if name is not None and not os.environ.get(name):
        raise PushConfigError(f"`--api-key-env {name}`: there is no such environment variable, or it is empty.")
    return os.environ[name] if name is not None else None
