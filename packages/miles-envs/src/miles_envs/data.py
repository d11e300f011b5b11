"""Prompts from rows: JSONL, Parquet, or any iterable.

One column holds what the model sees, as text (one user message) or as a list of chat messages. `label` and all columns
not named otherwise go into `prompt.task`, where the environment finds them; `metadata` columns only label the prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from miles_tito.records import Message, Prompt

from .errors import DataError
from .optional import require

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which columns of a row become the parts of its prompt; an argument of every reader."""

    prompt: str | None = None
    """Text or messages; None takes `messages` or else `prompt`."""
    label: str | None = None
    """What the answer is compared with; None takes `label` where there is one."""
    id: str | None = None
    """None numbers the rows of the file, whatever part of it is read."""
    metadata: Sequence[str] = ()


def read_prompts(source: str | Path, *, columns: Columns | None = None) -> list[Prompt]:
    """Prompts of a `.jsonl` or `.parquet` file, or of a slice of its rows: `"train.jsonl@[0:900]"`.

    Raises:
        DataError: unknown kind of file, no such file, no rows, or a row that is no prompt.
    """
    suffix = split_slice(source)[0].suffix
    match suffix:
        case ".jsonl":
            return read_jsonl(source, columns=columns)
        case ".parquet":
            return read_parquet(source, columns=columns)
        case _:
            raise DataError(f"{source} ends in {suffix!r}; prompts are read from .jsonl and .parquet files.")


def read_jsonl(source: str | Path, *, columns: Columns | None = None) -> list[Prompt]:
    """Prompts of a file with one JSON object a line; empty lines are skipped.

    Raises:
        DataError: see `read_prompts`; names file and line.
    """
    path, part = split_slice(source)
    with _existing(path).open("rb") as lines:
        rows = [(f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    numbered = list(enumerate(rows))[part]
    return _collect(((where, index, _object(line, where)) for index, (where, line) in numbered), source, path, columns)


def read_parquet(source: str | Path, *, columns: Columns | None = None) -> list[Prompt]:
    """Prompts of a Parquet file, equal to those of the same rows as JSONL.

    Raises:
        DataError: see `read_prompts`; names file and row.
        MissingDependency: pyarrow is not installed.
    """
    parquet = require("pyarrow.parquet", extra="parquet")
    path, part = split_slice(source)
    try:
        table = parquet.read_table(_existing(path))
    except (OSError, ValueError) as error:  # pyarrow's own errors are children of these
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error
    start, stop, _ = part.indices(table.num_rows)
    rows = table.slice(start, max(0, stop - start)).to_pylist()
    return _collect(((f"{path} row {i}", i, row) for i, row in enumerate(rows, start)), source, path, columns)


def from_generator(
    rows: Iterable[Mapping[str, Any] | Prompt], *, name: str = "row", columns: Columns | None = None
) -> Iterator[Prompt]:
    """Prompts of rows as they come; an endless generator is fine.

    Args:
        name: first part of the ids of rows that have none.

    Raises:
        DataError: a row is no prompt; raised when it is reached.
    """
    for index, row in enumerate(rows):
        if isinstance(row, Prompt):
            yield row
        else:
            yield to_prompt(row, where=f"{name} {index}", default_id=f"{name}-{index}", columns=columns or Columns())


def to_prompt(row: Mapping[str, Any], *, where: str, default_id: str, columns: Columns) -> Prompt:
    """One row as a prompt, with plain Python values whatever library made it.

    Raises:
        DataError: a named column is missing, or holds something else than it should.
    """
    rest = {str(key): plain(value, f"{where}, column {key!r}") for key, value in row.items()}
    _check_named(rest, columns, where)
    shown = columns.prompt or ("messages" if "messages" in rest else "prompt")
    if shown not in rest:
        raise DataError(
            f"{where} has the columns {', '.join(rest) or 'none'}, but neither `messages` nor `prompt`; "
            "say which column the model sees with Columns(prompt=...)."
        )
    messages = _messages(rest.pop(shown), f"{where}, column {shown!r}")
    prompt_id = str(rest.pop(columns.id)) if columns.id else default_id
    metadata = {key: rest.pop(key) for key in columns.metadata}
    if columns.label is not None:
        rest["label"] = rest.pop(columns.label)
    return Prompt(id=prompt_id, messages=messages, task=rest, metadata=metadata)


def plain(value: Any, where: str) -> Any:
    """`value` in plain Python: numpy and tuples turned into numbers and lists, all the way down.

    Raises:
        DataError: it holds something that JSON could not carry.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = cast("np.ndarray", value).tolist()
    match value:
        case None | str() | bool() | int() | float():
            return value
        case Mapping():
            items = cast("Mapping[Any, Any]", value).items()
            return {str(key): plain(item, where) for key, item in items}
        case list() | tuple():
            return [plain(item, where) for item in cast("Sequence[Any]", value)]
        case _:
            raise DataError(
                f"{where} holds a {type(value).__name__} ({value!r:.60}); use text, numbers, lists, objects."
            )


def split_slice(source: str | Path) -> tuple[Path, slice]:
    """The file of `"path@[a:b]"` and the slice of its rows, as Python slices a list."""
    found = _SLICE.fullmatch(str(source))
    if found is None:
        if "@[" in str(source):
            raise DataError(
                f"{source} has a slice that cannot be read; write it as path@[10:20], path@[:20], path@[-5:]."
            )
        return Path(source), slice(None)
    start, stop = (int(found[end]) if found[end] else None for end in ("start", "stop"))
    return Path(found["path"]), slice(start, stop)


def _collect(
    rows: Iterable[tuple[str, int, Mapping[str, Any]]], source: str | Path, path: Path, columns: Columns | None
) -> list[Prompt]:
    """Prompts of (where, index, row), with distinct ids and at least one."""
    seen: dict[str, str] = {}
    prompts: list[Prompt] = []
    for where, index, row in rows:
        prompt = to_prompt(row, where=where, default_id=f"{path.stem}-{index}", columns=columns or Columns())
        if prompt.id in seen:
            raise DataError(f"{where} has the id {prompt.id!r} of {seen[prompt.id]}; each prompt needs its own.")
        seen[prompt.id] = where
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{source} holds no rows.")
    return prompts


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"There is no file {path} (looked in {Path.cwd()}).")
    return path


def _object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is no JSON: {error}. It begins with {line[:60]!r}.") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} holds a {type(row).__name__}; each line must be a JSON object.")
    return cast("dict[str, Any]", row)


def _check_named(row: Mapping[str, Any], columns: Columns, where: str) -> None:
    named = [name for name in (columns.prompt, columns.label, columns.id, *columns.metadata) if name is not None]
    missing = [name for name in named if name not in row]
    if missing:
        raise DataError(f"{where} lacks the column {', '.join(missing)}; it has {', '.join(row) or 'none'}.")
    if len(set(named)) < len(named):
        raise DataError(f"`columns` names one column twice: {', '.join(named)}.")


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    if not isinstance(value, list) or not value:
        raise DataError(f"{where} is {value!r:.60}; it must be text or a non-empty list of messages.")
    messages: list[Message] = []
    for index, message in enumerate(cast("list[Any]", value)):
        if not isinstance(message, dict) or cast("Message", message).get("role") not in _ROLES:
            raise DataError(
                f"{where}, message {index} is {message!r:.60}; it needs a `role` out of {', '.join(_ROLES)}."
            )
        # Parquet gives every message every field of the struct, as None where it had none.
        messages.append({key: item for key, item in cast("Message", message).items() if item is not None})
    return tuple(messages)
