"""The parts of the CPU launcher that can be checked without starting SGLang."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_rollout.engines import EngineVersionError
from miles_rollout.engines.sglang_cpu import launch, models

needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

uint32 = st.integers(0, 2**32 - 1)


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, from its definition, for lengths that are multiples of 4."""
    mask, h = 2**32 - 1, 0
    for start in range(0, len(data), 4):
        k = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 & mask
        k = (k << 15 | k >> 17) & mask
        h ^= k * 0x1B873593 & mask
        h = ((h << 13 | h >> 19) & mask) * 5 + 0xE6546B64 & mask
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


def test_the_reference_hash_gives_the_published_values():
    assert murmur3(b"") == 0
    assert murmur3(b"test") == 0xBA6BD213


@needs_torch
@settings(deadline=None)  # the first example imports torch
@given(seed=st.integers(0, 2**64 - 1), position=uint32, columns=st.lists(uint32, min_size=1, max_size=4))
def test_the_torch_hash_is_murmur3_of_seed_position_and_column(seed: int, position: int, columns: list[int]):
    import torch
    from miles_rollout.engines.sglang_cpu.patches import murmur_hash32

    got = murmur_hash32(
        torch.from_numpy(np.array([seed], np.uint64).view(np.int64)),
        torch.tensor([position], dtype=torch.int64),
        torch.tensor(columns, dtype=torch.int64),
    )
    blocks = [seed & 0xFFFFFFFF, seed >> 32, position]
    expected = [murmur3(b"".join(block.to_bytes(4, "little") for block in [*blocks, column])) for column in columns]
    assert got.to(torch.int64).tolist() == [expected]


@needs_torch
def test_new_tokens_are_noted_in_the_rows_of_their_requests():
    import torch
    from miles_rollout.engines.sglang_cpu.kernels import assign_req_to_token_pool_cpu

    table = torch.zeros(3, 6, dtype=torch.int32)
    assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([3, 3]), torch.tensor([7, 8, 9, 10, 11]), 6
    )
    assert table.tolist() == [[9, 10, 11, 0, 0, 0], [0] * 6, [0, 7, 8, 0, 0, 0]]


def run(source: str) -> None:
    """In a process of its own: the stand-ins change what can be imported."""
    code = textwrap.dedent(source)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stderr


def test_a_missing_kernel_says_which_one_and_that_a_gpu_is_needed():
    run("""
        from miles_rollout.engines.sglang_cpu.kernels import KernelStand
        kernels = KernelStand("sgl_kernel")
        try:
            kernels.fused_experts(1, x=2)
        except NotImplementedError as error:
            assert "sgl_kernel.fused_experts has no version for this CPU" in str(error)
        else:
            raise SystemExit("it did not raise")
        assert not hasattr(kernels, "__wrapped__")
    """)


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed")
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@needs_torch
def test_absent_packages_can_be_imported_decorated_with_and_subclassed():
    run("""
        from miles_rollout.engines.sglang_cpu import absent
        absent.install()
        absent.install()
        import triton
        import triton.language as tl
        from triton.language.extra import libdevice
        from triton.runtime.jit import JITFunction

        @triton.jit
        def kernel(x, BLOCK: tl.constexpr):
            return x

        @triton.autotune(configs=[triton.Config({"BLOCK": 8}, num_warps=4)], key=["x"])
        @triton.jit
        def tuned(x):
            return x

        class Function(JITFunction):
            pass

        assert kernel(3, 4) == 3 and tuned(5) == 5 and Function("anything") is not None
        assert triton.cdiv(7, 4) == 2 and triton.next_power_of_2(5) == 8 and tl.constexpr(3).value == 3
        assert libdevice.__name__ == "triton.language.extra.libdevice" and triton.language is tl

        from transformers.utils.import_utils import is_torchvision_available
        from torch.utils._triton import has_triton_package
        assert not is_torchvision_available() and not has_triton_package()
        try:
            import megatron
        except ImportError:
            pass
        else:
            raise SystemExit("megatron was imported")
    """)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    return tmp_path


def test_a_class_is_found_by_its_whole_name():
    source = "import x\nclass Qwen3ForCausalLMExtra(Base):\n    pass\nclass Qwen3MoeForCausalLM:\n    pass\n"
    assert models.defines_one_of(source, ["Qwen3MoeForCausalLM"])
    assert not models.defines_one_of(source, ["Qwen3ForCausalLM"])


@needs_sglang
@pytest.mark.parametrize("form", ["--model-path {}", "--model-path={}", "--port 1 --model {}"])
def test_only_the_served_model_is_imported(model: Path, monkeypatch: pytest.MonkeyPatch, form: str):
    monkeypatch.setenv(models.DISABLED, "")
    monkeypatch.delenv(models.DISABLED)
    models.import_only_served_model(form.format(model).split())
    disabled = launch.os.environ[models.DISABLED].split(",")
    assert "qwen3" not in disabled
    assert {"qwen3_moe", "llama", "deepseek_v2"} <= set(disabled)


@needs_sglang
@pytest.mark.parametrize(
    "options", ["--model-path {} --speculative-algorithm EAGLE", "--model-path some/hub-model", "--model-path", ""]
)
def test_every_model_is_imported_when_it_cannot_be_told_which(
    model: Path, monkeypatch: pytest.MonkeyPatch, options: str
):
    monkeypatch.setenv(models.DISABLED, "")
    monkeypatch.delenv(models.DISABLED)
    models.import_only_served_model(options.format(model).split())
    assert models.DISABLED not in launch.os.environ


@needs_sglang
def test_an_unknown_architecture_leaves_the_registry_alone(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(models.DISABLED, "")
    monkeypatch.delenv(models.DISABLED)
    (model / "config.json").write_text(json.dumps({"architectures": ["NobodyKnowsThisForCausalLM"]}))
    models.import_only_served_model(["--model-path", str(model)])
    assert models.DISABLED not in launch.os.environ


def test_the_users_device_and_backend_are_kept():
    assert launch.with_defaults(["--x"]) == ["--x", "--device", "cpu", "--attention-backend", "torch_native"]
    assert launch.with_defaults(["--device=cpu", "--attention-backend", "intel_amx"]) == [
        *("--device=cpu", "--attention-backend", "intel_amx")
    ]


@pytest.fixture
def start_method(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = multiprocessing.get_start_method(allow_none=True)
    monkeypatch.delenv(launch.START_METHOD, raising=False)
    monkeypatch.setattr(launch.gc, "freeze", lambda: None)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("start_method")
def test_processes_are_forked_while_there_is_one_thread_and_spawned_otherwise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch.os, "listdir", lambda path: ["1"])
    assert launch.choose_start_method(dp_size=1) == "fork"
    assert launch.choose_start_method(dp_size=2) == "spawn"
    monkeypatch.setenv(launch.START_METHOD, "spawn")
    assert launch.choose_start_method(dp_size=1) == "spawn"


@pytest.mark.usefixtures("start_method")
def test_a_second_thread_means_spawn():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    assert launch.choose_start_method(dp_size=1) == "spawn"
    assert multiprocessing.get_start_method() == "spawn"
    done.set()
    thread.join()


def test_the_launcher_refuses_an_unsupported_sglang_before_importing_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(device: str) -> str:
        raise EngineVersionError("SGLang 9 is installed; this version of Miles runs SGLang 0.5.23")

    monkeypatch.setattr(launch, "check_sglang", refuse)
    assert launch.main(["--model-path", "m"]) == 2
    assert "SGLang 9 is installed" in capsys.readouterr().err
    assert "sglang" not in sys.modules
