from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from miles_rollout.engines import EngineControl, EngineLoad
from miles_tito import UNKNOWN_VERSION, EngineError


@pytest.fixture
def engine(fake_engine: Callable[[], Any]) -> Any:
    return fake_engine()


@pytest.fixture
async def control(engine: Any) -> AsyncIterator[EngineControl]:
    async with EngineControl(engine.url, api_key="secret") as control:
        yield control


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_pause_sends_its_mode_and_resume_ends_it(engine: Any, control: EngineControl, mode: Any):
    await control.pause(mode)
    await control.resume()
    assert engine.calls == [
        ("POST", "/pause_generation", {"mode": mode}),
        ("POST", "/continue_generation", {}),
    ]
    assert engine.headers[0]["authorization"] == "Bearer secret"


async def test_abort_names_one_request_or_all(engine: Any, control: EngineControl):
    await control.abort("r1")
    await control.abort()
    assert [body for _, _, body in engine.calls] == [{"rid": "r1"}, {"rid": "", "abort_all": True}]


async def test_the_weight_version_is_a_number(engine: Any, control: EngineControl):
    assert await control.weight_version() == 3
    engine.answers["/model_info"] = (200, {"weight_version": "default"})
    assert await control.weight_version() == UNKNOWN_VERSION


async def test_a_new_weight_version_aborts_nothing(engine: Any, control: EngineControl):
    await control.set_weight_version(4)
    assert engine.calls == [("POST", "/update_weight_version", {"new_version": "4", "abort_all_requests": False})]


async def test_weights_from_a_folder_are_stamped_before_anything_is_sampled_from_them(
    engine: Any, control: EngineControl, tmp_path: Path
):
    await control.load_weights(tmp_path, version=7)
    assert [path.partition("?")[0] for _, path, _ in engine.calls] == [
        "/pause_generation",
        "/flush_cache",
        "/update_weights_from_disk",
        "/update_weight_version",
        "/continue_generation",
    ]
    assert engine.calls[2][2]["model_path"] == str(tmp_path)


async def test_an_engine_that_could_not_load_weights_stays_paused(engine: Any, control: EngineControl, tmp_path: Path):
    engine.answers["/update_weights_from_disk"] = (400, {"success": False, "message": "no such file"})
    with pytest.raises(EngineError, match=r"update_weights_from_disk answered 400: .*no such file"):
        await control.load_weights(tmp_path, version=7)
    assert "/continue_generation" not in [path for _, path, _ in engine.calls]


async def test_loads_are_one_entry_for_each_rank(control: EngineControl):
    assert await control.loads() == (EngineLoad(dp_rank=0, num_running=2, num_waiting=5, token_usage=0.25),)


async def test_the_cache_is_flushed_within_a_time(engine: Any, control: EngineControl):
    await control.flush_cache(wait_s=1.5)
    assert engine.calls[0][1] == "/flush_cache?timeout=1.5"


async def test_a_refusal_names_endpoint_status_and_answer(engine: Any, control: EngineControl):
    engine.answers["/flush_cache"] = (400, "Flush cache failed, 3 requests run. " + "x" * 1000)
    with pytest.raises(EngineError, match=r"POST http://.*/flush_cache answered 400: .*3 requests run") as caught:
        await control.flush_cache()
    assert caught.value.status == 400
    assert not caught.value.retryable
    assert len(str(caught.value)) < 500


async def test_an_engine_that_is_gone_is_a_retryable_error_and_not_healthy():
    async with EngineControl("http://127.0.0.1:1") as control:
        assert not await control.health()
        assert not await control.ready()
        with pytest.raises(
            EngineError, match=r"GET http://127\.0\.0\.1:1/server_info got no answer: ClientConnectorError"
        ) as caught:
            await control.server_info()
    assert caught.value.status is None
    assert caught.value.retryable


async def test_a_paused_engine_is_healthy_but_not_ready(engine: Any, control: EngineControl):
    engine.answers["/ready"] = (503, "")
    assert await control.health()
    assert not await control.ready()
