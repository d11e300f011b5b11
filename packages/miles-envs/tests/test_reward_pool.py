from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import grader_functions as functions
import pytest
from miles_envs.errors import GraderCrash, GraderTimeout, VerifierError
from miles_envs.rewards import RewardPool
from scripted_model import question, said

HERE = Path(__file__).parent


@contextlib.asynccontextmanager
async def open_pool(**settings):
    pool = RewardPool(**settings)
    try:
        yield pool
    finally:
        await pool.aclose()


def grade(pool, text, *, timeout_s=None, what=None):
    return pool.call(functions.by_text, question(), said(text), what=what or text, timeout_s=timeout_s)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


async def gone(pid: int) -> None:
    async with asyncio.timeout(20):
        while is_alive(pid):
            await asyncio.sleep(0.01)


async def test_one_hung_reward_of_eight_fails_alone_and_the_pool_keeps_its_size(caplog):
    async with open_pool(num_workers=2) as pool:
        await asyncio.gather(grade(pool, "0"), grade(pool, "0"))
        texts = ["1", "2", "3", "hang", "5", "6", "7", "8"]
        async with asyncio.timeout(60):
            results = await asyncio.gather(
                *(grade(pool, t, timeout_s=1.0, what=f"sample {i}") for i, t in enumerate(texts)),
                return_exceptions=True,
            )
        assert isinstance(results.pop(3), GraderTimeout)
        assert results == [1, 2, 3, 5, 6, 7, 8]
        assert "sample 3 took longer than 1 s" in caplog.text
        assert pool.num_replaced == 1
        assert await asyncio.gather(grade(pool, "1"), grade(pool, "2")) == [1, 2]
        assert len(pool.pids) == 2


async def test_a_grader_stuck_in_c_code_is_killed_too():
    async with open_pool(num_workers=1) as pool:
        with pytest.raises(GraderTimeout, match=r"hang in C took longer than 0\.5 s"):
            await grade(pool, "hang in C", timeout_s=0.5)
        assert await grade(pool, "2") == 2


@pytest.mark.parametrize(("text", "reason"), [("crash", "signal SIGSEGV"), ("die", "exit code 7")])
async def test_a_grader_that_dies_is_replaced_and_says_how_it_died(text, reason):
    async with open_pool(num_workers=1) as pool:
        with pytest.raises(GraderCrash, match=f"{text} died with {reason}"):
            await grade(pool, text)
        assert await grade(pool, "3") == 3


@pytest.mark.parametrize(("text", "message"), [("raise", "ZeroDivisionError: nothing"), ("exit", "SystemExit: 3")])
async def test_an_exception_is_passed_on_with_its_place_and_the_process_stays(text, message):
    async with open_pool(num_workers=1) as pool:
        await grade(pool, "1")
        before = pool.pids
        with pytest.raises(VerifierError, match=rf"reward of {text} raised {message}.*\(grader_functions\.py:\d+\)"):
            await grade(pool, text)
        assert await grade(pool, "3") == 3
        assert pool.pids == before


async def test_a_process_killed_while_idle_is_replaced_before_the_next_call():
    async with open_pool(num_workers=1) as pool:
        (pid,) = {await pool.call(functions.pid, what="x")}
        os.kill(pid, signal.SIGKILL)
        await gone(pid)
        assert await grade(pool, "4") == 4


async def test_a_cancelled_call_frees_its_place():
    async with open_pool(num_workers=1) as pool:
        await grade(pool, "1")
        task = asyncio.create_task(grade(pool, "hang"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await grade(pool, "5") == 5


async def test_killing_a_grader_kills_what_it_started(tmp_path):
    note = tmp_path / "pid"
    async with open_pool(num_workers=1) as pool:
        await grade(pool, "1")
        call = asyncio.create_task(pool.call(functions.spawn_and_hang, str(note), what="x"))
        async with asyncio.timeout(30):
            while not (note.exists() and note.read_text()):
                await asyncio.sleep(0.01)
        call.cancel()
        await gone(int(note.read_text()))


async def test_a_value_that_cannot_be_sent_back_is_an_error():
    async with open_pool(num_workers=1) as pool:
        with pytest.raises(VerifierError, match=r"x raised .*pickle"):
            await pool.call(eval, "lambda: 0", what="x")


async def test_functions_run_on_the_main_thread_where_alarms_work():
    async with open_pool(num_workers=1) as pool:
        assert await pool.call(functions.thread_and_alarm, what="x") == (True, True)


def test_a_pool_used_from_another_thread_grades_alike():
    results = []

    async def main():
        async with open_pool(num_workers=1) as pool:
            results.append(await grade(pool, "6"))

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join(timeout=60)
    assert results == [6]


async def test_a_closed_pool_leaves_no_process_and_may_be_used_again():
    async with open_pool(num_workers=2) as pool:
        await asyncio.gather(grade(pool, "1"), grade(pool, "2"))
        pids = pool.pids
        await pool.aclose()
        assert not any(map(is_alive, pids))
        assert await grade(pool, "1") == 1


@pytest.mark.parametrize("function", ["hang", "hang in C"])
async def test_graders_do_not_outlive_an_owner_that_is_killed(function, tmp_path):
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(HERE)!r})
import grader_functions as functions
from miles_envs.rewards import RewardPool
async def main():
    pool = RewardPool(num_workers=1)
    print(await pool.call(functions.pid, what="x"), flush=True)
    call = asyncio.create_task(pool.call(functions.by_text, None, [{{"content": {function!r}}}], what="x"))
    await asyncio.sleep(0.5)
    print("busy", flush=True)
    await call
asyncio.run(main())
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        grader = int(owner.stdout.readline())
        assert owner.stdout.readline() == "busy\n"
        assert is_alive(grader)
        owner.kill()
        owner.wait(timeout=20)
        await gone(grader)


async def test_a_call_costs_little_once_the_process_is_there(caplog):
    caplog.set_level(logging.WARNING)
    async with open_pool(num_workers=1) as pool:
        await grade(pool, "1")
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(200):
            await grade(pool, "1")
        assert (loop.time() - began) / 200 < 0.02


def test_a_pool_without_processes_is_refused():
    with pytest.raises(ValueError, match="`num_workers` is 0"):
        RewardPool(num_workers=0)
