"""A dead endpoint leaves rotation and comes back prepared; a call is sent again once, and then it has failed."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from miles_envs import EndpointError, EndpointPool, EndpointState, EnvironmentSetupError, InfraError
from miles_tito.records import Ctx, EpisodeResult, Outcome, Policy, Prompt, Sampling

URLS = ["http://a", "http://b", "http://c"]


class Service:
    """Endpoints that a test breaks and repairs."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.asked: list[str] = []
        self.prepared: list[str] = []
        self.probed = asyncio.Event()

    async def work(self, url: str) -> str:
        self.asked.append(url)
        if url in self.broken:
            raise EndpointError("503")
        return url

    async def probe(self, url: str) -> None:
        self.probed.set()
        if url in self.broken:
            raise EndpointError("still 503")

    async def prepare(self, url: str) -> None:
        self.prepared.append(url)

    def pool(self, urls: list[str] = URLS, **options: float) -> EndpointPool:
        options = {"probe_interval_s": 0.01, "wait_s": 5, **options}
        return EndpointPool(urls, probe=self.probe, prepare=self.prepare, **options)  # pyright: ignore[reportArgumentType]


async def test_a_dead_endpoint_gets_no_calls_and_no_call_fails_for_it():
    service = Service()
    service.broken = {"http://b"}
    async with service.pool() as pool:
        results = [await pool.call(service.work) for _ in range(30)]
        assert set(results) == {"http://a", "http://c"}
        assert pool.states["http://b"] is EndpointState.DEAD
        before = service.asked.count("http://b")
        await asyncio.gather(*(pool.call(service.work) for _ in range(30)))
        assert service.asked.count("http://b") == before == 3
        assert pool.metrics()["endpoints/dead"] == 1
        assert pool.metrics()["endpoints/sent_again"] == before


async def test_an_endpoint_that_returns_is_prepared_before_it_is_used():
    service = Service()
    service.broken = {"http://a"}
    held = asyncio.Event()

    async def prepare(url: str) -> None:
        held.set()
        await asyncio.Event().wait()

    async with EndpointPool(
        ["http://a"], probe=service.probe, prepare=prepare, dead_after=1, probe_interval_s=0.01, wait_s=0.1
    ) as pool:
        with pytest.raises(InfraError, match=r"No endpoint was healthy for 0.1 s: http://a \(.*503\)"):
            await pool.call(service.work)
        service.broken.clear()
        await held.wait()
        assert pool.states["http://a"] is EndpointState.RETURNING
        with pytest.raises(InfraError, match="No endpoint was healthy"):
            await pool.call(service.work)
        assert service.asked == ["http://a"]


async def test_a_call_waits_for_an_endpoint_to_come_back():
    service = Service()
    service.broken = set(URLS[:1])
    async with service.pool(URLS[:1], dead_after=1) as pool:
        call = asyncio.create_task(pool.call(service.work))
        await service.probed.wait()
        assert not call.done()
        service.broken.clear()
        assert await call == "http://a"
    assert service.prepared == ["http://a"]


async def test_a_call_that_fails_twice_is_an_infrastructure_failure_that_names_both():
    service = Service()
    service.broken = set(URLS)
    async with service.pool(dead_after=5) as pool:
        with pytest.raises(InfraError, match=r"Two endpoints failed: http://. \(EndpointError: 503\), then http://"):
            await pool.call(service.work)
    assert len(set(service.asked)) == len(service.asked) == 2


async def test_what_the_caller_did_wrong_is_not_the_endpoints_fault():
    async def wrong(url: str) -> None:
        raise KeyError("task")

    async with Service().pool() as pool:
        for _ in range(9):
            with pytest.raises(KeyError):
                await pool.call(wrong)
        assert set(pool.states.values()) == {EndpointState.HEALTHY}


async def test_a_success_forgets_earlier_failures():
    service = Service()
    async with service.pool(["http://a"], dead_after=2) as pool:
        for _ in range(5):
            failed = False

            async def sometimes(url: str) -> None:
                nonlocal failed
                if not failed:
                    failed = True
                    raise EndpointError("once")

            await pool.call(sometimes)
            assert pool.states["http://a"] is EndpointState.HEALTHY


async def test_an_endpoint_that_hangs_has_failed():
    async def hang(url: str) -> str:
        if url == "http://a":
            await asyncio.Event().wait()
        return url

    async with Service().pool(["http://a", "http://b"], timeout_s=0.05) as pool:
        assert await pool.call(hang) == "http://b"
        assert pool.states["http://a"] is EndpointState.SUSPECT


@pytest.mark.parametrize("options", [{"urls": []}, {"urls": ["http://a"] * 2}, {"urls": URLS, "dead_after": 0}])
def test_a_pool_that_cannot_work_is_refused(options):
    with pytest.raises(EnvironmentSetupError):
        EndpointPool(**options)


class Adding:
    """An environment whose verifier is an HTTP service on several machines."""

    def __init__(self, urls: list[str]) -> None:
        self._pool = EndpointPool(urls, dead_after=2, probe_interval_s=0.01, timeout_s=5)
        self._http = aiohttp.ClientSession(trust_env=False)

    def tasks(self, split: str) -> list[Prompt]:
        return [Prompt(id=f"{split}-{n}", messages=({"role": "user", "content": f"{n}+1?"},)) for n in range(3)]

    async def run(self, prompt: Prompt, policy: Policy, ctx: Ctx) -> EpisodeResult:
        async def verify(url: str) -> float:
            async with self._http.post(f"{url}/verify", json={"id": prompt.id}) as response:
                if response.status >= 500:
                    raise EndpointError(f"{url} answered {response.status}")
                return (await response.json())["reward"]

        try:
            return EpisodeResult(outcome=Outcome.GRADED, reward=await self._pool.call(verify))
        except InfraError as error:
            return EpisodeResult(outcome=Outcome.INFRA_ABORT, error=str(error))

    async def aclose(self) -> None:
        await self._pool.aclose()
        await self._http.close()


@asynccontextmanager
async def verifier(port: int = 0) -> AsyncIterator[str]:
    async def verify(request: web.Request) -> web.Response:
        return web.json_response({"reward": 1.0})

    app = web.Application()
    app.router.add_post("/verify", verify)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield site.name.rstrip("/")
    finally:
        await runner.cleanup()


async def test_an_environment_goes_on_while_one_of_its_services_is_down_and_uses_it_again_afterwards():
    policy = Policy(base_url="http://session", api_key="k", model="m", sampling=Sampling())

    async def episode(env: Adding) -> EpisodeResult:
        ctx = Ctx(run_id="r", episode_id="g0/0", attempt=0)
        return await env.run(env.tasks("train")[0], policy, ctx)

    async with verifier() as steady:
        async with verifier() as failing:
            env = Adding([failing, steady])
            assert (await episode(env)).reward == 1.0
        for _ in range(4):
            assert (await episode(env)).reward == 1.0
        assert env._pool.states[failing] is EndpointState.DEAD
        async with verifier(int(failing.rpartition(":")[2])):
            while env._pool.states[failing] is not EndpointState.HEALTHY:
                await asyncio.gather(*(episode(env) for _ in range(4)))
        await env.aclose()
