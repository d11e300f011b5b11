"""A user's own advantage, filter and policies: one file and one line of TOML each."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from miles_rollout import Fate, GroupBuffer, Plugin, RolloutConfig, RolloutConfigError, advantages_by_episode
from miles_rollout.advantages import load_advantage
from miles_rollout.filters import load_filter
from miles_rollout.policies import load_failure_policy, load_stale_policy
from miles_tito import Prompt
from pydantic import TypeAdapter
from scripted_rollout import make_ref, run_virtual

CODE = """
from miles_rollout import Verdict


def scaled(rewards_BG, *, scale=1.0):
    return [[None if reward is None else scale * reward for reward in rewards_G] for rewards_G in rewards_BG]


def no_giants(ref, *, longest):
    return "too_long" if max(e.num_loss_tokens for e in ref.episodes) > longest else None


def younger_than(ref, *, staleness, max_staleness, limit):
    return Verdict.KEEP if staleness < limit else Verdict.DROP


def enough(ref, *, required_rewards, share):
    return Verdict.KEEP if ref.num_rewarded >= share * len(ref.episodes) else Verdict.RETRY
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_rl.py").write_text(CODE)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        yield


def from_toml(line: str) -> RolloutConfig:
    settings = tomllib.loads(f"group_size = 2\ngroups_per_step = 1\n{line}")
    return TypeAdapter(RolloutConfig).validate_python(settings)


@pytest.mark.usefixtures("own_code")
def test_an_advantage_of_ones_own_gets_its_argument() -> None:
    config = from_toml('advantage = { name = "own_rl:scaled", args = { scale = 2.0 } }')
    refs = [make_ref("x", [0.25, 1.0])]
    assert advantages_by_episode(refs, advantage=config.advantage) == {"x/0": 0.5, "x/1": 2.0}
    assert advantages_by_episode(refs, advantage="own_rl:scaled") == {"x/0": 0.25, "x/1": 1.0}


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize(("longest", "fate"), [(2, Fate.FILTERED), (3, Fate.BUFFERED)])
def test_a_filter_of_ones_own_judges_groups_in_the_buffer(longest: int, fate: Fate) -> None:
    async def main() -> None:
        buffer = GroupBuffer(from_toml(f'filter = {{ name = "own_rl:no_giants", args = {{ longest = {longest} }} }}'))
        await buffer.acquire()
        buffer.issue("g", Prompt(id="p"))
        assert buffer.put(make_ref("g", [0.0, 1.0])) is fate
        assert buffer.metrics().get("buffer/discarded/too_long") == (1.0 if fate is Fate.FILTERED else None)

    run_virtual(main())


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize(("limit", "fate"), [(2, Fate.STALE), (3, Fate.BUFFERED)])
def test_a_stale_policy_of_ones_own_gets_its_argument(limit: int, fate: Fate) -> None:
    async def main() -> None:
        line = f'put_policy = {{ name = "own_rl:younger_than", args = {{ limit = {limit} }} }}'
        buffer = GroupBuffer(from_toml(line), version=2)
        await buffer.acquire()
        buffer.issue("g", Prompt(id="p"))
        assert buffer.put(make_ref("g", [0.0, 1.0], versions=0)) is fate

    run_virtual(main())


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize(("share", "fate"), [(1.0, Fate.FAILED), (0.5, Fate.BUFFERED)])
def test_a_failure_policy_of_ones_own_gets_its_argument(share: float, fate: Fate) -> None:
    async def main() -> None:
        line = f'failure_policy = {{ name = "own_rl:enough", args = {{ share = {share} }} }}'
        buffer = GroupBuffer(from_toml(f'min_rewards = 1\nfilter = "no_filter"\n{line}'))
        await buffer.acquire()
        buffer.issue("g", Prompt(id="p"))
        assert buffer.put(make_ref("g", [None, 1.0])) is fate

    run_virtual(main())


@pytest.mark.usefixtures("own_code")
@pytest.mark.parametrize(
    ("key", "plugin", "message"),
    [
        ("advantage", Plugin(name="own_rl:scaled", args={"scael": 2.0}), "unexpected keyword argument 'scael'"),
        ("advantage", Plugin(name="grpo", args={"scale": 2.0}), "unexpected keyword argument 'scale'"),
        ("filter", Plugin(name="own_rl:no_giants"), "missing a required argument: 'longest'"),
        ("filter", Plugin(name="own_rl:no_dwarfs"), "own_rl has no 'no_dwarfs'"),
        ("put_policy", Plugin(name="own_rl:enough", args={"share": 1}), "missing a required argument|unexpected"),
        ("take_policy", Plugin(name="keep", args={"staleness": 0}), "sets staleness, which every call passes"),
        ("failure_policy", Plugin(name="own_rl:nothing"), "own_rl has no 'nothing'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_a_group_is_issued(key: str, plugin: Plugin, message: str) -> None:
    load = {
        "advantage": load_advantage,
        "filter": load_filter,
        "failure_policy": load_failure_policy,
        "put_policy": load_stale_policy,
        "take_policy": load_stale_policy,
    }[key]
    RolloutConfig(**{key: plugin})  # pyright: ignore[reportArgumentType]
    with pytest.raises(RolloutConfigError, match=message):
        load(plugin)


def test_the_rules_of_a_built_in_name_hold_with_arguments_too() -> None:
    assert RolloutConfig(put_policy=Plugin(name="keep")).trains_stale_groups
    with pytest.raises(RolloutConfigError, match="every group would be discarded"):
        RolloutConfig(group_size=1, filter=Plugin(name="nonzero_spread"))
    with pytest.raises(RolloutConfigError, match="No filter is called 'nonzero'"):
        RolloutConfig(filter=Plugin(name="nonzero"))
