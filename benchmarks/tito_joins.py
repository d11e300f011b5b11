"""Without HTTP: the ids of the next turn by joining, by rendering and encoding all anew, and by PyPI's `renderers`.

    python benchmarks/tito_joins.py

One conversation with Qwen3's tokenizer grows to each length; then the next user message comes. `join` is what a session
does: match the whole history with what was recorded, render and encode what is new. `renderers` extends ids that its
caller has found by itself (`bridge_to_next_turn`), so it is given the recorded ones. All on one core, in one process.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from miles_tito import Session, load_tokenizer
from miles_tito.engine.generation import Generation, one_version
from miles_tito.records import FinishReason
from miles_tito.tokens.family_choice import choose_family
from miles_tito.tokens.merge import Joiner
from miles_tito.tokens.messages import normalize

REPLY_TOKENS = 16
WORDS = "the quick brown fox jumps over a lazy dog while seven tests pass in two files "
SIZES = {"8k": 8 * 1024, "32k": 32 * 1024, "128k": 128 * 1024}
TRIES = 9
PEER = "renderers"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    what: str
    value: float
    unit: str
    target: str = ""
    met: bool | None = None


def rows_of_joins(folder: Path, family: str) -> Iterator[Row]:
    """Bytes held, and each way's time at each length."""
    tokenizer = load_tokenizer(folder)
    extend = _peer(folder) if family == "qwen3" else None
    session = Session("bench", Joiner(tokenizer, choose_family(family, tokenizer)), max_context=10**7)
    messages: list[dict[str, Any]] = []
    sampled = np.append(tokenizer.encode("ok " * REPLY_TOKENS)[: REPLY_TOKENS - 1], tokenizer.eos_ids[0])
    num_tokens, prompt = 0, np.empty(0, np.int32)
    for name, size in SIZES.items():
        while num_tokens < size:
            messages.append({"role": "user", "content": WORDS * 33})
            plan = session.plan(normalize(messages))
            turn = session.begin(plan, session.encode(plan), rid="bench")
            turn.reader.feed(sampled)
            turn.reader.finish()
            made = Generation(
                output_ids=sampled,
                logprobs=np.full(REPLY_TOKENS, -0.5, np.float32),
                versions=one_version(REPLY_TOKENS, 0),
                finish_reason=FinishReason.STOP,
            )
            messages.append(dict(session.commit(turn, made).message))
            prompt = turn.request.input_ids
            num_tokens = len(prompt) + REPLY_TOKENS
        fresh = {"role": "user", "content": WORDS * 33}
        asked = [*messages, fresh]

        def join(asked: list[dict[str, Any]] = asked, prompt: np.ndarray = prompt) -> np.ndarray:
            return np.concatenate([prompt, sampled, session.encode(session.plan(normalize(asked)))])

        def anew(asked: list[dict[str, Any]] = asked) -> np.ndarray:
            return tokenizer.encode(tokenizer.render(normalize(asked), generation_prompt=True))

        ours, joined = _time(join)
        again, _ = _time(anew, tries=3)
        yield Row(what=f"join at {name}, no HTTP", value=ours, unit="ms")
        yield Row(what=f"render and encode anew at {name}", value=again, unit="ms")
        yield Row(what=f"anew / join at {name}", value=again / ours, unit="times")
        if extend:
            before, completion = prompt.tolist(), sampled.tolist()

            def bridge(before: list[int] = before, completion: list[int] = completion, fresh: Any = fresh) -> list[int]:
                return extend(before, completion, fresh)

            theirs, whole = _time(bridge)
            assert whole == joined.tolist(), f"{PEER} gives other ids at {name}"
            yield Row(what=f"{PEER} at {name}, equal ids", value=theirs, unit="ms")
            yield Row(what=f"{PEER} / join at {name}", value=theirs / ours, unit="times")
    yield _held(session)


def _time(work: Callable[[], Any], *, tries: int = TRIES) -> tuple[float, Any]:
    """The median in ms, and the result."""
    times: list[float] = []
    result: Any = None
    for _ in range(tries):
        began = time.perf_counter()
        result = work()
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times), result


def _held(session: Session) -> Row:
    [path] = session.pick().paths
    arrays = [array for node in path for array in (node.prompt_ids, node.completion_ids, node.logprobs)]
    tokens = sum(len(node.prompt_ids) + len(node.completion_ids) for node in path)
    held = sum(array.nbytes for array in arrays) / tokens
    return Row(what="held, numpy", value=held, unit="bytes/token", target="<= 16", met=held <= 16)


def _peer(folder: Path) -> Callable[[list[int], list[int], dict[str, Any]], list[int]] | None:
    """Extends ids by one message as `renderers` does; None, said aloud, where it is not installed."""
    if importlib.util.find_spec(PEER) is None:
        print(f"no comparison with {PEER}: it is not installed (scripts/references.txt)", file=sys.stderr)
        return None
    from renderers.configs import Qwen3RendererConfig
    from renderers.qwen3 import Qwen3Renderer
    from transformers import AutoTokenizer

    # Otherwise it renders anew at each user message, as the template drops earlier reasoning there.
    config = Qwen3RendererConfig(thinking_retention="all")
    renderer: Any = Qwen3Renderer(AutoTokenizer.from_pretrained(folder), config)

    def extend(prompt: list[int], completion: list[int], message: dict[str, Any]) -> list[int]:
        made = renderer.bridge_to_next_turn(prompt, completion, [message])
        assert made is not None, f"{PEER} cannot extend this conversation"
        return list(made.token_ids)

    return extend


def unpack(archive: Path, into: str) -> Path:
    """The tokenizer folder in a `.tar.xz`."""
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # before 3.11.4 there is none
        tar.extractall(into)
    return Path(into) / archive.name.removesuffix(".tar.xz")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        shared = Path(__file__).resolve().parents[2] / "shared" / "data" / "tokenizers" / "qwen3.tar.xz"
        for row in rows_of_joins(unpack(shared, name), "qwen3"):
            print(f"{row.what:<34} {row.value:>9.2f} {row.unit}")
