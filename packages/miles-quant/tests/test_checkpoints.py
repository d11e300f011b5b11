"""Folders in and out of low precision: bytes, resumption, refusals, the commands."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from miles_quant import (  # fmt: skip
    CheckpointError,
    QuantError,
    Recipe,
    compare,
    convert,
    dequantize,
    get_format,
    write_serving,
)
from miles_quant.checkpoints.folder import PROGRESS_FILE, ModelFolder
from miles_quant.checkpoints.safetensors import TensorFile, TensorInfo, TensorWriter
from miles_quant.cli import main
from miles_quant.recipe.recipe import siblings
from safetensors.torch import load_file

from .conftest import bits, small_model, write_folder

CHECKPOINT_FORMATS = ("fp8", "fp8_tensor/div", "fp8_row/div", "mxfp8", "mxfp4", "nvfp4", "nvfp4_4o6", "int4")


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("format", CHECKPOINT_FORMATS)
@pytest.mark.parametrize("files", [1, 3])
def test_a_folder_holds_the_bytes_of_the_format_and_comes_back_as_its_values(format: str, files: int, tmp_path: Path):
    tensors = small_model()
    source = write_folder(tmp_path / "source", tensors, files=files)
    recipe = Recipe(format=format, only=(), keep_first_layers=1)
    report = convert(source, tmp_path / "packed", recipe, workers=2, is_quiet=True)

    stored: dict[str, torch.Tensor] = {}
    for file in sorted((tmp_path / "packed").glob("*.safetensors")):
        stored |= load_file(file)  # the safetensors library reads what our writer wrote
    spec = recipe.spec
    quantised = {name for name in tensors if name.startswith("model.layers.1.") and name.endswith("_proj.weight")}
    assert report.num_changed == len(quantised) == 7
    for name, tensor in tensors.items():
        if name not in quantised:
            assert torch.equal(stored[name], tensor)
            continue
        group = [n for n in quantised if fused(n) == fused(name)]
        amax = torch.stack([spec.amax(tensors[n]) for n in group]).max() if spec.name.has_tensor_scale else None
        for suffix, part in spec.store(spec.quantize(tensor, amax=amax)).items():
            assert torch.equal(bits(stored[name.removesuffix("weight") + suffix]), bits(part)), (name, suffix)
    if files > 1:
        index = json.loads((tmp_path / "packed" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values()) == report.target_bytes
        assert set(index["weight_map"]) == set(stored)

    dequantize(tmp_path / "packed", tmp_path / "back", dtype=torch.float32, is_quiet=True)
    back = ModelFolder(tmp_path / "back")
    assert back.recipe is None
    assert set(back.infos) == set(tensors)
    assert all(row.max_error == 0 for row in compare(tmp_path / "packed", tmp_path / "back"))


def fused(name: str) -> str:
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for part in group:
            name = name.replace(part, group[0])
    return name


def test_gate_and_up_of_an_expert_share_one_scale_across_files(tmp_path: Path):
    source = write_folder(tmp_path / "source", small_model(experts=2), files=4)
    convert(source, tmp_path / "packed", Recipe(format="nvfp4"), is_quiet=True)
    packed = ModelFolder(tmp_path / "packed")
    scales = {name: packed.read(name) for name in packed.infos if name.endswith("weight_scale_2")}
    gates = [name for name in scales if "gate_proj" in name]
    assert len(gates) == 4
    for gate in gates:
        assert torch.equal(scales[gate], scales[gate.replace("gate_proj", "up_proj")])
    assert len({float(scale) for scale in scales.values()}) == 8
    assert not [name for name in packed.infos if "self_attn" in name and "scale" in name]
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.self_attn.q_proj" in config["ignore"]
    assert (tmp_path / "packed" / "hf_quant_config.json").exists()
    assert (tmp_path / "packed" / "tokenizer.json").exists()


def test_a_float32_master_becomes_the_same_bytes_as_its_bfloat16_checkpoint(tmp_path: Path):
    master = small_model(dtype=torch.float32)
    write_folder(tmp_path / "master", master)
    write_folder(tmp_path / "rounded", {name: tensor.bfloat16() for name, tensor in master.items()})
    for name in ("master", "rounded"):
        convert(tmp_path / name, tmp_path / f"{name}-int4", Recipe(format="int4"), is_quiet=True)
    rows = list(compare(tmp_path / "master-int4", tmp_path / "rounded-int4"))
    assert all(row.codes_equal and row.scales_equal for row in rows if row.codes_equal is not None)
    assert sum(row.codes_equal is not None for row in rows) == 14


KILLED = """
import os, signal, sys
import miles_quant.checkpoints.safetensors as st
write, left = st.TensorWriter.write, [int(sys.argv[3])]
def dying(self, name, tensor):
    if left[0] == 0:
        self._file.write(b"half a tensor")
        self._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    write(self, name, tensor)
st.TensorWriter.write = dying
from miles_quant.cli import main
from miles_quant.recipe.recipe import siblings
main(["convert", sys.argv[1], sys.argv[2], "--recipe", "mxfp8", "--quiet"])
"""


@pytest.mark.parametrize("after", [0, 1, 7, 20])
def test_a_conversion_killed_anywhere_is_taken_up_and_ends_in_the_same_bytes(after: int, tmp_path: Path):
    source = write_folder(tmp_path / "source", small_model(), files=2)
    convert(source, tmp_path / "whole", Recipe(format="mxfp8"), is_quiet=True)
    target = tmp_path / "killed"
    killed = subprocess.run([sys.executable, "-c", KILLED, source, target, str(after)], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(CheckpointError, match="has not finished"):
        ModelFolder(target)
    assert not (target / "config.json").exists()

    report = convert(source, target, Recipe(format="mxfp8"), is_quiet=True)
    assert (report.resumed_bytes > 0) == (after > 0)
    assert files_of(target) == files_of(tmp_path / "whole")


def test_unfinished_work_of_another_recipe_or_source_is_not_taken_up(tmp_path: Path):
    source = write_folder(tmp_path / "source", small_model(), files=2)
    target = tmp_path / "target"
    subprocess.run([sys.executable, "-c", KILLED, source, target, "3"], timeout=60)
    with pytest.raises(CheckpointError, match="unfinished work of another job \\(other recipe\\)"):
        convert(source, target, Recipe(format="int4"), is_quiet=True)
    os.utime(next(source.glob("*.safetensors")), (1, 1))
    with pytest.raises(CheckpointError, match="other digest"):
        convert(source, target, Recipe(format="mxfp8"), is_quiet=True)


def test_a_folder_that_exists_is_not_written_over(tmp_path: Path):
    source = write_folder(tmp_path / "source", small_model())
    convert(source, tmp_path / "done", Recipe(format="fp8"), is_quiet=True)
    with pytest.raises(CheckpointError, match="exists and is not an empty folder"):
        convert(source, tmp_path / "done", Recipe(format="fp8"), is_quiet=True)
    with pytest.raises(CheckpointError, match="quantised already"):
        convert(tmp_path / "done", tmp_path / "twice", Recipe(format="fp8"), is_quiet=True)
    with pytest.raises(CheckpointError, match="not quantised"):
        dequantize(source, tmp_path / "back", is_quiet=True)


def cut_a_file(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-7])


def drop_a_file(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def drop_the_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def empty_a_file(folder: Path) -> None:
    next(folder.glob("*.safetensors")).write_bytes(b"")


def break_the_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))


def garble_a_header(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[8] = 0
    file.write_bytes(content)


def change_the_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = next(folder.glob("*.safetensors"))
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def forget_the_offsets(folder: Path) -> None:
    change_the_header(folder, lambda header: header[min(header.keys() - {"__metadata__"})].pop("data_offsets"))


def make_a_shape_negative(folder: Path) -> None:
    change_the_header(folder, lambda header: header[min(header.keys() - {"__metadata__"})].update(shape=[-64, -256]))


def leave_a_list_for_a_config(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")


def count_layers_in_words(folder: Path) -> None:
    (folder / "config.json").write_text('{"num_hidden_layers": "two"}')


def forget_the_weight_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}}')


def lead_the_index_elsewhere(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = {name: f"../{file}" for name, file in index["weight_map"].items()}
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_a_file, "half-written or damaged"),
        (forget_the_offsets, "no dtype, shape and offsets"),
        (make_a_shape_negative, "no dtype, shape and offsets"),
        (leave_a_list_for_a_config, "holds a list, not a table"),
        (count_layers_in_words, "num_hidden_layers is 'two'"),
        (forget_the_weight_map, "has no weight_map"),
        (lead_the_index_elsewhere, "which is no file beside it"),
        (empty_a_file, "too few for its header"),
        (drop_a_file, "cannot be read"),
        (drop_the_config, "has no config.json"),
        (break_the_index, "which does not hold it"),
        (garble_a_header, "header is not JSON"),
    ],
)
def test_a_half_written_source_is_refused_before_anything_is_written(damage, words: str, tmp_path: Path):
    source = write_folder(tmp_path / "source", small_model(), files=3)
    damage(source)
    with pytest.raises(CheckpointError, match=words):
        convert(source, tmp_path / "target", Recipe(format="fp8"), is_quiet=True)
    assert not (tmp_path / "target").exists()


def test_a_broken_weight_is_refused_with_its_name_and_place(tmp_path: Path):
    tensors = small_model()
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = float("nan")
    source = write_folder(tmp_path / "source", tensors)
    with pytest.raises(QuantError, match=r"1 of 32768 values of model.layers.1.mlp.up_proj.weight .* \[2, 3\]: nan"):
        convert(source, tmp_path / "target", Recipe(format="fp8"), is_quiet=True)


def test_a_quantised_matrix_without_all_its_tensors_is_refused(tmp_path: Path):
    tensors = small_model()
    base = "model.layers.0.mlp.up_proj"
    tensors[f"{base}.weight_scale_2"] = torch.ones(())
    tensors[f"{base}.weight_scale"] = torch.ones(128, 16).to(torch.float8_e4m3fn)
    folder = write_folder(tmp_path / "odd", tensors)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="lacks input_scale"):
        dequantize(folder, tmp_path / "back", is_quiet=True)


def test_comparison_tells_codes_scales_and_distance(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = write_folder(tmp_path / "source", small_model())
    for format in ("fp8_128x128/div", "fp8_128x128/te"):
        convert(source, tmp_path / format.replace("/", "-"), Recipe(format=format), is_quiet=True)
    pair = [str(tmp_path / "fp8_128x128-div"), str(tmp_path / "fp8_128x128-te")]
    rows = {row.name: row for row in compare(*pair)}
    assert any(not row.scales_equal for row in rows.values() if row.scales_equal is not None)
    assert all(row.cosine > 0.999 for row in rows.values())
    up = "model.layers.0.mlp.up_proj.weight"
    (against,) = [row for row in compare(source, pair[0]) if row.name == up]
    exact = get_format("fp8_128x128/div").fake_quantize(small_model()[up].float()) - small_model()[up].float()
    assert against.codes_equal is None
    assert against.max_error == pytest.approx(float(exact.abs().max()))
    assert against.mean_error == pytest.approx(float(exact.abs().double().mean()))

    assert main(["compare", pair[0], pair[0], "--exact"]) == 0
    assert main(["compare", *pair, "--exact"]) == 1
    assert main(["compare", *pair]) == 0
    assert "DIFFER" in capsys.readouterr().out


def test_the_commands_say_what_they_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = write_folder(tmp_path / "source", small_model())
    command = ["convert", str(source), str(tmp_path / "out"), "--recipe", "mxfp8", "--keep", "o_proj"]
    assert main([*command, "--keep-last-layers", "1"]) == 0
    printed = capsys.readouterr()
    assert "6 of 19 tensors quantised to mxfp8/rceil" in printed.out
    assert "100%" in printed.err
    assert main(["dequantize", str(tmp_path / "out"), str(tmp_path / "back"), "--dtype", "float32", "--quiet"]) == 0
    assert ModelFolder(tmp_path / "back").infos["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32
    assert main([*command, "--quiet"]) == 1
    assert "exists and is not an empty folder" in capsys.readouterr().err


def test_a_worker_count_below_one_is_refused(tmp_path: Path):
    source = write_folder(tmp_path / "source", small_model())
    with pytest.raises(CheckpointError, match="at least one"):
        convert(source, tmp_path / "out", Recipe(format="fp8"), workers=0, is_quiet=True)


def test_memory_holds_one_tensor_at_a_time(tmp_path: Path):
    """The whole model is far larger than what the process may add to its resident memory."""
    tensors = {
        f"model.layers.{i}.mlp.down_proj.weight": torch.ones(1024, 4096, dtype=torch.bfloat16) for i in range(40)
    }
    source = write_folder(tmp_path / "source", tensors, layers=40)  # 320 MiB
    code = (
        "import resource, sys, torch; torch.set_num_threads(1); from miles_quant import Recipe, convert, get_format; "
        "get_format('mxfp8').quantize(torch.ones(1024, 4096)); "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "convert(sys.argv[1], sys.argv[2], Recipe(format='mxfp8'), is_quiet=True); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert int(done.stdout) < 100 * 1024  # kB


def begin(path: Path, infos: dict[str, TensorInfo]) -> None:
    """Write the first tensor and be interrupted."""
    try:
        with TensorWriter(path, infos, {}) as writer:
            writer.write("a", torch.arange(4.0))
            raise InterruptedError
    except InterruptedError:
        pass


def test_a_writer_takes_up_only_a_file_with_its_own_header(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    one = {"a": TensorInfo(dtype=torch.float32, shape=(4,)), "b": TensorInfo(dtype=torch.int8, shape=(3, 2))}
    begin(path, one)
    with TensorWriter(path, one, {}) as writer:
        assert writer.done == 1
        writer.write("b", torch.zeros(3, 2, dtype=torch.int8))
    read = TensorFile(path)
    assert torch.equal(read.read("a"), torch.arange(4.0))
    assert read.infos == one

    other = {"a": TensorInfo(dtype=torch.float32, shape=(5,))}
    begin(path, one)
    with TensorWriter(path, other, {}) as writer:
        assert writer.done == 0
        writer.write("a", torch.arange(5.0))
    assert TensorFile(path).infos == other


def test_a_progress_file_marks_a_folder_as_unfinished(tmp_path: Path):
    source = write_folder(tmp_path / "source", small_model())
    (source / PROGRESS_FILE).write_text("{}")
    with pytest.raises(CheckpointError, match="has not finished"):
        convert(source, tmp_path / "out", Recipe(format="fp8"), is_quiet=True)


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "int4"])
def test_engines_without_codes_load_the_values_of_the_codes_and_others_the_codes(format: str, tmp_path: Path):
    tensors = small_model()
    source = write_folder(tmp_path / "source", tensors)
    coded = Recipe(format=format, only=())
    plain = Recipe(format=format, only=(), quantize_activations=False)
    (tmp_path / "values.packed").mkdir()  # left by a process that was killed
    write_serving(source, tmp_path / "codes", coded, dtype="float32")
    write_serving(source, tmp_path / "values", plain, dtype="float32")
    codes, values = ModelFolder(tmp_path / "codes"), ModelFolder(tmp_path / "values")
    assert codes.recipe is not None
    assert values.recipe is None
    assert {path.name for path in tmp_path.iterdir()} == {"source", "codes", "values"}
    for name, tensor in tensors.items():
        is_quantised = coded.quantizes(name, tensor.shape)
        fused = [tensors[other] for other in siblings(name) if other in tensors] if is_quantised else []
        amax = max((coded.spec.amax(other) for other in fused), default=None)
        amax = amax if coded.spec.name.has_tensor_scale else None
        codes = coded.spec.quantize(tensor, amax=amax) if is_quantised else None
        expected = tensor if codes is None else coded.spec.dequantize(codes, dtype=torch.float32)
        assert torch.equal(values.read(name).float(), expected.float()), name
    with pytest.raises(CheckpointError, match="exists; remove it"):
        write_serving(source, tmp_path / "codes", coded, dtype="float32")


def with_matrix(path: Path, matrix: torch.Tensor) -> Path:
    return write_folder(path, {**small_model(), "model.layers.0.extra.weight": matrix})


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn])
def test_a_matrix_of_codes_or_counts_is_refused_before_anything_is_written(dtype: torch.dtype, tmp_path: Path):
    source = with_matrix(tmp_path / "source", torch.ones(4, 256).to(dtype))
    with pytest.raises(QuantError, match=f"extra.weight is {str(dtype)[6:]}"):
        convert(source, tmp_path / "target", Recipe(format="mxfp8"), is_quiet=True)
    assert not (tmp_path / "target").exists()
    kept = Recipe(format="mxfp8", keep_bf16=(".extra.",))
    assert convert(source, tmp_path / "target", kept, is_quiet=True).num_changed == 14


@pytest.mark.parametrize("format", ["mxfp8", "fp8_tensor/div"])
def test_a_value_that_bfloat16_cannot_hold_is_refused(format: str, tmp_path: Path):
    source = with_matrix(tmp_path / "source", torch.full((4, 256), 3.4e38))
    with pytest.raises(QuantError, match=r"1024 of 1024 values of .*extra.weight are NaN or Inf as bfloat16"):
        convert(source, tmp_path / "target", Recipe(format=format), is_quiet=True)


@pytest.mark.parametrize("shape", [(0, 256), (4, 0), (0,), ()])
def test_what_holds_no_value_or_one_passes_through_and_compares(shape: tuple[int, ...], tmp_path: Path):
    source = with_matrix(tmp_path / "source", torch.ones(shape))
    convert(source, tmp_path / "packed", Recipe(format="mxfp8"), is_quiet=True)
    dequantize(tmp_path / "packed", tmp_path / "plain", is_quiet=True)
    rows = {row.name: row for row in compare(source, tmp_path / "plain")}
    assert rows["model.layers.0.extra.weight"].is_equal
    assert ModelFolder(tmp_path / "plain").read("model.layers.0.extra.weight").shape == shape


def test_nan_is_never_equal_to_a_number_and_always_to_itself(tmp_path: Path):
    broken, infinite = torch.tensor([1.0, float("nan")]), torch.tensor([float("inf")])
    a = write_folder(tmp_path / "a", {"x.norm": broken, "y.norm": infinite})
    b = write_folder(tmp_path / "b", {"x.norm": torch.ones(2), "y.norm": infinite})
    assert [row.is_equal for row in compare(a, b)] == [False, True]
    assert [row.is_equal for row in compare(a, a)] == [True, True]
    assert main(["compare", str(a), str(b), "--exact"]) == 1


def test_every_scale_is_compared_that_of_inputs_too(tmp_path: Path):
    source = write_folder(tmp_path / "source", small_model(experts=2))
    for name in ("a", "b"):
        convert(source, tmp_path / name, Recipe(format="nvfp4"), is_quiet=True)
    file = tmp_path / "b" / "model.safetensors"
    content = bytearray(file.read_bytes())
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    start = 8 + int.from_bytes(content[:8], "little")
    name = next(key for key in header if key.endswith("input_scale"))
    content[start + header[name]["data_offsets"][0]] ^= 1
    file.write_bytes(content)
    wrong = [row.name for row in compare(tmp_path / "a", tmp_path / "b") if not row.is_equal]
    assert wrong == [name.replace("input_scale", "weight")]


def test_codes_without_scales_are_refused_and_a_folder_without_codes(tmp_path: Path):
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "num_hidden_layers": 1}
    lonely = write_folder(tmp_path / "a", {"x.weight": torch.ones(8, 128).to(torch.float8_e4m3fn)})
    plain = write_folder(tmp_path / "b", {"x.weight": torch.ones(8, 128)})
    for folder, words in ((lonely, "no .weight_scale_inv beside it"), (plain, "no name ends in .weight_scale_inv")):
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=words):
            dequantize(folder, tmp_path / "back", is_quiet=True)
    assert not (tmp_path / "back").exists()


def test_a_disk_that_is_full_is_said_and_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, target = write_folder(tmp_path / "source", small_model(), files=2), tmp_path / "target"
    write, room = TensorWriter.write, [5]

    def full(self: TensorWriter, name: str, tensor: torch.Tensor) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, name, tensor)

    with monkeypatch.context() as patched:
        patched.setattr(TensorWriter, "write", full)
        with pytest.raises(CheckpointError, match=r"target cannot be written: .*No space left.*goes on from it"):
            convert(source, target, Recipe(format="mxfp8"), is_quiet=True)
    assert convert(source, target, Recipe(format="mxfp8"), is_quiet=True).resumed_bytes > 0
    convert(source, tmp_path / "whole", Recipe(format="mxfp8"), is_quiet=True)
    assert files_of(target) == files_of(tmp_path / "whole")


def test_a_run_killed_as_it_began_is_taken_up_and_damaged_progress_is_not(tmp_path: Path):
    source, target = write_folder(tmp_path / "source", small_model()), tmp_path / "target"
    target.mkdir()
    (target / "miles_quant.progress.json.partial").write_text("{")
    convert(source, target, Recipe(format="mxfp8"), is_quiet=True)
    (target / "miles_quant.progress.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"progress\.json is damaged; remove"):
        convert(source, target, Recipe(format="mxfp8"), is_quiet=True)
