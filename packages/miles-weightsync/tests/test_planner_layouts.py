"""Trainer and engine layouts: every family through every way of cutting, and where the boxes lie in parameters."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from miles_weightsync import ShardError
from miles_weightsync.planner import (
    Layout,
    Megatron,
    ModelShape,
    Part,
    SGLang,
    fsdp_layout,
    full_layout,
    make_plan,
)
from miles_weightsync.planner.model import scale_box
from miles_weightsync.planner.presets import DEEPSEEK_V3, GLM_5, KIMI_K2, PRESETS, QWEN3_235B_A22B
from planner_models import DENSE, DSA, FP8, GLM, LATENT_Q, MLA, MOE, QWEN2, numbered, run, same, scatter

FAMILIES = {
    "dense": DENSE,
    "qwen2": QWEN2,
    "moe": MOE,
    "glm": GLM,
    "mla": MLA,
    "fp8": FP8,
    "dsa": DSA,
    "latent_q": LATENT_Q,
}
Tensors = dict[str, np.ndarray]


def trainers(model: ModelShape) -> dict[str, Layout]:
    megatron = Megatron(model=model, tp=2, pp=2, dp=2)
    layouts = {
        "flat": fsdp_layout(model, ranks=3),
        "hybrid": fsdp_layout(model, ranks=4, shard_ranks=2),
        "full": full_layout(model, ranks=2),
        "megatron": megatron.layout(),
    }
    if model.num_experts:
        layouts["experts"] = replace(megatron, ep=4).layout()
        layouts["cut experts"] = replace(
            megatron, ep=2, etp=2, layers_per_stage=(model.num_hidden_layers - 1, 1)
        ).layout()
    return layouts


def fleets(model: ModelShape) -> list[SGLang]:
    draft = model.num_mtp_layers == 1
    found = [SGLang(model=model, engines=2, tp=1), SGLang(model=model, tp=4, draft=draft)]
    if model.architecture not in ("Qwen2ForCausalLM",):
        found.append(SGLang(model=model, tp=4, dp=2, dp_lm_head=True))
    if not model.is_mla:
        found.append(SGLang(model=model, tp=8))  # fewer KV heads than ranks
    if model.num_experts:
        found += [SGLang(model=model, engines=2, tp=4, ep=4, draft=draft), SGLang(model=model, tp=4, ep=2)]
    if model.n_shared_experts:
        found.append(SGLang(model=model, tp=4, ep=2, fuse_shared_experts=True, replicate_dense_mlp=True))
        found.append(SGLang(model=model, tp=4, ep=4, dp=4, replicate_shared_experts=True))
    return found


def params(parts: list[Part], tensors: Tensors) -> dict[tuple[str, str], np.ndarray]:
    """Write boxes where `parts` says, refusing to write twice."""
    found: dict[tuple[str, str], np.ndarray] = {}
    for part in parts:
        param = found.setdefault((part.model, part.param), np.zeros(part.shape, dtype=np.int64))
        assert param.shape == part.shape
        place = param[part.slices(part.box)]
        assert not place.any(), part
        place[...] = tensors[part.name][tuple(slice(*span) for span in part.box)]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_any_trainer_feeds_any_engine(family: str) -> None:
    model = FAMILIES[family]
    for fleet in fleets(model):
        target = fleet.layout()
        for source in trainers(model).values():
            tensors = numbered(source)
            plan = make_plan(source, target)
            assert plan.bytes_moved == plan.bytes_needed
            arrived = run(plan, scatter(source, tensors), target)
            assert same(arrived, scatter(target, {name: tensors[name] for name in target.tensors}))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_located_is_what_is_planned(family: str) -> None:
    model = FAMILIES[family]
    sides = [(fleet.layout(), fleet.parts) for fleet in fleets(model)]
    megatron = Megatron(model=model, tp=2, pp=2, dp=2, ep=2 if model.num_experts else 1)
    sides.append((megatron.layout(), megatron.parts))
    for layout, parts in sides:
        planned: dict[int, set[tuple[str, object]]] = {rank: set() for rank in layout.hosts}
        for rank, spec in layout.shards():
            if parts != megatron.parts or not spec.name.endswith("_scale_inv"):
                planned[rank].add((spec.name, spec.box))
        for rank in layout.hosts:
            assert {(part.name, part.box) for part in parts(rank)} == planned[rank]


def chunk(tensor: np.ndarray, parts: int, index: int, dim: int = 0) -> np.ndarray:
    return np.split(tensor, parts, axis=dim)[index]


@pytest.mark.parametrize("model", [DENSE, GLM, QWEN2], ids=["dense", "glm", "qwen2"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_attention_is_fused_and_kv_heads_are_repeated_as_sglang_does(model: ModelShape, tp: int) -> None:
    fleet = SGLang(model=model, tp=tp)
    tensors = numbered(full_layout(model))
    at = "model.layers.1.self_attn."
    q, k, v = (tensors[f"{at}{part}_proj.weight"] for part in "qkv")
    for rank in range(tp):
        kv_parts = min(tp, 4)
        kv = rank // (tp // kv_parts)
        got = params(fleet.parts(rank), tensors)
        want = [chunk(q, tp, rank), chunk(k, kv_parts, kv), chunk(v, kv_parts, kv)]
        assert np.array_equal(got["target", f"{at}qkv_proj.weight"], np.concatenate(want))
        assert np.array_equal(
            got["target", f"{at}o_proj.weight"], chunk(tensors[f"{at}o_proj.weight"], tp, rank, dim=1)
        )
        if model.qkv_bias:
            bias = [tensors[f"{at}{part}_proj.bias"] for part in "qkv"]
            want = [chunk(bias[0], tp, rank), chunk(bias[1], kv_parts, kv), chunk(bias[2], kv_parts, kv)]
            assert np.array_equal(got["target", f"{at}qkv_proj.bias"], np.concatenate(want))


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("fused", [False, True])
def test_experts_stack_gate_above_up_and_a_fused_shared_expert_comes_last(tp: int, ep: int, fused: bool) -> None:
    fleet = SGLang(model=FP8, tp=tp, ep=ep, fuse_shared_experts=fused)
    tensors = numbered(full_layout(FP8))
    moe_tp, at = tp // ep, "model.layers.2.mlp."
    for rank in range(tp):
        got = params(fleet.parts(rank), tensors)
        ids = [f"experts.{e}" for e in range(8) if e // (8 // ep) == rank // moe_tp] + ["shared_experts"] * fused
        for leaf in ("weight", "weight_scale_inv"):

            def part(expert: str, name: str, dim: int, leaf: str = leaf, rank: int = rank) -> np.ndarray:
                return chunk(tensors[f"{at}{expert}.{name}_proj.{leaf}"], moe_tp, rank % moe_tp, dim)

            w13 = np.stack([np.concatenate([part(e, "gate", 0), part(e, "up", 0)]) for e in ids])
            assert np.array_equal(got["target", f"{at}experts.w13_{leaf}"], w13)
            w2 = np.stack([part(e, "down", 1) for e in ids])
            assert np.array_equal(got["target", f"{at}experts.w2_{leaf}"], w2)
            if not fused:
                gate, up = (tensors[f"{at}shared_experts.{p}_proj.{leaf}"] for p in ("gate", "up"))
                want = np.concatenate([chunk(gate, tp, rank), chunk(up, tp, rank)])
                assert np.array_equal(got["target", f"{at}shared_experts.gate_up_proj.{leaf}"], want)


def test_latent_attention_fuses_what_is_whole_and_divides_heads_among_attention_ranks() -> None:
    fleet = SGLang(model=replace(DSA, fp8_block=2), tp=4, dp=2)
    tensors = numbered(full_layout(fleet.model))
    at = "model.layers.0.self_attn."
    for rank in range(4):
        got = params(fleet.parts(rank), tensors)
        for leaf in ("weight", "weight_scale_inv"):
            want = [tensors[f"{at}q_a_proj.{leaf}"], tensors[f"{at}kv_a_proj_with_mqa.{leaf}"]]
            assert np.array_equal(got["target", f"{at}fused_qkv_a_proj_with_mqa.{leaf}"], np.concatenate(want))
            for name in ("q_b_proj", "kv_b_proj"):
                want_rows = chunk(tensors[f"{at}{name}.{leaf}"], 2, rank % 2)
                assert np.array_equal(got["target", f"{at}{name}.{leaf}"], want_rows)
        indexer = [tensors[f"{at}indexer.{part}.weight"] for part in ("wk", "weights_proj")]
        assert np.array_equal(got["target", f"{at}indexer.wk_weights_proj.weight"], np.concatenate(indexer))


@pytest.mark.parametrize(("tp", "rows"), [(1, 192), (2, 96), (3, 64), (8, 24)])
def test_the_vocabulary_is_padded_to_64_or_64_times_the_ranks(tp: int, rows: int) -> None:
    sizes = {"num_attention_heads": 24, "num_key_value_heads": 24, "intermediate_size": 48, "vocab_size": 190}
    fleet = SGLang(model=replace(DENSE, **sizes), tp=tp)
    tensors = numbered(full_layout(fleet.model))
    whole = [params(fleet.parts(rank), tensors)["target", "lm_head.weight"] for rank in range(tp)]
    assert {part.shape for part in whole} == {(rows, 32)}
    joined = np.concatenate(whole)
    assert np.array_equal(joined[:190], tensors["lm_head.weight"])
    assert not joined[190:].any()


def test_the_draft_layer_goes_to_the_draft_model_and_only_there() -> None:
    tensors = numbered(full_layout(GLM))
    without = params(SGLang(model=GLM, tp=2).parts(0), tensors)
    with_draft = params(SGLang(model=GLM, tp=2, draft=True).parts(0), tensors)
    draft = {name for model, name in with_draft if model == "draft"}
    assert {key for key in with_draft if key[0] == "target"} == set(without)
    assert {"model.eh_proj.weight", "model.enorm.weight", "model.shared_head.norm.weight"} <= draft
    assert {"model.decoder.self_attn.qkv_proj.weight", "model.decoder.mlp.experts.w13_weight"} <= draft
    assert all(name.startswith("model.") and ".layers." not in name for name in draft)


def test_a_cpu_engine_pads_the_mlp_of_every_rank() -> None:
    model = replace(DENSE, intermediate_size=40)
    tensors = numbered(full_layout(model))
    gate, up = (tensors[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    got = [
        params(SGLang(model=model, tp=2, on_gpu=False).parts(rank), tensors)[
            "target", "model.layers.0.mlp.gate_up_proj.weight"
        ]
        for rank in range(2)
    ]
    assert got[0].shape == got[1].shape == (64, 32)
    assert np.array_equal(got[0], np.concatenate([gate[:32], up[:32]]))
    assert np.array_equal(np.concatenate([got[1][:8], got[1][32:40]]), np.concatenate([gate[32:], up[32:]]))
    assert not got[1][8:32].any()


def test_megatron_interleaves_query_key_and_value_by_group_and_stacks_gate_above_up() -> None:
    trainer = Megatron(model=DENSE, tp=2, pp=2)
    tensors = numbered(full_layout(DENSE))
    at = "model.layers.3."
    heads = {part: tensors[f"{at}self_attn.{part}_proj.weight"].reshape(4, -1, 32) for part in "qkv"}
    interleaved = np.concatenate([heads[part] for part in "qkv"], axis=1)
    gate, up = (tensors[f"{at}mlp.{part}_proj.weight"] for part in ("gate", "up"))
    for tp in range(2):
        got = params(trainer.parts(2 + tp), tensors)  # the second stage counts layers 2 and 3 as 0 and 1
        qkv = got["target", "decoder.layers.1.self_attention.linear_qkv.weight"]
        assert np.array_equal(qkv, chunk(interleaved, 2, tp).reshape(-1, 32))
        fc1 = got["target", "decoder.layers.1.mlp.linear_fc1.weight"]
        assert np.array_equal(fc1, np.concatenate([chunk(gate, 2, tp), chunk(up, 2, tp)]))
        assert ("target", "embedding.word_embeddings.weight") not in got


def test_megatron_puts_experts_and_stages_where_its_ranks_are() -> None:
    trainer = Megatron(model=MOE, tp=2, pp=2, ep=2, etp=2, dp=2, layers_per_stage=(3, 1))
    blocks = trainer.layout().tensors["model.layers.3.mlp.experts.5.gate_proj.weight"].blocks
    assert [(block.box, block.ranks) for block in blocks] == [(((0, 8), (0, 32)), (6,)), (((8, 16), (0, 32)), (7,))]
    assert "decoder.layers.0.mlp.experts.linear_fc1.weight1" in {part.param for part in trainer.parts(6)}


def test_a_tied_embedding_is_held_by_the_first_and_the_last_stage() -> None:
    layout = Megatron(model=QWEN2, tp=1, pp=4).layout()
    assert layout.tensors["model.embed_tokens.weight"].blocks[0].ranks == (0, 3)
    assert "lm_head.weight" not in layout.tensors


def test_hybrid_ranks_of_all_replicas_hold_the_same_rows() -> None:
    blocks = fsdp_layout(DENSE, ranks=4, shard_ranks=2).tensors["model.norm.weight"].blocks
    assert [(block.box, block.ranks) for block in blocks] == [(((0, 16),), (0, 2)), (((16, 32),), (1, 3))]


def test_the_layout_of_a_running_engine_follows_from_its_server_info() -> None:
    info: dict[str, object] = {
        "tp_size": 4, "dp_size": 2, "ep_size": 4, "pp_size": 1, "enable_dp_attention": True, "enable_dp_lm_head": True,
        "moe_dense_tp_size": 1, "moe_a2a_backend": "deepep", "speculative_algorithm": "EAGLE", "model_path": "m",
        "speculative_draft_model_path": "m", "device": "cuda",
    }  # fmt: skip
    got = SGLang.from_server_info(info, model=MLA, engines=3)
    assert got == SGLang(
        model=MLA, engines=3, tp=4, dp=2, ep=4, dp_lm_head=True, replicate_dense_mlp=True,
        replicate_shared_experts=True, draft=True,
    )  # fmt: skip
    replicas = SGLang.from_server_info({"tp_size": 2, "dp_size": 2, "device": "cpu"}, model=DENSE, engines=3)
    assert replicas == SGLang(model=DENSE, engines=6, tp=2, on_gpu=False)
    with pytest.raises(ShardError, match="pp_size = 2 have no layout"):
        SGLang.from_server_info({"pp_size": 2}, model=DENSE)
    with pytest.raises(ShardError, match="redundant or rebalanced experts"):
        SGLang.from_server_info({"enable_eplb": True}, model=MLA)


@pytest.mark.parametrize("size", [1, 7, 8, 300])
@pytest.mark.parametrize("chunk_rows", [1, 3, 5, 64])
def test_scales_of_boxes_that_tile_a_weight_tile_its_scales(size: int, chunk_rows: int) -> None:
    spans = [(start, min(start + chunk_rows, size)) for start in range(0, size, chunk_rows)]
    scales = [scale_box((span,), 4)[0] for span in spans]
    assert [row for start, stop in scales for row in range(start, stop)] == list(range(-(-size // 4)))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SGLang(model=DENSE, tp=3), "attention heads: 8 cannot be divided among 3"),
        (lambda: SGLang(model=QWEN2, tp=4, dp=2), "no data-parallel attention for Qwen2ForCausalLM"),
        (lambda: SGLang(model=DENSE, tp=2, ep=2), "ep = 2 has no effect"),
        (lambda: SGLang(model=MOE, draft=True), "needs exactly one MTP layer; this model has 0"),
        (lambda: SGLang(model=MOE, fuse_shared_experts=True), "Only one shared expert can be fused"),
        (lambda: SGLang(model=FP8, on_gpu=False), "no layout for FP8 block scales"),
        (lambda: SGLang(model=replace(FP8, fp8_block=16), tp=8).layout(), "cut through FP8 blocks of 16"),
        (lambda: Megatron(model=DENSE, tp=8), "KV heads under tensor parallelism: 4 cannot be divided among 8"),
        (lambda: Megatron(model=DENSE, pp=2, layers_per_stage=(1, 1)), "2 stages and 2 layers; need 2 and 4"),
        (lambda: fsdp_layout(DENSE, ranks=4, shard_ranks=3), "4 cannot be divided among 3 ranks"),
        (lambda: replace(DENSE, architecture="X"), "No layout for `X`; known: LlamaForCausalLM"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(build: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(ShardError, match=message):
        build()


def test_a_hugging_face_config_gives_the_same_shape_as_the_preset() -> None:
    sizes = {
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "intermediate_size": 18432, "vocab_size": 129280, "n_routed_experts": 256,
        "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_shared_experts": 1, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_nextn_predict_layers": 1,
    }  # fmt: skip
    config: dict[str, object] = {**sizes, "architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "bfloat16"}
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert ModelShape.from_hf(config) == DEEPSEEK_V3
    with pytest.raises(ShardError, match="Only FP8 with square block scales"):
        ModelShape.from_hf({**config, "quantization_config": {"quant_method": "awq"}})
    with pytest.raises(ShardError, match="needs a whole number `hidden_size`, got None"):
        ModelShape.from_hf({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 8})
    del config["n_routed_experts"]
    with pytest.raises(ShardError, match="needs `n_routed_experts` or `num_experts`"):
        ModelShape.from_hf(config)
    assert ModelShape.from_hf({**config, "num_local_experts": 256}) == DEEPSEEK_V3


def parameters(model: ModelShape) -> int:
    main = (t for t in model.tensors() if t.layer is None or t.layer < model.num_hidden_layers)
    return sum(math.prod(t.shape) for t in main if t.weight_shape is None)


def test_presets_have_the_published_number_of_parameters() -> None:
    assert parameters(QWEN3_235B_A22B) == pytest.approx(235.1e9, rel=1e-3)
    assert parameters(DEEPSEEK_V3) == pytest.approx(671.0e9, rel=1e-3)
    assert parameters(KIMI_K2) == pytest.approx(1.03e12, rel=5e-3)
    assert parameters(GLM_5) == pytest.approx(744e9, rel=2e-3)


SLOW = {"deepseek-v3", "kimi-k2"}  # a million copies and more


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in PRESETS]
)
def test_senders_and_receivers_of_presets_are_balanced(name: str) -> None:
    plan = make_plan(*PRESETS[name]().layouts())
    assert plan.bytes_moved == plan.bytes_needed
    assert plan.sender_max_over_mean <= 1.05
    assert plan.receiver_max_over_mean <= 1.05
