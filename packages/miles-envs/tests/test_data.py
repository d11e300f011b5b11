from __future__ import annotations

import datetime
import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from miles_envs.data import Columns, from_generator, plain, read_jsonl, read_parquet, read_prompts
from miles_envs.errors import DataError
from miles_tito.records import Prompt

ROWS = [
    {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{i}+1?"}],
        "label": i + 1,
        "reward_model": {"style": "rule", "limits": {"seconds": 1.5}},
        "tools": ["add", "sub"][: i % 3],
        "level": i,
    }
    for i in range(5)
]


@pytest.fixture
def jsonl(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


def test_rows_become_prompts_with_everything_in_its_place(jsonl):
    path = jsonl([{"prompt": "2+2?", "answer": 4, "level": 3, "source": "book", "key": "q7"}])
    (prompt,) = read_jsonl(path, columns=Columns(label="answer", id="key", metadata=["source"]))
    assert prompt.id == "q7"
    assert prompt.messages == ({"role": "user", "content": "2+2?"},)
    assert prompt.task == {"label": 4, "level": 3}
    assert prompt.metadata == {"source": "book"}


def test_parquet_and_jsonl_twins_give_the_same_prompts(jsonl, tmp_path):
    path = tmp_path / "rows.parquet"
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(pa.concat_tables([table.slice(0, 2), table.slice(2)]), path, row_group_size=2)
    from_parquet, from_jsonl = read_parquet(path), read_jsonl(jsonl(ROWS))
    assert from_parquet == from_jsonl
    assert json.loads(json.dumps(from_parquet[1].task)) == from_parquet[1].task
    assert read_parquet(f"{path}@[1:3]") == read_jsonl(f"{jsonl(ROWS)}@[1:3]") == from_jsonl[1:3]


def test_fields_that_a_parquet_message_lacks_are_not_none_fields(tmp_path):
    path = tmp_path / "rows.parquet"
    rows = [{"messages": [{"role": "user", "content": "?", "name": "ada"}, {"role": "user", "content": "!"}]}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    (prompt,) = read_prompts(path)
    assert prompt.messages == ({"role": "user", "content": "?", "name": "ada"}, {"role": "user", "content": "!"})


def test_numpy_values_become_plain_ones_all_the_way_down():
    row = {
        "prompt": [{"role": "user", "content": "?"}],
        "label": np.int64(3),
        "tools": np.array(["a", "b"], dtype=object),
        "info": {"scores": np.array([1.5, 2.5]), "flag": np.bool_(True), "pair": (np.float32(0.5), None)},
    }
    (prompt,) = from_generator([row])
    assert prompt.task == {
        "label": 3,
        "tools": ["a", "b"],
        "info": {"scores": [1.5, 2.5], "flag": True, "pair": [0.5, None]},
    }
    assert type(prompt.task["label"]) is int
    assert type(prompt.task["info"]["flag"]) is bool


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(json_values)
def test_plain_data_stays_as_it_is(value):
    assert plain(value, "here") == value


@given(st.integers(0, 6), st.integers(-8, 8) | st.none(), st.integers(-8, 8) | st.none())
def test_a_slice_is_pythons_and_keeps_the_ids_of_the_whole(tmp_path_factory, size, start, stop):
    path = tmp_path_factory.mktemp("slices") / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(size)))
    source = f"{path}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    expected = list(range(size))[start:stop]
    if not expected:
        with pytest.raises(DataError, match="holds no rows"):
            read_prompts(source)
    else:
        assert [prompt.id for prompt in read_prompts(source)] == [f"rows-{i}" for i in expected]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a"}, '{"prompt": "b"'], r"rows\.jsonl:2 is no JSON: .*It begins with"),
        ([{"prompt": "a"}, "", "[1]"], r"rows\.jsonl:3 holds a list"),
        ([{"question": "a"}], r"rows\.jsonl:1 has the columns question, but neither `messages` nor `prompt`"),
        ([{"prompt": 3}], r"rows\.jsonl:1, column 'prompt' is 3; it must be text or"),
        ([{"prompt": []}], "non-empty list"),
        ([{"messages": [{"role": "user"}, {"content": "a"}]}], "message 1 is .*needs a `role`"),
        ([{"messages": ["a"]}], "message 0 is 'a'"),
        ([], "holds no rows"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(jsonl, rows, message):
    with pytest.raises(DataError, match=message):
        read_jsonl(jsonl(rows))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (Columns(label="answer"), r"rows\.jsonl:1 lacks the column answer; it has prompt, key"),
        (Columns(id="key"), r"rows\.jsonl:2 has the id '7' of .*rows\.jsonl:1"),
        (Columns(label="key", id="key"), "names one column twice"),
    ],
)
def test_columns_that_do_not_fit_are_named(jsonl, columns, message):
    with pytest.raises(DataError, match=message):
        read_jsonl(jsonl([{"prompt": "a", "key": 7}, {"prompt": "b", "key": 7}]), columns=columns)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gone.jsonl", "There is no file gone.jsonl"),
        ("rows.csv", r"ends in '\.csv'"),
        ("rows.jsonl@[1:2:3]", "slice that cannot be read"),
        ("rows.jsonl@[5]", "slice that cannot be read"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(source, message):
    with pytest.raises(DataError, match=message):
        read_prompts(source)


def test_a_broken_parquet_file_is_named(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"rows\.parquet is not a readable Parquet file"):
        read_parquet(path)


def test_values_that_json_cannot_carry_are_named(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "when": datetime.date(2026, 1, 1)}]), path)
    with pytest.raises(DataError, match=r"rows\.parquet row 0, column 'when' holds a date"):
        read_parquet(path)


def test_an_endless_generator_is_read_as_far_as_needed():
    rows = ({"prompt": f"{i}?", "label": i} for i in itertools.count())
    prompts = list(itertools.islice(from_generator(rows, name="count"), 3))
    assert [prompt.id for prompt in prompts] == ["count-0", "count-1", "count-2"]


def test_ready_prompts_pass_through_a_generator():
    prompt = Prompt(id="own")
    assert list(from_generator([prompt])) == [prompt]


def test_a_zero_or_empty_label_is_kept(jsonl):
    zero, empty, absent = read_jsonl(
        jsonl([{"prompt": "a", "label": 0}, {"prompt": "b", "label": ""}, {"prompt": "c"}])
    )
    assert zero.task == {"label": 0}
    assert empty.task == {"label": ""}
    assert absent.task == {}
