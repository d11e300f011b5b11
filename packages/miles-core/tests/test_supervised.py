"""Demonstrations become exactly what a session would have recorded, and come in epochs."""

from __future__ import annotations

import json
import sys
import tarfile
import types
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from miles_core.config import SftConfig
from miles_core.run.demonstrations import DemonstrationError, SupervisedSource, imitate
from miles_rollout.dispatch import GroupRequest
from miles_tito.engine.generation import join
from miles_tito.records import Group, Prompt, Trajectory
from miles_tito.records.summary import GroupRef, summarize
from miles_tito.sessions.session import Session
from miles_tito.shared.plugins import ImportStringError
from miles_tito.testing import ScriptedEngine
from miles_tito.tokens.family_choice import choose_family
from miles_tito.tokens.merge import Joiner
from miles_tito.tokens.messages import normalize
from miles_tito.tokens.tokenizer import Tokenizer, load_tokenizer
from miles_train.models.tiny_tokenizer import save_tokenizer, train_tokenizer

TOKENIZERS = Path(__file__).parents[4] / "shared" / "data" / "tokenizers"

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 17, "b": 25})}}
PLAIN: list[dict[str, Any]] = [
    {"role": "system", "content": "You add."},
    {"role": "user", "content": "1+2"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "and 4?\n"},
    {"role": "assistant", "content": "It is 7."},
]
TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "17+25=?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c0", "content": "42"},
    {"role": "assistant", "content": "42"},
]
CONVERSATIONS: list[Any] = [PLAIN, {"messages": TOOLS, "tools": [ADD]}]

MakeSource = Callable[..., SupervisedSource]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tokenizer(train_tokenizer(0), folder)
    return folder


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = TOKENIZERS / "qwen3.tar.xz"
    if not archive.exists():
        pytest.skip(f"{archive.name} is not at hand")
    folder = tmp_path_factory.mktemp("qwen3")
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # before 3.11.4 there is none
        tar.extractall(folder)
    return folder / "qwen3"


@pytest.fixture(params=["tiny", "qwen3"])
def tokenizer(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture
def make_source(monkeypatch: pytest.MonkeyPatch) -> MakeSource:
    """A source over conversations, whose groups are their own handles."""

    def make(conversations: Any, tokenizer: Path, *, seed: int = 0, skip: int = 0, **args: Any) -> SupervisedSource:
        module: Any = types.ModuleType("demonstrations")
        module.read = lambda: conversations
        monkeypatch.setitem(sys.modules, "demonstrations", module)
        config = SftConfig(steps=1, data="demonstrations:read", data_args=args)
        source = SupervisedSource(config, seed=seed, store=lambda group: group)
        source.open(tokenizer=tokenizer, family="auto", skip=skip)
        return source

    return make


def draw(source: SupervisedSource, count: int, name: str = "g") -> tuple[GroupRef, list[Trajectory]]:
    ref = source.group(GroupRequest(prompt=Prompt(id="d"), group_id=name, group_size=count))
    group: Group = ref.handle
    return ref, [episode.trajectories[0] for episode in group.episodes]


def in_order(source: SupervisedSource, count: int) -> list[Trajectory]:
    return sorted(draw(source, count)[1], key=lambda trajectory: trajectory.id)


def runs(mask: np.ndarray) -> list[slice]:
    """Where the stretches of True begin and end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [slice(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


async def recorded(tokenizer: Path, messages: list[Any], tools: list[Any], replies: list[list[int]]) -> Trajectory:
    """The same conversation held with a session, whose engine samples `replies`."""
    loaded = load_tokenizer(tokenizer)
    session = Session("s", Joiner(loaded, choose_family("auto", loaded)), max_context=4096)
    engine = ScriptedEngine(replies)
    said: list[Any] = []
    for message in messages:
        if message["role"] == "assistant":
            plan = session.plan(normalize(said), tools=tools)
            turn = session.begin(plan, session.encode(plan), rid=f"r{len(said)}")
            generation = join([piece async for piece in engine.stream(turn.request)])
            turn.reader.feed(generation.output_ids)
            turn.reader.finish()
            session.commit(turn, generation)
        said.append(message)
    (trajectory,) = session.trajectories()
    return trajectory


@pytest.mark.parametrize("which", [0, 1], ids=["plain", "tool calls"])
async def test_a_demonstration_is_token_for_token_what_a_session_records(
    make_source: MakeSource, tokenizer: Path, which: int
) -> None:
    demonstration = in_order(make_source(CONVERSATIONS, tokenizer), 2)[which]
    messages, tools = (PLAIN, []) if which == 0 else (TOOLS, [ADD])
    replies = [demonstration.tokens[run].tolist() for run in runs(demonstration.loss_mask)]
    trajectory = await recorded(tokenizer, messages, tools, replies)
    assert trajectory.tokens.tolist() == demonstration.tokens.tolist()
    assert trajectory.loss_mask.tolist() == demonstration.loss_mask.tolist()


def test_the_assistants_turns_are_trained_to_their_end_and_nothing_else(make_source: MakeSource, tiny: Path) -> None:
    loaded: Tokenizer = load_tokenizer(tiny)
    plain, tools = in_order(make_source(CONVERSATIONS, tiny), 2)

    def imitated(trajectory: Trajectory) -> list[str]:
        turns = [trajectory.tokens[run].tolist() for run in runs(trajectory.loss_mask)]
        assert {turn[-1] for turn in turns} == {loaded.token_id("<|im_end|>")}
        return [loaded.decode(turn) for turn in turns]

    assert imitated(plain) == ["3", "It is 7."]
    assert imitated(tools) == ['<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>', "42"]


def test_an_epoch_shows_each_conversation_once_in_an_order_of_its_own(make_source: MakeSource, tiny: Path) -> None:
    many = [[{"role": "user", "content": str(n)}, {"role": "assistant", "content": str(n)}] for n in range(12)]
    source, same_seed, other_seed = (make_source(many, tiny, seed=seed) for seed in (0, 0, 1))
    groups = [draw(source, 8, f"g{n}") for n in range(3)]  # two epochs of 12
    drawn = [trajectory.id for _, trajectories in groups for trajectory in trajectories]
    first, second = drawn[:12], drawn[12:]
    assert Counter(first) == Counter(second) == {f"demonstration-{n}": 1 for n in range(12)}
    assert first != second
    assert [t.id for t in draw(same_seed, 12)[1]] == first
    assert [t.id for t in draw(other_seed, 12)[1]] != first
    assert all(len({e.id for e in ref.episodes}) == 8 for ref, _ in groups)


@pytest.mark.parametrize("skipped", [0, 7, 12, 31])
def test_a_resumed_source_goes_on_where_the_first_one_was(make_source: MakeSource, tiny: Path, skipped: int) -> None:
    many = [[{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": f"{i}"}] for i in range(12)]
    unbroken, resumed = make_source(many, tiny), make_source(many, tiny, skip=skipped)
    if skipped:
        draw(unbroken, skipped)
    expected, got = draw(unbroken, 9)[1], draw(resumed, 9)[1]
    assert [t.tokens.tolist() for t in got] == [t.tokens.tolist() for t in expected]


def test_every_demonstration_weighs_the_same(make_source: MakeSource, tiny: Path) -> None:
    ref, _ = draw(make_source(CONVERSATIONS, tiny), 5)
    assert imitate([ref]) == {f"g/{n}": 1.0 for n in range(5)}
    assert ref.rewards == (1.0,) * 5
    assert summarize(ref.handle).episodes == ref.episodes


def generator() -> Iterable[Any]:
    yield PLAIN
    yield 7


@pytest.mark.parametrize(
    ("conversations", "message"),
    [
        ([], "yielded no conversation"),
        (None, "returned a NoneType; it must return conversations"),
        (generator(), "Conversation 1 of `sft.data` is a int; it must be a list of messages"),
        ([PLAIN, "hello"], "Conversation 1 of `sft.data` is a str"),
        ([{"text": "hello"}], "Conversation 0 of `sft.data` is a dict; it must be .* a mapping with `messages`"),
        ([PLAIN, []], "Conversation 1 of `sft.data` cannot be learned from: `messages` must be a non-empty list"),
        ([PLAIN, PLAIN[:2]], "Conversation 1 of `sft.data` .* has no assistant turn"),
        ([PLAIN, PLAIN[2:]], "Conversation 1 of `sft.data` .* begins with an assistant turn"),
        ([[{"role": "usr", "content": "hi"}]], r"Conversation 0 of .* messages\[0\] has role 'usr'; known: system"),
        ([[*PLAIN[:4], {"role": "assistant", "text": "7"}]], r"Conversation 0 .* messages\[4\] has fields .*: text"),
    ],
)
def test_a_conversation_that_cannot_be_learned_is_named_by_its_number(
    make_source: MakeSource, tiny: Path, conversations: Any, message: str
) -> None:
    with pytest.raises(DemonstrationError, match=message):
        make_source(conversations, tiny)


def test_arguments_that_the_reader_does_not_take_are_told(make_source: MakeSource, tiny: Path) -> None:
    with pytest.raises(
        ImportStringError, match=r"`sft.data` is 'demonstrations:read' .*unexpected keyword argument 'n'"
    ):
        make_source(CONVERSATIONS, tiny, n=3)
