"""What a run depends on is recognised by its content, and what has changed is told in sentences."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
import torch
from miles_core.config import Config, to_dict
from miles_core.config.keys import leaves
from miles_core.durable.fingerprint import MAY_CHANGE, compare, fingerprint_model, fingerprint_prompts
from miles_tito.records import Prompt
from safetensors.torch import load_file, save_file

PROMPTS = [
    Prompt(id=f"p{i}", messages=({"role": "user", "content": f"{i} + 1?"},), task={"label": i + 1, "hint": "add"})
    for i in range(200)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"hidden_size": 8, "transformers_version": "5.0"}))
    (path / "tokenizer.json").write_text('{"model": {}}')
    torch.manual_seed(0)
    save_file({f"layer.{i}": torch.randn(300, 8) for i in range(4)}, path / "model.safetensors")
    (path / "README.md").write_text("notes")
    return path


def changed_model(old: Path, change: Callable[[Path], object]) -> list[str]:
    new = old.with_name("new")
    shutil.copytree(old, new)
    change(new)
    return compare({"model": fingerprint_model(old)}, {"model": fingerprint_model(new)}).refused


def update_one_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["layer.2"] += 1e-3  # what one optimizer step does to it
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda path: (path / "config.json").write_text('{"hidden_size": 9}'), "The model's config.json has changed"),
        (lambda path: (path / "tokenizer.json").write_text('{"model": 1}'), "tokenizer has changed: tokenizer.json"),
        (lambda path: (path / "chat_template.jinja").write_text("x"), "tokenizer has changed: chat_template.jinja"),
        (update_one_tensor, r"other weights than the run started from \(38,[\d,]+ bytes before, 38,[\d,]+ now\)"),
        (lambda path: (path / "model.safetensors").unlink(), "other weights .* 0 now"),
    ],
)
def test_another_model_is_told_by_what_differs(folder, change, sentence):
    (told,) = changed_model(folder, change)
    assert re.search(sentence, told)


def test_a_model_that_was_moved_or_saved_by_another_version_is_the_same(folder):
    def touch(path: Path) -> None:
        (path / "config.json").write_text(json.dumps({"transformers_version": "5.1", "hidden_size": 8}))
        (path / "README.md").write_text("other notes")

    assert changed_model(folder, touch) == []


def test_weights_of_any_format_are_sampled(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.gguf").write_bytes(bytes(100_000))
    (told,) = changed_model(folder, lambda path: (path / "model.gguf").write_bytes(b"\1" * 100_000))
    assert "other weights" in told


def prompts_changed(new: list[Prompt]) -> list[str]:
    return compare({"prompts": fingerprint_prompts(PROMPTS)}, {"prompts": fingerprint_prompts(new)}).refused


def test_the_same_prompts_are_the_same():
    copies = [replace(p, task=dict(reversed(p.task.items()))) for p in PROMPTS]  # read from another file format
    assert prompts_changed(copies) == []


def test_fewer_prompts_other_content_and_another_order_are_told_apart():
    assert prompts_changed(PROMPTS[:-3]) == ["The data had 200 entries and has 197."]
    assert prompts_changed(PROMPTS[::-1]) == [
        "The 200 entries of the data come in another order, so the run would go on with other ones."
    ]
    relabelled = [replace(p, task={**p.task, "label": 0}) if p.id == "p6" else p for p in PROMPTS]
    assert prompts_changed(relabelled) == [
        "The content of the 200 entries of the data has changed, for instance that of 'p6'."
    ]
    unnamed = [replace(p, task={**p.task, "label": 0}) if p.id == "p7" else p for p in PROMPTS]
    assert prompts_changed(unnamed) == ["The content of the 200 entries of the data has changed."]


def test_arrays_and_numpy_numbers_count_by_content():
    def of(last: int) -> dict[str, object]:
        return fingerprint_prompts([Prompt(id="a", tokens=np.array([1, 2, last]), task={"k": np.int64(last)})])

    assert of(3) == of(3) != of(4)


def test_a_fingerprint_is_the_same_in_every_process():
    code = (
        "import json\nfrom miles_core.durable.fingerprint import fingerprint_prompts\n"
        "from miles_tito.records import Prompt\n"
        "print(json.dumps(fingerprint_prompts([Prompt(id=str(i), task={'a': i, 'b': {'c': [i]}}) for i in range(9)])))"
    )
    made = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, timeout=60
        ).stdout
        for seed in ("1", "2")
    ]
    assert made[0] == made[1]


def configs_changed(**sections: object) -> tuple[list[str], list[str]]:
    old = json.loads(json.dumps(to_dict(Config())))
    return compare({"config": old}, {"config": to_dict(replace(Config(), **sections))})  # pyright: ignore[reportArgumentType]


def test_how_long_and_where_may_change_what_is_learned_may_not():
    default = Config()
    assert configs_changed() == ([], [])
    assert configs_changed(run=replace(default.run, steps=300, name="again")) == (
        [],
        ['run.name was "run" and is "again".', "run.steps was 100 and is 300."],
    )
    assert configs_changed(run=replace(default.run, seed=1)).refused == ["run.seed was 0 and is 1."]
    rollout = replace(default.rollout, group_size=4, retries=3)
    assert configs_changed(rollout=rollout) == (
        ["rollout.group_size was 8 and is 4."],
        ["rollout.retries was 1 and is 3."],
    )
    train = replace(default.train, ranks=4, optimizer=replace(default.train.optimizer, lr=1.0))
    assert configs_changed(train=train) == (
        ["train.optimizer.lr was 1e-06 and is 1.0."],
        ["train.ranks was 1 and is 4."],
    )


def test_keys_inside_free_tables_are_named():
    env = replace(Config().env, target="m:f", args={"level": 2})
    assert configs_changed(env=env).refused == [
        "env.args.level was absent and is 2.",
        'env.target was null and is "m:f".',
    ]


def test_a_key_that_an_older_version_did_not_have_counts_with_its_default():
    old = to_dict(Config())
    del old["rollout"]["max_staleness"], old["checkpoint"]
    assert compare({"config": old}, {"config": to_dict(Config())}) == ([], [])


def test_every_pattern_of_what_may_change_stands_for_a_key():
    keys = [str(key) for key in leaves(Config)]
    assert [p for p in MAY_CHANGE if not any(fnmatchcase(f"{key}.x", p) or fnmatchcase(key, p) for key in keys)] == []


def test_parts_that_one_side_lacks_are_not_compared():
    assert compare({}, {"prompts": fingerprint_prompts(PROMPTS), "config": to_dict(Config())}) == ([], [])
