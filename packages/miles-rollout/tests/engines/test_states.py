"""An engine changes its state only as the diagram says."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from miles_rollout.engines import EngineLife, EngineState, EngineStateError

S = EngineState


def life(*states: EngineState) -> EngineLife:
    engine = EngineLife("http://e")
    for state in states:
        engine.move(state, "as the test says")
    return engine


def test_the_way_through_a_death_and_back():
    engine = life(S.HEALTHY, S.SUSPECT, S.DEAD, S.RESTARTING, S.SYNCING, S.HEALTHY)
    event = engine.move(S.DEAD, "exited with status 137")
    assert (event.url, event.old, event.new, event.reason) == (
        "http://e",
        S.HEALTHY,
        S.DEAD,
        "exited with status 137",
    )


def test_what_cannot_follow_is_refused_with_what_can():
    engine = life(S.HEALTHY, S.DEAD)
    with pytest.raises(EngineStateError, match=r"is dead and cannot become healthy \(why\); given_up, restarting may"):
        engine.move(S.HEALTHY, "why")
    assert engine.state is S.DEAD, "a refused change changes nothing"


def test_what_was_given_up_stays_out():
    engine = life(S.DEAD, S.GIVEN_UP)
    for state in S:
        with pytest.raises(EngineStateError, match="nothing may follow"):
            engine.move(state, "why")


@given(st.lists(st.sampled_from(list(S)), max_size=30))
def test_no_engine_serves_after_a_death_before_it_was_synced(tried: list[EngineState]):
    engine = EngineLife("http://e")
    is_synced = True
    for state in tried:
        try:
            engine.move(state, "random")
        except EngineStateError:
            continue
        is_synced = (is_synced and state is not S.DEAD) or state is S.SYNCING
        assert is_synced or not engine.state.is_serving
