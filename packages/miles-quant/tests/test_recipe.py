"""The matcher, and what Hugging Face folders say of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from miles_quant import QuantError, Recipe, modelopt_config, quantization_config, recipe_of_config

SHAPE = (128, 256)
UP = "model.layers.1.mlp.up_proj.weight"


def test_norms_embeddings_head_routers_and_chosen_layers_are_kept():
    recipe = Recipe(format="mxfp8", keep_bf16=("o_proj",), keep_first_layers=1, keep_last_layers=1, num_layers=4)
    kept = [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.shared_expert_gate.weight",
        "model.layers.1.eh_proj.weight",
        "model.layers.1.self_attn.indexer.weights_proj.weight",
        "model.visual.blocks.1.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.3.mlp.up_proj.weight",
        "model.layers.1.mlp.up_proj.bias",
    ]
    assert recipe.quantizes(UP, SHAPE)
    assert recipe.quantizes("model.layers.1.mlp.gate_proj.weight", SHAPE)
    assert [name for name in kept if recipe.quantizes(name, SHAPE)] == []


@pytest.mark.parametrize(
    ("format", "columns", "expected"),
    [
        ("fp8", 128, True),
        ("fp8", 160, False),
        ("fp8_tensor/div", 7, True),
        ("mxfp8", 96, True),
        ("mxfp8", 100, False),
        ("nvfp4", 48, True),
        ("nvfp4", 40, False),
        ("int4_g128/miles", 192, False),
    ],
)
def test_a_matrix_whose_columns_no_block_divides_is_kept(format: str, columns: int, expected: bool):
    assert Recipe(format=format, only=()).quantizes(UP, (128, columns)) is expected


def test_nvfp4_touches_routed_experts_alone_unless_told_otherwise():
    expert = "model.layers.0.mlp.experts.3.up_proj.weight"
    shared = "model.layers.0.mlp.shared_experts.up_proj.weight"
    assert Recipe(format="nvfp4").quantizes(expert, SHAPE)
    assert not Recipe(format="nvfp4").quantizes(shared, SHAPE)
    assert not Recipe(format="nvfp4").quantizes(UP, SHAPE)
    assert Recipe(format="nvfp4", only=()).quantizes(UP, SHAPE)
    assert Recipe(format="int4", only=(".experts.",)).quantizes(expert, SHAPE)
    assert not Recipe(format="int4", only=(".experts.",)).quantizes(UP, SHAPE)


def test_a_recipe_that_splits_what_engines_fuse_is_refused():
    shapes = {f"model.layers.0.self_attn.{p}_proj.weight": SHAPE for p in "qkvo"}
    with pytest.raises(QuantError, match=r"quantises .*[kv]_proj.weight but not .*q_proj.weight"):
        Recipe(format="fp8", keep_bf16=("q_proj",)).select(shapes)
    assert Recipe(format="fp8", keep_bf16=("o_proj",)).select(shapes) == set(shapes) - {
        "model.layers.0.self_attn.o_proj.weight"
    }


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"format": "fp7"}, "No format is named"),
        ({"format": "fp8", "keep_first_layers": -1}, "cannot be negative"),
        ({"format": "fp8", "keep_first_layers": 3, "keep_last_layers": 1, "num_layers": 4}, "4 layers are kept of 4"),
        ({"format": "fp8", "source_dtype": "float16"}, "bfloat16 or float32"),
        ({"format": 8}, "`format` is 8"),
        ({"format": "fp8", "keep_bf16": "o_proj"}, "`keep_bf16` is 'o_proj'; it is a list"),
        ({"format": "fp8", "keep_bf16": [""]}, "none of them empty"),
        ({"format": "fp8", "only": "experts"}, "`only` is 'experts'; it is a list"),
        ({"format": "fp8", "keep_first_layers": "1"}, "`keep_first_layers` is '1'; it is a whole number"),
        ({"format": "fp8", "quantize_activations": "no"}, "it is true or false"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(values: dict[str, object], words: str):
    with pytest.raises(QuantError, match=words):
        Recipe.from_dict(values)


def test_a_recipe_that_quantises_nothing_is_refused():
    with pytest.raises(QuantError, match="none of the model's 1 tensors"):
        Recipe(format="nvfp4").select({UP: SHAPE})


@pytest.mark.parametrize("key", ["keep_bf16", "only"])
def test_a_substring_that_is_in_no_name_is_refused(key: str):
    substrings = {key: ("up_proj", "o_porj")} if key == "only" else {key: ("o_porj",)}
    with pytest.raises(QuantError, match=f"`{key}` has 'o_porj', which is in none of the model's 1 names"):
        Recipe.from_dict({"format": "mxfp8", **substrings}).select({UP: SHAPE})


def test_a_matrix_without_elements_is_kept():
    for shape in ((0, 256), (256, 0)):
        assert not Recipe(format="mxfp8").quantizes(UP, shape)


def test_last_layers_need_their_number_when_they_are_asked_for():
    with pytest.raises(QuantError, match="num_layers"):
        Recipe(format="fp8", keep_last_layers=2).quantizes(UP, SHAPE)
    assert Recipe(format="fp8", keep_last_layers=2).for_model(4).quantizes(UP, SHAPE)
    with pytest.raises(QuantError, match="for 4 layers and the model has 5"):
        Recipe(format="fp8", num_layers=4).for_model(5)


def test_a_recipe_survives_files_of_both_kinds(tmp_path: Path):
    recipe = Recipe(format="nvfp4_4o6", only=(), keep_bf16=("o_proj",), keep_first_layers=1)
    (tmp_path / "r.json").write_text(json.dumps(recipe.to_dict()))
    (tmp_path / "r.toml").write_text('format = "nvfp4_4o6"\nonly = []\nkeep_bf16 = ["o_proj"]\nkeep_first_layers = 1\n')
    assert Recipe.load(tmp_path / "r.json") == Recipe.load(tmp_path / "r.toml") == recipe
    assert Recipe.load("mxfp8") == Recipe(format="mxfp8")
    (tmp_path / "r.toml").write_text('format = "fp8"\nkeep = ["o_proj"]\n')
    with pytest.raises(QuantError, match="does not know keep; its keys are format"):
        Recipe.load(tmp_path / "r.toml")
    with pytest.raises(QuantError, match="cannot be read"):
        Recipe.load(tmp_path / "absent.toml")


def test_the_configuration_of_a_run_is_a_recipe_file_too(tmp_path: Path):
    (tmp_path / "run.toml").write_text('[quant]\nformat = "int4"\n[train]\nranks = 2\n')
    (tmp_path / "config.json").write_text(json.dumps({"train": {}, "quant": Recipe(format="int4").to_dict()}))
    assert Recipe.load(tmp_path / "run.toml") == Recipe.load(tmp_path / "config.json") == Recipe(format="int4")
    for text in ('{"quant": null}', "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(QuantError, match=r"config.json holds no recipe"):
            Recipe.load(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("fp8", {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}),
        ("fp8_tensor/div", {"quant_method": "fp8", "weight_block_size": None}),
        ("fp8_128x128/te_pow2", {"quant_method": "fp8", "scale_fmt": "ue8m0"}),
        ("mxfp8", {"quant_method": "mxfp8", "scale_fmt": "ue8m0", "weight_block_size": [1, 32]}),
        ("nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        ("int4", {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
        ("mxfp4", {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}),
        ("fp8_row/div", {"quant_method": "compressed-tensors", "format": "float-quantized"}),
    ],
)
def test_the_quantization_config_says_what_loaders_read_and_reads_back(format: str, expected: dict[str, object]):
    config = quantization_config(Recipe(format=format), ["lm_head.weight", "model.layers.0.mlp.gate"])
    assert {key: config[key] for key in expected} == expected
    listed = config.get("ignore", config.get("modules_to_not_convert"))
    assert listed == ["lm_head", "model.layers.0.mlp.gate"]

    read = recipe_of_config(json.loads(json.dumps(config)))
    assert read.spec.parts == Recipe(format=format).spec.parts
    assert not read.quantizes("model.layers.0.mlp.gate.weight", SHAPE)
    assert read.quantizes("model.layers.0.mlp.gate_proj.weight", SHAPE)


def test_arbitrary_scales_are_never_announced_as_powers_of_two():
    assert "scale_fmt" not in quantization_config(Recipe(format="fp8_128x128/te"))


def test_modelopt_has_a_file_of_its_own_that_reads_back():
    assert modelopt_config(Recipe(format="mxfp8")) is None
    document = modelopt_config(Recipe(format="nvfp4"), ["lm_head"])
    assert document is not None
    assert document["quantization"] == {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
    assert recipe_of_config(document).spec.name.family == "nvfp4"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "'FP8' is not covered"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "int-quantized"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, "`config_groups` .* not a table"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}}, "`weights` .* not a table"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"actorder": "group"}}}},
            "columns in another order",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"`weight_block_size` is \[128\]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2' is not covered"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "list of names"),
        ({"quantization": None}, "`quantization` .* not a table"),
    ],
)
def test_methods_that_are_not_covered_are_named(config: dict[str, object], words: str):
    with pytest.raises(QuantError, match=words):
        recipe_of_config(config)


def test_a_format_of_activations_makes_no_checkpoint():
    with pytest.raises(QuantError, match="No engine loads a checkpoint in nvfp4/te_row"):
        quantization_config(Recipe(format="nvfp4/te_row"))


def test_recipes_import_no_torch():
    code = "import sys, miles_quant; miles_quant.Recipe(format='fp8').to_dict(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
