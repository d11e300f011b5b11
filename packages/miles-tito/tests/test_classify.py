"""What each turn of a session is called, by its content and its client's headers."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from miles_tito import FinishReason, RequestError, Session, Tokenizer, Trajectory
from miles_tito.engine.generation import Generation, one_version
from miles_tito.sessions.turn_kinds import Hints, read_hints
from miles_tito.sessions.turn_selection import pick_all, pick_leaves
from miles_tito.tokens.family_choice import choose_family
from miles_tito.tokens.merge import Joiner
from miles_tito.tokens.messages import normalize

TOOLS = [{"type": "function", "function": {"name": "task", "parameters": {"type": "object", "properties": {}}}}]
MAIN = Hints()


class Talk:
    """A session by request and reply."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.session = Session("s", Joiner(tokenizer, choose_family("auto", tokenizer)), max_context=10_000)
        self.num_sampled = 0

    def begin(self, messages: list[dict[str, Any]], *, hints: Hints = MAIN, tools: Any = ()) -> Any:
        plan = self.session.plan(normalize(messages), tools=tools, hints=hints)
        return self.session.begin(plan, self.session.encode(plan), rid="r")

    def finish(self, turn: Any, text: str) -> dict[str, Any]:
        ids = np.append(self.tokenizer.encode(text), self.tokenizer.eos_ids[0])
        self.num_sampled += len(ids)
        turn.reader.feed(ids)
        turn.reader.finish()
        generation = Generation(
            output_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            versions=one_version(len(ids), 0),
            finish_reason=FinishReason.STOP,
        )
        return dict(self.session.commit(turn, generation).message)

    def turn(self, messages: list[dict[str, Any]], text: str, **options: Any) -> dict[str, Any]:
        return self.finish(self.begin(messages, **options), text)

    @property
    def kinds(self) -> list[str]:
        return [node["kind"] for node in self.session.describe()["nodes"]]

    def picked(self, picker: Any = None) -> list[tuple[str, str, str | None]]:
        found: tuple[Trajectory, ...] = self.session.trajectories(*([picker] if picker else []))
        return [(t.id, str(t.kind), t.parent_id) for t in found]


@pytest.fixture
def talk(tokenizer: Tokenizer) -> Talk:
    return Talk(tokenizer)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(**arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'task', 'arguments': arguments})}\n</tool_call>"


def test_the_next_turns_of_a_root_are_turns(talk: Talk):
    messages = [user("q")]
    messages += [talk.turn(messages, "one"), user("more")]
    messages += [talk.turn(messages, "two"), user("more")]
    talk.turn(messages, "three")
    assert talk.kinds == ["root", "turn", "turn"]
    assert talk.picked() == [("s:0", "main", None)]


def test_a_request_sent_again_makes_a_retry_of_the_reply_that_nobody_used(talk: Talk):
    messages = [user("q")]
    messages += [talk.turn(messages, "one"), user("more")]
    talk.turn(messages, "not used")
    messages += [talk.turn(messages, "used"), user("more")]
    talk.turn(messages, "end")
    assert talk.kinds == ["root", "retry", "turn", "turn"]
    assert talk.picked() == [("s:1", "main", "s:0")]
    assert talk.picked(pick_leaves) == [("s:0", "retry", None), ("s:1", "main", "s:0")]


def test_a_reply_is_no_retry_once_it_is_used(talk: Talk):
    first = talk.turn([user("q")], "one")
    talk.turn([user("q")], "two")
    assert talk.kinds == ["retry", "root"]
    talk.turn([user("q"), first, user("more")], "end")
    assert talk.kinds == ["root", "root", "turn"]
    assert len(talk.picked()) == 2


def test_equal_requests_at_one_time_are_forks(talk: Talk):
    turns = [talk.begin([user("q")]), talk.begin([user("q")])]
    for turn in turns:
        talk.finish(turn, "x")
    assert talk.kinds == ["root", "fork"]
    assert talk.picked() == [("s:0", "main", None), ("s:1", "fork", None)]


def test_another_question_behind_a_continued_turn_is_a_fork(talk: Talk):
    messages = [user("q")]
    messages += [talk.turn(messages, "one")]
    talk.turn([*messages, user("a")], "x")
    talk.turn([*messages, user("b")], "y")
    assert talk.kinds == ["root", "turn", "fork"]


TITLES = [
    "Generate a short title for this conversation:\nq",
    "You are a title generator. You output ONLY a thread title.",
    "Generate a concise, sentence-case title (3-7 words) that captures the main topic of this coding session.",
]


@pytest.mark.parametrize("text", TITLES)
def test_a_title_call_is_left_out_and_takes_no_root_away(text: str, talk: Talk):
    talk.turn([{"role": "system", "content": text}, user("q")], "Hello file")
    talk.turn([user("q")], "one")
    assert talk.kinds == ["title", "root"]
    assert talk.picked() == [("s:1", "main", None)]


def test_a_task_about_titles_is_no_title_call(talk: Talk):
    talk.turn([user("Generate a title for this article: …")], "one")
    assert talk.kinds == ["root"]


def test_an_agent_at_work_on_titles_is_no_title_call(talk: Talk):
    talk.turn([user("Generate a title for this conversation page in index.html")], "one", tools=TOOLS)
    assert talk.kinds == ["root"]


def test_turns_behind_which_only_a_title_call_stands_are_kept(talk: Talk):
    reply = talk.turn([user("q")], "one")
    talk.turn([user("q"), reply, user("name it")], "Hello", hints=Hints(purpose="title"))
    assert talk.kinds == ["root", "title"]
    assert talk.picked() == [("s:0", "main", None)]
    assert talk.turn([user("q"), reply, user("more")], "two")
    assert talk.kinds == ["root", "title", "turn"]


def test_a_sub_agent_is_known_by_the_prompt_that_a_tool_call_gave_it(talk: Talk):
    reply = talk.turn([user("q")], call(prompt="Create the file, please"), tools=TOOLS)
    agent = [{"role": "system", "content": "You help."}, user("<context>\n\nCreate the file, please")]
    agent += [talk.turn(agent, "done"), user("more")]
    talk.turn(agent, "done again")
    talk.turn([user("q"), reply, {"role": "tool", "content": "done again"}], "fine", tools=TOOLS)
    assert talk.kinds == ["root", "subagent", "turn", "turn"]
    assert talk.picked() == [("s:0", "main", None), ("s:1", "subagent", "s:0")]


def test_named_agents_share_no_turns_even_with_equal_messages(talk: Talk):
    for name in (None, "a", "b"):
        reply = talk.turn([user("q")], "one", hints=Hints(agent=name))
        talk.turn([user("q"), reply, user("more")], "two", hints=Hints(agent=name))
    assert talk.kinds == ["root", "turn", "subagent", "turn", "subagent", "turn"]
    assert [kind for _, kind, _ in talk.picked()] == ["main", "subagent", "subagent"]


SUMMARY = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary."
RESTARTS = {
    "carries the summary": "So far: {summary}",
    "says so": "This session is being continued from a previous conversation that ran out of context.",
}


@pytest.mark.parametrize("how", RESTARTS)
def test_both_sides_of_a_compaction_are_kept_and_named(how: str, talk: Talk):
    summary = "The file was made and the tests pass; only the docs are missing."
    messages = [user("q")]
    messages += [talk.turn(messages, "one", tools=TOOLS), user("more")]
    messages += [talk.turn(messages, "two", tools=TOOLS), user(SUMMARY)]
    talk.turn(messages, summary)
    restarted = [user(RESTARTS[how].format(summary=summary)), {"role": "assistant", "content": "two"}, user("go on")]
    restarted += [talk.turn(restarted, "three", tools=TOOLS), user("more")]
    talk.turn(restarted, "four", tools=TOOLS)
    assert talk.kinds == ["root", "turn", "compaction", "compaction", "turn"]
    assert talk.picked() == [("s:0", "main", None), ("s:1", "compaction", "s:0"), ("s:2", "compaction", "s:1")]
    carried = talk.session.trajectories()[2]
    assert carried.num_loss_tokens == sum(len(talk.tokenizer.encode(text)) + 1 for text in ("three", "four"))


def test_a_turn_that_only_a_summary_goes_on_from_is_no_retry(talk: Talk):
    for n in range(2):
        reply = talk.turn([user("q")], f"one {n}", tools=TOOLS)
        talk.turn([user("q"), reply, user(SUMMARY)], f"A summary of what was done so far: {n}.")
    assert talk.kinds == ["root", "compaction", "fork", "compaction"]
    assert len(talk.picked()) == 4


def test_a_root_without_any_compaction_before_it_is_a_plain_root(talk: Talk):
    talk.turn([user("This session is being continued from a previous conversation.")], "one", hints=Hints(window=3))
    assert talk.kinds == ["root"]


HEADERS: dict[str, tuple[dict[str, str], Hints]] = {
    "nothing": ({}, Hints()),
    "claude code": ({"x-claude-code-session-id": "s", "x-stainless-retry-count": "0"}, Hints()),
    "claude code's agent": ({"x-claude-code-agent-id": "a7"}, Hints(agent="a7")),
    "codex": ({"thread-id": "t", "session-id": "t", "x-codex-window-id": "t:0"}, Hints()),
    "codex's agent": ({"thread-id": "u", "session-id": "t", "x-openai-subagent": "collab_spawn"}, Hints(agent="u")),
    "codex's summary": ({"x-codex-turn-metadata": '{"request_kind":"compaction"}'}, Hints(purpose="compaction")),
    "codex later": ({"x-codex-window-id": "t:2"}, Hints(window=2)),
    "a retry": ({"x-stainless-retry-count": "2"}, Hints(is_retry=True)),
    "own words": ({"x-miles-agent": "critic", "x-miles-kind": "subagent"}, Hints(agent="critic", purpose="subagent")),
    "noise": ({"x-codex-turn-metadata": "{", "x-codex-window-id": "a:b:c"}, Hints()),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_of_known_clients_are_read(case: str):
    headers, hints = HEADERS[case]
    assert read_hints(headers) == hints


def test_an_unknown_kind_in_a_header_is_refused():
    with pytest.raises(RequestError, match="x-miles-kind is 'main'; known: subagent, compaction, title"):
        read_hints({"x-miles-kind": "main"})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(data=st.data())
def test_in_any_tree_every_picker_trains_each_turn_at_most_once_and_all_of_them_exactly_once(
    tokenizer: Tokenizer, data: st.DataObject
):
    talk = Talk(tokenizer)
    histories: list[list[dict[str, Any]]] = [[]]
    for n in range(data.draw(st.integers(1, 12))):
        history = data.draw(st.sampled_from(histories))
        messages = [*history, user(data.draw(st.sampled_from(["a", "b", "generate a title for this conversation"])))]
        histories.append([*messages, talk.turn(messages, data.draw(st.sampled_from([f"x{n}", "same"])))])
    for picker in (pick_leaves, pick_all):
        trajectories = talk.session.trajectories(picker)
        assert sum(t.num_loss_tokens for t in trajectories) == talk.num_sampled
        assert len({t.id for t in trajectories}) == len(trajectories)
    picked = talk.session.pick()
    trained = {node.id for path in picked.paths for node in path}
    assert trained.isdisjoint(entry.node for entry in picked.dropped)
    assert len(trained) + len(picked.dropped) == talk.session.num_turns
    kinds = {node["id"]: node["kind"] for node in talk.session.describe()["nodes"]}
    ends = {path[-1].id for path in picked.paths}
    assert {kinds[node] for node in ends}.isdisjoint({"retry", "title"})
