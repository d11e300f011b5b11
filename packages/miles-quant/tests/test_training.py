"""The contract: what the trainer computes is, bit for bit, what a model computes that holds only the packed bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from miles_quant import QuantError, QuantLinear, Recipe, convert, get_format, load_packed, prepare_model
from miles_quant.nn.matmul import Scheme, round_activation, train_linear

from .conftest import normal
from .tiny_models import KINDS, build, empty_like, export, logits, rounded, save, token_ids

TRAINED = ("fp8", "fp8_128x128/te_pow2", "fp8_tensor/te", "mxfp8", "mxfp4", "nvfp4", "nvfp4_4o6", "int4")


def recipe_of(format: str, kind: str) -> Recipe:
    """NVFP4 as it comes touches experts alone; in the dense model it gets everything."""
    return Recipe(format=format, only=None if kind == "moe" else ())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", TRAINED)
def test_the_trainer_computes_what_a_model_of_packed_bytes_computes(
    format: str, kind: str, dtype: torch.dtype, tmp_path: Path
):
    model, recipe, ids = build(kind, dtype=dtype), recipe_of(format, kind), token_ids(2, 24)
    plain = logits(model, ids)
    convert(save(model, tmp_path / "plain"), tmp_path / "packed", recipe, is_quiet=True)
    engine = load_packed(empty_like(model), tmp_path / "packed")
    chosen = prepare_model(model, recipe)

    assert torch.equal(logits(model, ids), logits(engine, ids))
    assert not torch.equal(logits(model, ids), plain)
    held = dict(engine.named_parameters())
    assert not [name for name in chosen if name in held]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", ["fp8", "mxfp8", "nvfp4", "int4"])
def test_twenty_steps_with_an_export_after_each_stay_equal(format: str, kind: str, tmp_path: Path):
    model, recipe = build(kind, dtype=torch.float32), recipe_of(format, kind)
    convert(save(model, tmp_path / "plain"), tmp_path / "packed", recipe, is_quiet=True)
    engine = load_packed(empty_like(model), tmp_path / "packed")
    prepare_model(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(20):
        ids = token_ids(2, 12, seed=step % 2)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        engine.load_state_dict(export(model, recipe), strict=False)
        assert torch.equal(logits(model, ids), logits(engine, ids)), f"step {step}"
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", ["fp8", "mxfp8", "nvfp4", "int4"])
def test_the_logits_of_a_sequence_do_not_depend_on_its_batch(format: str, kind: str):
    model, ids = build(kind), token_ids(4, 16)
    prepare_model(model, recipe_of(format, kind))
    alone = torch.cat([logits(model, ids[i : i + 1]) for i in range(4)])
    assert torch.equal(logits(model, ids), alone)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", TRAINED)
def test_gradients_reach_every_matrix(format: str, kind: str):
    model, ids = build(kind, dtype=torch.float32), token_ids(4, 24)
    prepare_model(model, recipe_of(format, kind))
    model(ids).logits.log_softmax(-1).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("format", TRAINED)
def test_gradients_of_a_layer_point_the_way_of_full_precision(format: str):
    spec = get_format(format)
    scheme = Scheme(weight=spec, activation=spec.activation, source_dtype=torch.bfloat16)
    x, w = torch.randn(64, 128).requires_grad_(), torch.randn(96, 128).requires_grad_()
    g = torch.randn(64, 96)
    train_linear(x, w, scheme).backward(g)
    exact = {"dx": (x.grad, g @ w.detach()), "dw": (w.grad, g.t() @ x.detach())}
    for name, (ours, theirs) in exact.items():
        assert ours is not None
        similarity = torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0)
        assert similarity > (0.97 if "4" in format else 0.998), (name, float(similarity))


def test_parameters_and_their_names_stay_as_they_were():
    model = build("moe")
    before = dict(model.named_parameters())
    chosen = prepare_model(model, Recipe(format="fp8"))
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is before[name] for name in before)
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in chosen
    assert isinstance(model.model.layers[0].self_attn.q_proj, QuantLinear)
    assert type(model.lm_head) is torch.nn.Linear
    assert "format=fp8_128x128/div" in repr(model.model.layers[0].self_attn.q_proj)


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "int4"])
def test_with_plain_activations_the_trainer_computes_what_a_model_of_rounded_weights_computes(format: str):
    """The contract with an engine that is fed dequantised weights, whatever it runs on."""
    model, ids = build("dense", dtype=torch.float32), token_ids(2, 24)
    recipe = Recipe(format=format, only=(), quantize_activations=False)
    engine = empty_like(model)
    engine.load_state_dict(rounded(model, recipe))
    prepare_model(model, recipe)
    assert torch.equal(logits(model, ids), logits(engine, ids))
    model(ids).logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_kept_layers_compute_in_full_precision():
    ids = token_ids(1, 8)
    model = build("dense")
    prepare_model(model, Recipe(format="int4", keep_first_layers=1))
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert type(model.model.layers[1].mlp.up_proj) is QuantLinear
    assert torch.isfinite(logits(model, ids)).all()


def test_a_recipe_that_does_not_fit_the_model_is_refused():
    keep = (".layers.1.mlp.experts.0.gate_proj", ".layers.1.mlp.experts.0.up_proj")
    odd = torch.nn.Sequential(torch.nn.PReLU())
    odd[0].weight = torch.nn.Parameter(torch.zeros(64, 64))
    with pytest.raises(QuantError, match="none of the model's"):
        prepare_model(build("dense"), Recipe(format="nvfp4"))
    with pytest.raises(QuantError, match="gate_proj of 3 of 4 experts"):
        prepare_model(build("moe"), Recipe(format="mxfp8", keep_bf16=keep))
    with pytest.raises(QuantError, match="belongs to a PReLU; only linear layers"):
        prepare_model(odd, Recipe(format="mxfp8"))


def test_a_bias_is_added_in_full_precision():
    linear = torch.nn.Linear(64, 32)
    x = normal(3, 64, dtype=torch.float32)
    scheme = Scheme(weight=get_format("mxfp8"), activation=get_format("mxfp8"), source_dtype=torch.bfloat16)
    expected = train_linear(x, linear.weight, scheme) + linear.bias
    assert torch.equal(QuantLinear.convert(linear, scheme)(x), expected)


def three_products(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The definition, written out."""
    q = get_format("mxfp8").fake_quantize
    return (
        q(x) @ q(w).t(),
        q(g) @ q(w.t().contiguous()).t(),
        q(g.t().contiguous()) @ q(x.t().contiguous()).t(),
    )


@pytest.mark.parametrize("shape", [(64, 96, 128), (5, 7, 64), (1, 33, 32)])
def test_mxfp8_requantises_each_operand_along_the_dimension_that_is_summed(shape: tuple[int, int, int]):
    tokens, rows, columns = shape
    x, w = normal(tokens, columns).requires_grad_(), normal(rows, columns, seed=1).requires_grad_()
    g = normal(tokens, rows, seed=2)
    scheme = Scheme(weight=get_format("mxfp8"), activation=get_format("mxfp8"), source_dtype=torch.bfloat16)
    y = train_linear(x, w, scheme)
    y.backward(g)
    expected = three_products(x.detach(), w.detach(), g)
    assert torch.equal(y, expected[0])
    assert torch.equal(x.grad, expected[1])
    assert torch.equal(w.grad, expected[2])


def test_mxfp8_does_not_reuse_the_forward_weight_for_the_gradient_of_its_input():
    spread = torch.exp2(torch.arange(96.0) % 13 * 3 - 20)[:, None]  # blocks along N span many powers of two
    x, w = normal(64, 128).requires_grad_(), (normal(96, 128, seed=1) * spread.bfloat16()).requires_grad_()
    g, q = normal(64, 96, seed=2), get_format("mxfp8").fake_quantize
    scheme = Scheme(weight=get_format("mxfp8"), activation=get_format("mxfp8"), source_dtype=torch.bfloat16)
    train_linear(x, w, scheme).backward(g)
    assert torch.equal(x.grad, three_products(x.detach(), w.detach(), g)[1])
    assert not torch.equal(x.grad, q(g) @ q(w.detach()))


def test_straight_through_gradients_use_the_rounded_operands():
    x, w, g = normal(6, 64).requires_grad_(), normal(16, 64, seed=1).requires_grad_(), normal(6, 16, seed=2)
    spec = get_format("int4")
    scheme = Scheme(weight=spec, activation=None, source_dtype=torch.bfloat16)
    train_linear(x, w, scheme).backward(g)
    assert torch.equal(x.grad, g @ spec.fake_quantize(w.detach()))
    assert torch.equal(w.grad, g.t() @ x.detach())


def test_no_token_means_no_work():
    scheme = Scheme(weight=get_format("fp8"), activation=get_format("fp8_1x128/div"), source_dtype=torch.bfloat16)
    assert train_linear(torch.empty(0, 128), torch.ones(4, 128), scheme).shape == (0, 4)
    assert round_activation(torch.empty(2, 0, 128), scheme).shape == (2, 0, 128)
