"""Plain Python functions as tools: their JSON schema from type hints, their arguments checked against it."""

from __future__ import annotations

import asyncio
import inspect
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from miles_envs.errors import EnvironmentSetupError, InfraError

T = TypeVar("T")


class ToolError(Exception):
    """A call of a tool failed by the model's fault; `ToolLoop` answers the model with the text."""


class Tool:
    """A Python function that the model may call; `ToolLoop` makes one of each function it is given.

    Attributes:
        name: the function's.
        schema: OpenAI's description of it. Descriptions of single arguments come from
            `Annotated[int, msgspec.Meta(description="...")]`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """
        Raises:
            EnvironmentSetupError: an argument lacks a type hint that JSON can carry, or cannot be given by name.
        """
        self.name = function.__name__
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)
        self._arguments = _arguments_type(function)
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " "),
                "parameters": _parameters(self._arguments),
            },
        }

    async def call(self, arguments: str, *, timeout_s: float) -> str:
        """What the function returns for the JSON object `arguments`, as text.

        Raises:
            ToolError: bad arguments, too slow, or the function raised.
            InfraError: the function raised it or an OSError: no fault of the model.
        """
        try:
            values = msgspec.json.decode(arguments or "{}", type=self._arguments)
        except msgspec.DecodeError as error:
            raise ToolError(f"bad arguments for {self.name}: {error}") from error
        call = {name: getattr(values, name) for name in self._arguments.__struct_fields__}
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                return _text(await self._run(call))
        except InfraError:
            raise
        except Exception as error:  # the boundary to a user's code
            if isinstance(error, TimeoutError) and limit.expired():
                raise ToolError(f"{self.name} took longer than {timeout_s:g} s") from error
            if isinstance(error, OSError):
                raise InfraError(f"Tool {self.name} failed: {type(error).__name__}: {error}") from error
            raise ToolError(f"{type(error).__name__}: {error}") from error

    async def _run(self, arguments: Mapping[str, Any]) -> object:
        if self._is_async:
            return await self._function(**arguments)
        return await in_daemon_thread(lambda: self._function(**arguments))


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """`function()` in a thread of its own, which never keeps the interpreter from ending, however long it hangs."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            result, error = function(), None
        except Exception as raised:  # handed to whoever waits
            result, error = None, raised

        def settle() -> None:
            if future.done():
                return  # nobody waits any longer
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(typing.cast("T", result))

        if not loop.is_closed():
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=work, daemon=True, name="tool").start()
    return await future


def tools_by_name(functions: Sequence[Callable[..., Any]]) -> dict[str, Tool]:
    """The tools of `functions`.

    Raises:
        EnvironmentSetupError: two have one name, or one of them makes no tool.
    """
    tools: dict[str, Tool] = {}
    for function in functions:
        tool = Tool(function)
        if tool.name in tools:
            raise EnvironmentSetupError(f"Two tools are called {tool.name!r}; the model tells them apart by name.")
        tools[tool.name] = tool
    return tools


def _arguments_type(function: Callable[..., Any]) -> type[msgspec.Struct]:
    """A struct with a field for each parameter: msgspec makes the schema and checks values against it."""
    name = function.__name__
    hints = typing.get_type_hints(function, include_extras=True)
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise EnvironmentSetupError(
                f"Tool {name} takes `{parameter.name}` as {parameter.kind.description}; arguments of a tool are given "
                "by name."
            )
        if parameter.name not in hints:
            raise EnvironmentSetupError(f"Argument `{parameter.name}` of tool {name} needs a type hint, such as `int`.")
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((parameter.name, hints[parameter.name], *default))
    try:
        return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
    except TypeError as error:
        raise EnvironmentSetupError(f"Tool {name}: {error}.") from error


def _parameters(arguments: type[msgspec.Struct]) -> dict[str, Any]:
    try:
        (schema,), components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    except TypeError as error:
        raise EnvironmentSetupError(
            f"Tool {arguments.__name__} has an argument that JSON cannot carry: {error}."
        ) from error
    own = str(schema["$ref"]).rpartition("/")[2]
    parameters = {key: value for key, value in components.pop(own).items() if key != "title"}
    return {**parameters, "$defs": components} if components else parameters


def _text(result: object) -> str:
    if isinstance(result, str):
        return result
    try:
        return msgspec.json.encode(result).decode()
    except TypeError:
        return str(result)
