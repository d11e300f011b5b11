"""A run in low precision: what its table accepts, what a rank trains on, sends and exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from miles_core.actors.trainer_rank import TrainerRank
from miles_core.config import Config, ConfigError, load_config, to_dict, to_toml
from miles_core.doctor import checks
from miles_core.durable.fingerprint import compare
from miles_core.run.dry_run import make_plan
from miles_core.run.rl import RLRun
from miles_quant import QuantError, Recipe, get_format
from miles_quant.checkpoints.folder import ModelFolder
from miles_tito.shared.settings import SettingError
from miles_train import FSDPConfig, TrainConfig

PLAIN = Recipe(format="mxfp8", quantize_activations=False)
CONFIG = TrainConfig(device="cpu", threads=1, fsdp=FSDPConfig(layout="padded"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    shape: dict[str, Any] = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = transformers.Qwen3Config(
        **shape, vocab_size=96, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.fixture
def problems() -> Callable[..., str]:
    def of(*words: str) -> str:
        with pytest.raises(ConfigError) as told:
            load_config(["@", "quickstart", *words], kind="rl")
        return str(told.value)

    return of


def test_the_table_is_a_recipe_and_survives_being_written(tmp_path: Path):
    words = ("--quant.format", "int4", "--quant.keep-bf16", '["o_proj"]', "--quant.quantize-activations", "false")
    loaded = load_config(["@", "quickstart", *words], kind="rl")
    assert loaded.config.quant == Recipe(format="int4", keep_bf16=("o_proj",), quantize_activations=False)
    (tmp_path / "again.toml").write_text(to_toml(loaded.config))
    assert load_config(["@", str(tmp_path / "again.toml")]).config == loaded.config
    assert load_config(["@", str(tmp_path / "again.toml"), "--quant", "none"]).config.quant is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--quant.format", "fp9"), "quant.format is 'fp9'. No format is named 'fp9'. Short names: fp8, mxfp8"),
        (("--quant.keep-bf16", "[]"), "quant needs `format`."),
        (("--quant.format", "mxfp8"), "quant.quantize_activations is true but engines.rollout runs on a CPU"),
        (("--quant.format", "mxfp8", "--quant.formt", "x"), "is no key. Did you mean quant.format?"),
        (("--quant.format", "nvfp4/te_row"), "quant.format is 'nvfp4/te_row': No engine loads a checkpoint in"),
        (
            ("--quant.format", "fp8", "--quant.keep-first-layers", "-1"),
            "--quant.keep-first-layers is -1; it counts layers",
        ),
        (
            ("--quant.format", "fp8", "--sync.dtype", "bfloat16"),
            'sync.dtype is "bfloat16" but engines get codes and scales',
        ),
    ],
)
def test_what_cannot_work_is_told_before_anything_starts(words: tuple[str, ...], told: str, problems: Any):
    assert told in problems("--engines.rollout.device", "cpu", *words).replace("--quant.format: ", "")


def test_the_plan_says_what_is_quantised_and_what_engines_get(model: Path):
    def plan(recipe: Recipe) -> str:
        words = ["--quant.only", str(list(recipe.only)).replace("'", '"')] if recipe.only else []
        base = load_config(["--model.path", str(model), "--quant.format", recipe.format, *words]).config
        return make_plan(base, "rl")

    assert "quant mxfp8 · 14 of 25 tensors, 85% of the parameters · engines get codes and scales" in plan(
        Recipe(format="mxfp8")
    )
    with pytest.raises(SettingError, match=r"does not fit .* quantises none of the model's 25 tensors"):
        plan(Recipe(format="nvfp4"))  # experts alone, and there are none
    with pytest.raises(SettingError, match="engines load as one matrix"):
        plan(Recipe(format="mxfp8", only=("q_proj",)))


def test_the_doctor_says_what_is_quantised_or_why_nothing_can_be(model: Path):
    def found(*words: str) -> list[tuple[str, str]]:
        config = load_config(["--model.path", str(model), *words]).config
        return [(finding.level, finding.message) for finding in checks.quant(config)]

    assert found() == []
    [(level, message)] = found("--quant.format", "int4")
    assert (level, message[:27]) == ("ok", "int4 · 14 of 25 tensors, 85")
    [(level, message)] = found("--quant.format", "nvfp4")
    assert level == "fail"
    assert "quantises none of the model's 25 tensors" in message


def test_a_run_does_not_go_on_in_another_precision():
    def config(recipe: Recipe | None) -> dict[str, Any]:
        return {"config": to_dict(Config(quant=recipe))}

    assert compare(config(PLAIN), config(PLAIN)).refused == []
    changed = compare(config(None), config(PLAIN)).refused
    assert 'quant.format was absent and is "mxfp8".' in changed
    other = compare(config(PLAIN), config(Recipe(format="fp8", quantize_activations=False))).refused
    assert other == ['quant.format was "mxfp8" and is "fp8".']
    older = to_dict(Config())
    del older["quant"]
    assert compare({"config": older}, config(None)).refused == []


def test_a_rank_trains_on_sends_and_exports_the_same_values(model: Path, tmp_path: Path):
    rank = TrainerRank(rank=0, recipe=PLAIN, fetch=list)
    try:
        rank.setup(CONFIG, model, None)
        trainer: Any = rank._trainer  # pyright: ignore[reportPrivateUsage]
        sent = {shard.name: shard.tensor for shard in rank._shards()}  # pyright: ignore[reportPrivateUsage]
        master = {shard.name: shard.tensor.clone() for shard in trainer.shards()}
        lm: Any = trainer._state.model.lm
        ids = torch.arange(12)[None]
        with torch.no_grad():
            trained_on = lm(ids).logits
        rank.export(tmp_path / "master")
        rank.export_serving(tmp_path / "serving")
    finally:
        rank.close()
    spec = get_format("mxfp8")
    for name, tensor in master.items():
        if PLAIN.quantizes(name, tensor.shape):
            tensor = spec.dequantize(spec.quantize(tensor.bfloat16()), dtype=torch.float32)
        assert torch.equal(sent[name], tensor), name
    served = ModelFolder(tmp_path / "serving")
    assert served.recipe is None
    assert all(torch.equal(served.read(name), sent[name]) for name in served.infos)
    assert torch.equal(ModelFolder(tmp_path / "master").read(name), master[name])
    engine = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "serving", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(engine(ids).logits, trained_on, rtol=0, atol=1e-5)
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "master", dtype=torch.float32)
        assert (plain(ids).logits - trained_on).abs().max() > 1e-4, "the recipe changes nothing: this shows nothing"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["master", "serving"]


def test_a_recipe_that_does_not_fit_the_model_ends_the_set_up(model: Path):
    rank = TrainerRank(rank=0, recipe=Recipe(format="nvfp4", quantize_activations=False), fetch=list)
    with pytest.raises(QuantError, match="quantises none of the model's"):
        rank.setup(CONFIG, model, None)
    rank.close()


@pytest.mark.parametrize(("recipe", "dtype"), [(None, "auto"), (PLAIN, "auto"), (Recipe(format="mxfp8"), "keep")])
def test_codes_and_scales_are_pushed_without_a_cast(recipe: Recipe | None, dtype: str):
    run: Any = SimpleNamespace(_config=Config(quant=recipe))
    assert RLRun._push_config(run, run).dtype == dtype  # pyright: ignore[reportPrivateUsage]


def test_engines_that_hold_codes_start_from_a_folder_of_codes(model: Path, tmp_path: Path):
    assert TrainerRank(rank=0, recipe=PLAIN, fetch=list).serving_folder(model, tmp_path / "codes") == model
    recipe = Recipe(format="mxfp8")
    rank = TrainerRank(rank=0, recipe=recipe, fetch=list)
    folder = rank.serving_folder(model, tmp_path / "codes")
    assert ModelFolder(folder).recipe == recipe.for_model(2)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert rank.serving_folder(model, tmp_path / "codes") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written, "an earlier start of the run has made it"
