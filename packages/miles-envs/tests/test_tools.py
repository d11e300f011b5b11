from __future__ import annotations

import asyncio
import threading
from enum import Enum
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_envs.errors import EnvironmentSetupError, InfraError
from miles_envs.shapes import Tool
from miles_envs.shapes.tools import ToolError, tools_by_name


def call(function, arguments="{}", *, timeout_s=5.0):
    return asyncio.run(Tool(function).call(arguments, timeout_s=timeout_s))


def add(a: int, b: int) -> int:
    """Add two integers.

    More for people.
    """
    return a + b


def test_a_schema_is_read_off_the_type_hints():
    assert Tool(add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two integers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }


class Color(Enum):
    RED = "red"


class Point(msgspec.Struct):
    x: float
    y: float


def test_richer_hints_become_richer_schemas():
    def paint(
        at: Point,
        color: Color,
        mode: Literal["fill", "line"] = "fill",
        sizes: list[int] | None = None,
        *,
        note: Annotated[str, msgspec.Meta(description="for people")] = "",
    ) -> None: ...

    parameters = Tool(paint).schema["function"]["parameters"]
    properties = parameters["properties"]
    assert parameters["required"] == ["at", "color"]
    assert properties["mode"]["enum"] == ["fill", "line"]
    assert properties["note"]["description"] == "for people"
    assert properties["at"] == {"$ref": "#/$defs/Point"}
    assert set(parameters["$defs"]) == {"Point", "Color"}


@given(st.integers(-(2**60), 2**60), st.integers(-(2**60), 2**60))
def test_arguments_arrive_as_they_were_sent(a, b):
    assert call(add, f'{{"b": {b}, "a": {a}}}') == str(a + b)


def test_sync_and_async_functions_and_defaults_work_alike():
    async def later(text: str, times: int = 2) -> str:
        return text * times

    assert call(later, '{"text": "ab"}') == "abab"
    assert call(lambda: None) == "null"


def test_results_are_text_or_json():
    assert call(lambda: {"a": [1, 2.5, "ü"]}) == '{"a":[1,2.5,"ü"]}'
    assert call(lambda: "as it is") == "as it is"
    assert call(lambda: object).startswith("<class")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('{"a": 1', "bad arguments for add: "),
        ('{"a": 1}', "missing required field `b`"),
        ('{"a": "1", "b": 2}', r"Expected `int`, got `str` - at `\$\.a`"),
        ('{"a": 1, "b": 2, "c": 3}', "unknown field `c`"),
        ("[1, 2]", "Expected `object`, got `array`"),
        ("", "missing required field `a`"),
    ],
)
def test_bad_arguments_are_explained(arguments, message):
    with pytest.raises(ToolError, match=message):
        call(add, arguments)


def test_a_failing_tool_tells_the_model_why():
    def divide(a: int, b: int) -> float:
        return a / b

    with pytest.raises(ToolError, match="ZeroDivisionError: division by zero"):
        call(divide, '{"a": 1, "b": 0}')


@pytest.mark.parametrize("error", [ConnectionResetError("gone"), InfraError("sandbox died")])
def test_broken_machinery_is_not_the_models_fault(error):
    async def fetch() -> str:
        raise error

    with pytest.raises(InfraError, match=str(error)):
        call(fetch)


def test_a_tool_that_hangs_is_given_up_and_blocks_nobody():
    release = threading.Event()

    def hang() -> None:
        release.wait(60)

    async def hang_too() -> None:
        await asyncio.Event().wait()

    for function in (hang, hang_too):
        with pytest.raises(ToolError, match=r"took longer than 0\.05 s"):
            call(function, timeout_s=0.05)
    release.set()


def test_two_hundred_blocking_tools_run_at_once():
    barrier = threading.Barrier(200)

    def meet() -> str:
        barrier.wait(30)
        return "met"

    async def main():
        tool = Tool(meet)
        return await asyncio.gather(*(tool.call("{}", timeout_s=30) for _ in range(200)))

    assert asyncio.run(main()) == ["met"] * 200


def no_hint(a):
    return a


def any_number(*numbers: int):
    return numbers


def by_position(a: int, /):
    return a


def from_a_lock(lock: threading.Event):
    return lock


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_hint, "Argument `a` of tool no_hint needs a type hint"),
        (any_number, "Tool any_number takes `numbers` as variadic positional; .* by name"),
        (by_position, "Tool by_position takes `a` as positional-only"),
        (from_a_lock, "Tool from_a_lock has an argument that JSON cannot carry"),
    ],
)
def test_functions_that_make_no_tool_are_refused(function, message):
    with pytest.raises(EnvironmentSetupError, match=message):
        Tool(function)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(EnvironmentSetupError, match="Two tools are called 'add'"):
        tools_by_name([add, add])
