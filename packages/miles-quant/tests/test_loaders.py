"""What Transformers makes of our folders on a CPU: the values that the format says."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from miles_quant import Recipe, convert, get_format
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from .tiny_models import build, save


def load(folder: Path, config: dict[str, Any]) -> Any:
    """Our converter keeps the configuration it finds; the test's folder gets a whole one afterwards."""
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **written, "dtype": "bfloat16"}))
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("format", ["fp8", "mxfp8"])
def test_transformers_reads_the_values_of_our_codes(format: str, tmp_path: Path):
    pytest.importorskip("accelerate", reason="Transformers loads FP8 folders with it")
    model = build("dense")
    recipe = Recipe(format=format, keep_bf16=("o_proj",))
    convert(save(model, tmp_path / "plain"), tmp_path / "packed", recipe, is_quiet=True)
    loaded = load(tmp_path / "packed", model.config.to_dict())
    spec = get_format(format)
    for name, parameter in model.named_parameters():
        value = loaded.get_parameter(name)
        is_quantised = recipe.quantizes(name, parameter.shape)
        expected = spec.fake_quantize(parameter.detach()) if is_quantised else parameter
        assert torch.equal(value, expected), name


def test_transformers_reads_the_values_of_our_int4_through_compressed_tensors(tmp_path: Path):
    pytest.importorskip("compressed_tensors")
    model, recipe = build("dense"), Recipe(format="int4")
    convert(save(model, tmp_path / "plain"), tmp_path / "packed", recipe, is_quiet=True)
    loaded = load(tmp_path / "packed", model.config.to_dict())
    with torch.no_grad():
        loaded(torch.zeros(1, 2, dtype=torch.long))  # it decompresses at the first call
    name = "model.layers.0.mlp.up_proj.weight"
    expected = get_format("int4").fake_quantize(model.get_parameter(name).detach())
    assert torch.equal(loaded.get_parameter(name), expected)
