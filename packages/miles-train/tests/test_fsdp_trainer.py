"""One rank: numbers equal Transformers', normalisations their closed form, checkpoints the run they came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from miles_tito import Sample
from miles_train import (
    Batch,
    BatchError,
    ConfigError,
    FSDPConfig,
    LossConfig,
    NumericsError,
    OptimizerConfig,
    RankError,
    ScheduleConfig,
    TrainConfig,
    UnsupportedModel,
    batches_of,
    create_trainer,
    score,
    sft_sample,
)
from miles_train.fsdp import FSDPTrainer
from miles_train.losses import (
    AnyLoss,
    CustomLoss,
    LossFn,
    LossInputs,
    LossSettings,
    TokenLoss,
    kl_estimate,
    needs,
    policy_loss,
)
from transformers import AutoModelForCausalLM

SGD_LIKE = OptimizerConfig(lr=1e-2, max_grad_norm=None)


def config(**changes: object) -> TrainConfig:
    known = {"threads": 1, "device": "cpu", "token_budget": 64, "optimizer": SGD_LIKE}
    return TrainConfig(**(known | changes))  # pyright: ignore[reportArgumentType]


def ready(path: Path, settings: TrainConfig) -> FSDPTrainer:
    trainer = FSDPTrainer(path)
    trainer.setup(settings)
    return trainer


def weights(trainer: FSDPTrainer) -> dict[str, torch.Tensor]:
    return {shard.name: shard.tensor.clone() for shard in trainer.shards()}


def gradient(path: Path, samples: list[Sample], settings: TrainConfig) -> dict[str, torch.Tensor]:
    """The gradient that the optimizer would see."""
    return gradient_of(ready(path, settings), batches_of(samples, settings))


def gradient_of(trainer: FSDPTrainer, batches: list[Batch]) -> dict[str, torch.Tensor]:
    state = trainer._ready()
    caught: dict[str, torch.Tensor] = {}

    def step() -> dict[str, float]:
        caught.update({n: p.grad.clone() for n, p in state.model.lm.named_parameters() if p.grad is not None})
        return {}

    state.optimizer.step = step  # pyright: ignore[reportAttributeAccessIssue]
    trainer.train(batches)
    return caught


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], *, rtol: float = 1e-4, atol: float = 1e-6):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=atol)


def dense_logprobs(path: Path, sample: Sample) -> torch.Tensor:
    """[T - 1] log-probs by Transformers itself, one row at a time."""
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))
    logits = lm(tokens[None]).logits[0, :-1] / sample.temperature
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


@pytest.fixture
def samples(sample) -> list[Sample]:
    return [sample("a", 7), sample("b", 31), sample("c", 12, seed=2), sample("d", 30, temperature=0.6)]


@pytest.mark.parametrize("model", ["qwen3", "llama"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_log_probs_equal_those_of_transformers_at_the_sampling_temperature(model, layout, samples, request):
    path = request.getfixturevalue(model)
    settings = config(fsdp=FSDPConfig(layout=layout), token_budget=128, logit_chunk_mb=1)
    trainer = ready(path, settings)
    (batch,) = batches_of(samples, settings)
    (scored,) = score(trainer, batch)
    (m,) = batch.micro_batches
    for row, s in enumerate(samples):
        got = scored[m.cu_seqlens[row] : m.cu_seqlens[row + 1]]
        wanted = dense_logprobs(path, s).detach().numpy()
        np.testing.assert_allclose(got[s.loss_mask], wanted[s.loss_mask[1:]], rtol=0, atol=1e-5)
        assert not got[~s.loss_mask].any()


@pytest.mark.parametrize("family", ["mistral", "granite", "qwen3_moe", "gpt2"])
def test_other_families_are_scored_as_transformers_scores_them(family, samples, tmp_path, make_model):
    """A window shorter than the rows, scaled logits, routed experts, learned positions with dropout."""
    path = make_model(tmp_path, family=family)
    settings = config(token_budget=128)
    trainer = ready(path, settings)
    (batch,) = batches_of(samples, settings)
    (scored,) = score(trainer, batch)
    (m,) = batch.micro_batches
    for row, s in enumerate(samples):
        got = scored[m.cu_seqlens[row] : m.cu_seqlens[row + 1]]
        wanted = dense_logprobs(path, s).detach().numpy()
        np.testing.assert_allclose(got[s.loss_mask], wanted[s.loss_mask[1:]], rtol=0, atol=2e-5)
    before = weights(trainer)
    trainer.train(batch)
    assert all(not torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())


@pytest.mark.parametrize("normalization", ["episode", "token", "dr_grpo"])
def test_the_gradient_is_that_of_the_closed_form_and_ignores_the_split(normalization, qwen3, sample):
    """Faults A06, A11: lengths 1 and 9, half masked; one micro-batch against four."""
    one = sample("one", 4, prompt=3)
    nine = sample("nine", 22, loss_mask=np.arange(22) % 2 == 1)
    both = [sample(n, 10, prompt=4, seed=i, episode_id="both", loss_denominator=12) for i, n in enumerate("xy")]
    samples = [one, nine, *both]
    loss = LossConfig(normalization=normalization, max_tokens=32, clip_low=0.99, clip_high=1e6)

    lm = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    total = torch.zeros(())
    for s in samples:
        tokens, mask = torch.from_numpy(s.tokens.astype(np.int64)), torch.from_numpy(s.loss_mask[1:].copy())
        logp = lm(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        ratio = (logp - torch.from_numpy(s.logprobs[1:].copy())).exp()
        share = {"episode": 1 / (3 * s.loss_denominator), "token": 1 / 24, "dr_grpo": 1 / (3 * 32)}[normalization]
        total = total - (ratio * mask).sum() * s.advantage * share
    total.backward()
    expected = {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}

    for budget in (64, 22):
        got = gradient(qwen3, samples, config(token_budget=budget, loss=loss))
        assert_same(got, expected)


@pytest.mark.parametrize(
    "change",
    [
        {"fsdp": FSDPConfig(layout="padded")},
        {"fsdp": FSDPConfig(activation_checkpointing=True)},
        {"logit_chunk_mb": 4096},
    ],
)
def test_how_the_model_is_run_does_not_change_the_gradient(change, qwen3, samples):
    assert_same(gradient(qwen3, samples, config(**change)), gradient(qwen3, samples, config()))


def test_siblings_share_the_computation_of_their_prompt_and_not_the_gradient(qwen3, sample):
    prompt = np.arange(20) % 7
    siblings = [
        sample(f"s{i}", 28, prompt=20, tokens=np.concatenate([prompt, np.arange(8) * i % 67]).astype(np.int32), seed=i)
        for i in range(4)
    ]
    assert_same(
        gradient(qwen3, siblings, config(token_budget=128)),
        gradient(qwen3, siblings, config(token_budget=128, fsdp=FSDPConfig(layout="padded"))),
    )


def built_in_copied(inputs: LossInputs) -> TokenLoss:
    return policy_loss(inputs, clip_low=0.2, clip_high=0.28)


def test_the_built_in_loss_copied_as_a_custom_one_gives_the_same_gradient(qwen3, samples):
    """Fault A07."""
    copied = gradient(qwen3, samples, config(loss=LossConfig(kind=f"{__name__}:built_in_copied")))
    assert_same(copied, gradient(qwen3, samples, config()), rtol=0, atol=0)


def averaged(inputs: LossInputs) -> TokenLoss:
    return TokenLoss(inputs.logprobs.mean())


def test_a_custom_loss_that_averages_by_itself_is_refused(qwen3, samples):
    trainer = ready(qwen3, config(loss=LossConfig(kind=f"{__name__}:averaged")))
    with pytest.raises(BatchError, match="one unweighted loss for each"):
        trainer.train(batches_of(samples, config()))


def test_a_nan_at_a_masked_position_changes_nothing(qwen3, sample):
    """Fault A09."""
    clean = sample("a", 9)
    noisy = sample("a", 9, logprobs=np.where(clean.loss_mask, clean.logprobs, np.nan))
    assert_same(gradient(qwen3, [noisy], config()), gradient(qwen3, [clean], config()), rtol=0, atol=0)


def broken(inputs: LossInputs) -> TokenLoss:
    loss = -inputs.logprobs * inputs.advantages
    return TokenLoss(torch.where(inputs.rows == 1, loss * float("nan"), loss))


def test_a_nan_at_a_trained_position_stops_before_the_step_and_names_the_sample(qwen3, samples):
    settings = config(token_budget=128, loss=LossConfig(kind=f"{__name__}:broken"))
    trainer = ready(qwen3, settings)
    before = weights(trainer)
    with pytest.raises(NumericsError, match=r"loss of sample b, position 3 is nan \(28 of \d+ tokens"):
        trainer.train(batches_of(samples, settings))
    assert_same(weights(trainer), before, rtol=0, atol=0)
    assert trainer.version == 0


def exploding(inputs: LossInputs) -> TokenLoss:
    return TokenLoss((inputs.logprobs - inputs.logprobs.detach() + 1).sqrt() * 3e38)


def test_a_gradient_that_is_not_finite_stops_or_is_skipped_and_counted(qwen3, samples):
    own = LossConfig(kind=f"{__name__}:exploding")
    trainer = ready(qwen3, config(loss=own))
    with pytest.raises(NumericsError, match=r"gradient norm of optimizer step 1 is (inf|nan)"):
        trainer.train(batches_of(samples, config()))

    settings = config(optimizer=replace(SGD_LIKE, skip_nonfinite=True), loss=own)
    trainer = ready(qwen3, settings)
    before = weights(trainer)
    result = trainer.train(batches_of(samples, settings))
    assert result.metrics["optimizer/skipped"] == 1
    assert_same(weights(trainer), before, rtol=0, atol=0)


def test_a_step_equals_adamw_on_the_whole_model_with_clipping_and_schedule(qwen3, samples):
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.01)
    schedule = ScheduleConfig(kind="linear", warmup_steps=2, total_steps=4)
    settings = config(optimizer=optimizer, schedule=schedule, token_budget=128)
    grads = gradient(qwen3, samples, settings)
    trainer = ready(qwen3, settings)
    result = trainer.train(batches_of(samples, settings))

    norm = torch.stack([g.norm() for g in grads.values()]).norm().item()
    assert result.metrics["optimizer/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert result.metrics["optimizer/lr"] == pytest.approx(5e-3)
    lm = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    decayed = [p for p in lm.parameters() if p.ndim >= 2]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in lm.parameters() if p.ndim < 2]}],
        lr=5e-3,
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    for name, p in lm.named_parameters():
        p.grad = grads[name] * (0.01 / norm)
    adamw.step()
    assert_same(weights(trainer), {n: p.detach() for n, p in lm.named_parameters()}, rtol=1e-5, atol=1e-6)


def test_metrics_cover_loss_tokens_only_and_split_the_gap_by_version(qwen3, sample):
    """Fault A12, and the gap that asynchronous training watches."""
    settings = config(token_budget=128)
    trainer = ready(qwen3, settings)
    old, new = sample("old", 12, version=-1), sample("new", 9, seed=1, version=0)
    exact = dense_logprobs(qwen3, new).detach().numpy()
    new = replace(new, logprobs=np.concatenate([[0], exact]) * new.loss_mask)
    result = trainer.train(batches_of([old, new], settings))
    m = result.metrics

    gap = np.abs(dense_logprobs(qwen3, old).detach().numpy() - old.logprobs[1:])[old.loss_mask[1:]]
    assert result.version == 1
    assert m["batch/loss_tokens"] == 15
    assert m["batch/tokens"] == 21
    assert m["logprob_gap/mean"] == pytest.approx(gap.sum() / 15, rel=1e-4)
    assert m["logprob_gap/max"] == pytest.approx(gap.max(), rel=1e-4)
    assert m["logprob_gap/version_unknown"] == pytest.approx(gap.mean(), rel=1e-4)
    assert m["logprob_gap/version_0"] < 1e-5
    assert m["logprob_gap/same_version_max"] < 1e-5
    assert 0 < m["ratio/ess"] <= 1
    assert 0 < m["entropy/mean"] < np.log(67)


def test_minibatches_take_several_steps_against_one_old_policy(qwen3, samples):
    loss = LossConfig(old_logprobs="trainer", tis_cap=2.0)
    settings = config(minibatches=2, loss=loss)
    trainer = ready(qwen3, settings)
    batches = batches_of(samples, settings)
    assert len(batches) == 2
    result = trainer.train(batches)
    assert result.version == 1
    assert trainer._ready().optimizer.num_steps == 2
    assert result.metrics["ratio/mean"] != pytest.approx(1.0, abs=1e-5), "the second step is off-policy"
    assert "logprob_gap/same_version_max" in result.metrics

    single = config(loss=loss)
    result = ready(qwen3, single).train(batches_of(samples, single))
    assert result.metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-6)


def test_the_kl_term_pulls_back_to_the_initial_model(qwen3, samples):
    settings = config(loss=LossConfig(kl_coef=1.0, kl_estimator="k2"))
    trainer = ready(qwen3, settings)
    first = trainer.train(batches_of(samples, settings))
    assert first.metrics["loss/kl"] == pytest.approx(0, abs=1e-9)
    neutral = batches_of([replace(s, advantage=0.0) for s in samples], settings)
    distances = [trainer.train(neutral).metrics["loss/kl"] for _ in range(4)]
    assert distances[0] > 1e-4
    assert distances[-1] < 0.5 * distances[0]

    with pytest.raises(ConfigError, match="no reference model"):
        score(ready(qwen3, config()), batches_of(samples, config())[0], model="reference")


def test_supervised_samples_are_learned_in_the_same_loop(qwen3):
    settings = config(loss=LossConfig(kind="sft", normalization="token"))
    trainer = ready(qwen3, settings)
    demos = [sft_sample(f"d{i}", [1, 2, 3, 10 + i, 5, 6], np.arange(6) > 2) for i in range(4)]
    losses = [trainer.train(batches_of(demos, settings)).metrics["loss/total"] for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    last = trainer.train(batches_of(demos, settings)).metrics
    assert last["loss/nll"] == pytest.approx(last["loss/total"], rel=1e-5)
    assert not [name for name in last if name.startswith(("ratio/", "logprob_gap/"))]


@needs("reference", "old_logprobs")
def near_the_reference(inputs: LossInputs, *, coef: float) -> TokenLoss:
    assert inputs.ref_logprobs is not None
    return TokenLoss(coef * kl_estimate(inputs.logprobs, inputs.ref_logprobs, estimator="k2"))


def plain(inputs: LossInputs, *, coef: float = 1.0) -> TokenLoss:
    assert inputs.ref_logprobs is None
    assert inputs.entropy is None
    return TokenLoss(-coef * inputs.logprobs * inputs.advantages)


def test_a_loss_of_ones_own_takes_arguments_and_gets_what_it_needs(qwen3, samples):
    def kl_gradient(loss: AnyLoss) -> dict[str, torch.Tensor]:
        """After a step that moved the weights away from the reference."""
        settings = config(loss=loss)
        trainer = ready(qwen3, settings)
        with torch.no_grad():
            for parameter in trainer._ready().model.parameters():
                parameter.mul_(1.01)
        return gradient_of(trainer, batches_of([replace(s, advantage=0.0) for s in samples], settings))

    own = CustomLoss(kind=f"{__name__}:near_the_reference", args={"coef": 3.0})
    built_in = LossConfig(kl_coef=3.0, kl_estimator="k2", old_logprobs="trainer")
    assert_same(kl_gradient(own), kl_gradient(built_in))


def test_only_what_a_loss_needs_is_computed(qwen3, samples):
    settings = config(loss=CustomLoss(kind=f"{__name__}:plain", args={"coef": 0.5}, log_entropy=False))
    trainer = ready(qwen3, settings)
    assert trainer._ready().reference is None
    assert "entropy/mean" not in trainer.train(batches_of(samples, settings)).metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubled(LossSettings):
    """A kind of loss in one place: its settings, what it needs, its function."""

    kind: Literal["doubled"] = "doubled"
    factor: float = 2.0

    def function(self) -> LossFn:
        return partial(plain, coef=self.factor)


def test_a_new_kind_of_loss_is_its_settings_and_its_function(qwen3, samples):
    doubled = gradient(qwen3, samples, config(loss=Doubled(log_entropy=False)))
    once = gradient(qwen3, samples, config(loss=Doubled(factor=1.0, log_entropy=False)))
    assert_same(doubled, {name: 2 * grad for name, grad in once.items()}, rtol=1e-5)


@pytest.mark.parametrize("model", ["qwen3", "llama"])
def test_an_exported_folder_loads_in_transformers_with_the_trained_weights(model, samples, tmp_path, request):
    trainer = ready(request.getfixturevalue(model), config())
    trainer.train(batches_of(samples, config()))
    trainer.export_hf(tmp_path / "hf")
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert_same({n: p.detach() for n, p in lm.named_parameters()}, weights(trainer), rtol=0, atol=0)
    assert (tmp_path / "hf" / "tokenizer_config.json").is_file()
    assert (lm.lm_head.weight is lm.model.embed_tokens.weight) == (model == "qwen3")


def test_tied_weights_are_sent_once_under_the_name_of_the_embedding(qwen3, llama):
    names = [shard.name for shard in ready(qwen3, config()).shards()]
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names))
    untied = {shard.name: shard for shard in ready(llama, config()).shards()}
    head = untied["lm_head.weight"]
    assert (head.global_shape, head.box, head.dtype) == ((67, 36), ((0, 67), (0, 36)), "float32")


def test_fused_experts_are_sent_one_by_one_as_the_checkpoint_has_them(make_model, tmp_path):
    from safetensors.torch import load_file

    trainer = ready(make_model(tmp_path, family="qwen3_moe"), config())
    got = weights(trainer)
    assert_same(got, load_file(tmp_path / "model.safetensors"), rtol=0, atol=0)
    assert got["model.layers.1.mlp.experts.3.up_proj.weight"].shape == (20, 36)

    unknown = ready(make_model(tmp_path / "mixtral", family="mixtral"), config())
    with pytest.raises(UnsupportedModel, match=r"block_sparse_moe.*Update the engine from an exported folder"):
        list(unknown.shards())


def test_what_does_not_fit_the_model_is_refused_with_the_place(qwen3, sample, tmp_path):
    trainer = ready(qwen3, config())
    foreign = sample("foreign", 6, tokens=np.array([1, 2, 3, 4, 99, 5], dtype=np.int32))
    with pytest.raises(BatchError, match=r"Token 99 of sample foreign, position 4 lies outside .* of 67"):
        trainer.train(batches_of([foreign], config()))
    other = config(loss=LossConfig(normalization="token"))
    with pytest.raises(ConfigError, match=r'normalization "token" but `loss\.normalization` is "episode"'):
        trainer.train(batches_of([sample("a", 6)], other))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        ready(tmp_path, config())
    with pytest.raises(RankError, match="call setup"):
        FSDPTrainer(qwen3).train(batches_of([sample("a", 6)], config()))


def test_a_model_that_caps_its_logits_is_refused(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    Gemma2ForCausalLM(Gemma2Config(**shape, num_attention_heads=2, num_key_value_heads=1)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="final_logit_softcapping"):
        ready(tmp_path, config())


def test_sleep_frees_the_gradients_and_wake_goes_on_as_before(qwen3, samples):
    batches = batches_of(samples, config())
    trainer, twin = ready(qwen3, config()), ready(qwen3, config())
    for t in (trainer, twin):
        t.train(batches)
    trainer.sleep()
    with pytest.raises(RankError, match="call wake"):
        trainer.train(batches)
    trainer.wake()
    trainer.wake()
    trainer.sleep(keep=frozenset({"weights"}))
    assert score(trainer, batches_of(samples, config())[0])
    assert list(trainer.shards())
    with pytest.raises(RankError, match="call wake"):
        trainer.train(batches_of(samples, config()))
    trainer.wake()
    for t in (trainer, twin):
        t.train(batches)
    assert_same(weights(trainer), weights(twin), rtol=0, atol=0)


def test_the_model_can_be_prepared_before_it_is_sharded(qwen3, samples):
    def freeze_embeddings(lm: torch.nn.Module) -> None:
        lm.get_parameter("model.embed_tokens.weight").requires_grad_(False)

    trainer = create_trainer(config(), model_path=qwen3)
    layout = trainer.setup(config(), prepare_model=freeze_embeddings)
    assert layout.vocab_size == 67
    before = weights(trainer)
    trainer.train(batches_of(samples, config()))
    after = weights(trainer)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert "model.embed_tokens.weight" not in changed
    assert len(changed) == len(before) - 1
    trainer.close()
