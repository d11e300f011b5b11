"""Rollout settings: each is checked, and each is read."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import miles_rollout
import pytest
from miles_rollout import RolloutConfig, RolloutConfigError
from pydantic import TypeAdapter, ValidationError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 0}, "`group_size` is 0; it must be at least 1"),
        ({"max_staleness": -1}, "`max_staleness` is -1; it must be at least 0"),
        ({"episode_timeout_s": float("inf")}, "`episode_timeout_s` is inf"),
        ({"episode_timeout_s": 0}, "`episode_timeout_s` is 0"),
        ({"max_failure_rate": 1.5}, "`max_failure_rate` is 1.5"),
        ({"min_failures": 300}, "`min_failures` is 300 but `failure_window` holds only 256"),
        ({"min_rewards": 9}, "`min_rewards` is 9 but `group_size` is 8"),
        ({"stragglers": "leave"}, "`stragglers` is 'leave'"),
        ({"retry_backoff_s": -1.0}, "`retry_backoff_s` is -1.0"),
        ({"partial": "drop"}, "`partial` is 'drop'; it must be 'train' or 'mask'"),
        ({"oversampling": 0.5}, "`oversampling` is 0.5; it must be a finite factor of at least 1"),
        ({"oversampling": float("inf")}, "`oversampling` is inf"),
        ({"oversampling": 1.5}, 'Set `stragglers = "overtake"`'),
        ({"advantage": "grppo"}, r"No advantage is called 'grppo'. Did you mean grpo\b.*\? Built in: dr_grpo, grpo"),
        ({"filter": "nonzero"}, "No filter is called 'nonzero'"),
        ({"take_policy": "dropp"}, r"No stale policy is called 'dropp'. Did you mean drop\? Built in: drop, keep"),
        ({"group_size": 1}, "every group would be discarded"),
        ({"group_size": 1, "filter": "no_filter"}, "every advantage would be 0"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_its_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutConfigError, match=message):
        RolloutConfig(**settings)


def test_groups_of_one_need_no_filter_and_a_batch_baseline() -> None:
    config = RolloutConfig(group_size=1, filter="no_filter", advantage="reinforce_pp")
    assert config.required_rewards == 1


def test_oversampling_multiplies_the_credits_and_nothing_else() -> None:
    config = RolloutConfig(groups_per_step=3, max_staleness=1, oversampling=1.25, stragglers="overtake")
    assert (config.num_credits, config.groups_per_step) == (8, 3)


def test_an_import_string_is_a_valid_choice_and_is_not_imported_yet() -> None:
    assert RolloutConfig(filter="no_such_package.filters:mine").filter == "no_such_package.filters:mine"


def test_f06_every_setting_is_read_somewhere() -> None:
    source = Path(inspect.getfile(miles_rollout)).parent
    text = "".join(
        path.read_text() for path in [*source.glob("*.py"), *source.glob("buffer/*.py")] if path.name != "config.py"
    )
    text += inspect.getsource(RolloutConfig).split("def num_credits")[1]
    shown_to_the_caller = {"group_size", "advantage"}  # arguments of `produce` and `advantages_by_episode`
    unread = {f.name for f in fields(RolloutConfig) if not re.search(rf"(config|self)\.{f.name}\b", text)}
    assert unread <= shown_to_the_caller


def test_pydantic_composes_it_and_refuses_unknown_settings() -> None:
    adapter = TypeAdapter(RolloutConfig)
    config = adapter.validate_python({"group_size": 4, "sampling": {"temperature": 0.5}})
    assert config.sampling.temperature == 0.5
    with pytest.raises(ValidationError, match="groupsize"):
        adapter.validate_python({"groupsize": 4})
