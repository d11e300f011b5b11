"""Transports on a GPU, through what the CPU suite asks of every transport: bytes, several writers, seals, epochs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "packages/miles-weightsync/tests"))

from miles_weightsync.errors import MissingDependency, TransportError
from miles_weightsync.transports import Region, make_inbox, make_outbox
from transport_peer import Peer, pattern

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def skip_if_missing(transport: str) -> None:
    try:
        make_inbox(transport).close()
    except MissingDependency as missing:
        pytest.skip(str(missing))


@pytest.fixture(params=["cuda_ipc", "nccl", "cupy_nccl"])
def transport(request: pytest.FixtureRequest) -> str:
    skip_if_missing(request.param)
    if request.param != "cuda_ipc":
        import torch

        if torch.cuda.device_count() < 2:
            pytest.skip("NCCL refuses two ranks on one GPU; this needs two")
    return request.param


@pytest.fixture
def receiver(transport: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    if transport != "cuda_ipc":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    peer = Peer(transport)
    monkeypatch.undo()
    yield peer
    peer.end()


def test_bytes_reach_a_receiver_in_another_process_whole(transport: str, receiver: Peer) -> None:
    outbox = make_outbox(transport)
    text = receiver("register", nbytes=40 * MIB, epoch=1)
    region = Region.from_json(text)
    writes = [(3, 33 * MIB + 1, 1), (35 * MIB, 5 * MIB, 2), (1, 1, 3)]
    tickets = [outbox.write(region, offset, pattern(seed, nbytes)) for offset, nbytes, seed in writes]
    outbox.wait(tickets, timeout_s=60)
    for offset, nbytes, seed in writes:
        assert receiver("equals", region=text, offset=offset, nbytes=nbytes, seed=seed)
    outbox.close()


def test_an_old_epoch_is_refused_and_a_new_one_is_whole(transport: str, receiver: Peer) -> None:
    outbox = make_outbox(transport)
    old = Region.from_json(receiver("register", nbytes=MIB, epoch=1))
    outbox.wait([outbox.write(old, 0, pattern(1, MIB))], timeout_s=60)
    receiver("fence", epoch=2)
    text = receiver("register", nbytes=MIB, epoch=2)
    with pytest.raises(TransportError, match=r"1048576 bytes at offset 0 of .*epoch 1"):
        outbox.wait([outbox.write(old, 0, pattern(9, MIB))], timeout_s=60)
    outbox.wait([outbox.write(Region.from_json(text), 0, pattern(2, MIB))], timeout_s=60)
    assert receiver("equals", region=text, offset=0, nbytes=MIB, seed=2)
    outbox.close()


def test_a_receiver_that_was_killed_is_an_error_within_the_deadline(transport: str, receiver: Peer) -> None:
    outbox = make_outbox(transport)
    region = Region.from_json(receiver("register", nbytes=MIB, epoch=1))
    outbox.wait([outbox.write(region, 0, pattern(1, MIB))], timeout_s=60)
    receiver.kill()
    with pytest.raises(TransportError, match="1048576 bytes at offset 0"):
        outbox.wait([outbox.write(region, 0, pattern(1, MIB))], timeout_s=40)
    outbox.close()


def test_a_tensor_goes_from_device_to_device() -> None:
    import torch

    skip_if_missing("cuda_ipc")
    receiver, outbox = Peer("cuda_ipc"), make_outbox("cuda_ipc")
    try:
        data = pattern(1, 20 * MIB)
        text = receiver("register", nbytes=data.nbytes + 8, epoch=1)
        outbox_: Any = outbox
        ticket = outbox_.write_tensor(Region.from_json(text), 8, torch.from_numpy(data).cuda())
        outbox.wait([ticket], timeout_s=60)
        assert receiver("equals", region=text, offset=8, nbytes=data.nbytes, seed=1)
    finally:
        outbox.close()
        receiver.end()


@pytest.mark.parametrize("transport", ["tcp", "mooncake", "nixl"])
def test_pinned_memory_can_be_staged_into(transport: str) -> None:
    import torch

    skip_if_missing(transport)
    if not torch.cuda.is_available():
        pytest.skip("only a GPU pins memory")
    pinned: list[torch.Tensor] = []

    def allocate(nbytes: int) -> np.ndarray:
        pinned.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
        return pinned[-1].numpy()

    inbox, outbox = make_inbox(transport, allocate=allocate), make_outbox(transport)
    region, data = inbox.register(9 * MIB, epoch=0), pattern(1, 9 * MIB)
    outbox.wait([outbox.write(region, 0, data)], timeout_s=60)
    on_device = pinned[0].to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert np.array_equal(on_device.cpu().numpy(), data)
    outbox.close()
    inbox.close()
