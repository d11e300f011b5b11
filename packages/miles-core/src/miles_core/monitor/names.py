"""The catalogue of metric names: `part/what`, with `/mean`-like endings left to what is averaged.

A name that ends in `*` stands for a family whose members are named at run time. Metrics outside the catalogue are
recorded all the same and drawn in the report under "More".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

METRICS: Final[dict[str, str]] = {
    "reward/mean": "Mean reward of the episodes trained in this step",
    "reward/all_mean": "Mean reward of every episode finished since the last step, filtered and stale ones included",
    "reward/std": "Standard deviation of reward over those episodes",
    "reward/min": "Smallest reward of the step",
    "reward/max": "Largest reward of the step",
    "reward/groups_all_low": "Share of finished groups whose episodes all got the lowest reward seen so far",
    "reward/groups_all_high": "Share of finished groups whose episodes all got the highest reward seen so far",
    "reward/group_std": "Standard deviation of reward within a group, averaged over groups",
    "eval/score": "Mean held-out reward of this version's weights",
    "eval/stderr": "Standard error of `eval/score`",
    "eval/score_low": "Lower end of its 95 % confidence interval, clustered by prompt",
    "eval/score_high": "Upper end of the same",
    "eval/pass@*": "Share of held-out prompts that at least one of so many samples solves, with `_low` and `_high`",
    "eval/episodes": "Held-out episodes",
    "eval/prompts_without_score": "Held-out prompts none of whose episodes has a reward",
    "eval/failed": "Share of held-out episodes without a reward",
    "eval/skipped": "Datasets, or whole evaluations, without a score; the log and the ledger say why",
    "eval/lag_steps": "Steps that training went on until the score was there",
    "eval/seconds": "Seconds from the moment the evaluation was due to its end",
    "eval/*": "The same of one dataset (`eval/<dataset>/score`), or what an environment or evaluation reports itself",
    "env/*": "A metric of the environment, averaged over the episodes that report it",
    "env/*_coverage": "Share of episodes that report the metric, given where it is below 1",
    "episode/tokens": "Sampled tokens of an episode, mean",
    "episode/tokens_max": "Sampled tokens of an episode, maximum",
    "episode/length": "All tokens of a trajectory, prompt and tool results included, mean",
    "episode/turns": "Model calls of an episode, mean",
    "episode/seconds": "Wall time of an episode, mean",
    "episode/seconds_max": "Wall time of an episode, maximum",
    "episode/truncated": "Share of episodes in which a turn hit the token limit",
    "episode/failed": "Share of episodes without a reward",
    "staleness/mean": "Versions between an episode's oldest token and the weights it trains, mean",
    "staleness/max": "The same, maximum; never above `rollout.max_staleness`",
    "logprob_gap/mean": "|log p(trainer) - log p(engine)| over trained tokens, mean",
    "logprob_gap/max": "The same, maximum",
    "logprob_gap/same_version_max": "Maximum over tokens sampled under the very weights that score them: pure numerics",
    "logprob_gap/same_version_mean": "Mean over the same tokens",
    "logprob_gap/version_*": "Mean over the tokens that this weight version sampled",
    "loss/total": "The loss that was minimised, summed with the weights of its tokens",
    "loss/*": "A term of the loss before weighting, mean over trained tokens: policy, kl, nll, …",
    "ratio/mean": "Importance ratio of the new to the old policy, mean over trained tokens",
    "ratio/max": "The same, maximum",
    "ratio/approx_kl": "Estimate of the KL divergence between them, in nats a token",
    "ratio/clip_fraction": "Share of trained tokens whose ratio was clipped",
    "ratio/dual_clip_fraction": "Share of trained tokens whose loss the dual clip bounded",
    "ratio/engine_mean": "Ratio of the trainer's probability to the engine's, mean over trained tokens",
    "ratio/ess": "Effective sample size of those ratios, as a share of the tokens",
    "ratio/tis_weight": "Truncated weight that corrects for the engine's probabilities, mean",
    "ratio/tis_truncated_fraction": "Share of trained tokens whose weight was truncated",
    "ratio/*": "Another figure of importance ratios",
    "entropy/mean": "Entropy of the policy over trained tokens, in nats",
    "optimizer/lr": "Learning rate of this step",
    "optimizer/grad_norm": "Gradient norm before clipping",
    "optimizer/skipped": "1 where the update was skipped because its gradient was not finite",
    "batch/episodes": "Episodes in the batch",
    "batch/tokens": "Tokens in the batch",
    "batch/loss_tokens": "Trained tokens in the batch",
    "batch/micro_batches": "Micro-batches that the batch was packed into, over all ranks",
    "time/step": "Seconds of the whole step",
    "time/take_wait": "Seconds that the trainer waited for groups",
    "time/train": "Seconds of forward, backward and optimizer",
    "time/sync": "Seconds to put the new weights into every engine",
    "time/checkpoint": "Seconds that training stood still to copy what a checkpoint holds",
    "time/checkpoint_wait": "Seconds that it waited before for the last checkpoint to be written",
    "time/on_step": "Seconds of evaluation and bookkeeping after the step",
    "engine/tokens_per_s": "Tokens that all engines sampled a second",
    "engine/utilisation": "Share of the step in which the engines generated",
    "engine/serving": "Engines that get requests",
    "engine/suspect": "Engines among them that missed probes",
    "engine/given_up": "Engines that failed too often and stay out of the run",
    "engine/restarts": "Restarts of engines so far",
    "engine/paused_seconds": "Seconds so far in which no engine served",
    "engine/resent": "Requests sent again so far, after a broken connection or a dead engine",
    "engine/swallowed": "Requests so far that an engine accepted and lost",
    "trainer/utilisation": "Share of the step in which the trainer trained",
    "trainer/step_seconds": "Seconds of forward, backward and optimizer as the first rank measured them",
    "sync/total_seconds": "Seconds of the weight update, as the trainer measured them",
    "sync/pause_seconds": "From the pause request until generation went on, on the engine that paused longest",
    "sync/*_seconds": "Of one phase on the slowest engine: pause, write, send, load, verify, resume",
    "sync/bytes": "Bytes of weights staged, once for all engines",
    "sync/retries": "1 where an engine needed a second try",
    "sync/failed_engines": "Engines that did not take the update, and were restarted",
    "sync/*": "Another figure of the weight update",
    "buffer/queued": "Finished groups that wait to be trained",
    "buffer/running": "Groups whose episodes run",
    "buffer/taken": "Groups that a step holds",
    "buffer/credits_used": "Groups issued and not yet trained or discarded",
    "buffer/credits": "The bound on them",
    "buffer/finished": "Groups finished since the last step",
    "buffer/discard_rate": "Groups discarded since the last step, as a share of those finished",
    "buffer/discarded/*": "Groups discarded since the last step for this reason",
    "buffer/masked_episodes": "Episodes in the batch that were too old and counted for the baseline alone",
    "buffer/take_wait_s": "Seconds that the buffer let the trainer wait",
    "buffer/staleness_mean": "Versions between a group's oldest token and the weights, when it was taken, mean",
    "buffer/staleness_max": "The same, maximum",
    "buffer/*": "Another figure of the group buffer",
    "worker/*": "A figure of the workers: episodes running, retried, abandoned",
    "fate/issued": "Groups issued so far",
    "fate/trained": "Groups trained so far",
    "fate/filtered": "Groups dropped by the filter so far",
    "fate/stale": "Groups dropped as too old so far",
    "fate/failed": "Groups given up on after their attempts so far",
    "fate/aborted": "Groups given up on by the end of the run so far",
    "fate/in_flight": "Groups issued and without a terminal fate",
}


def describe(name: str) -> str | None:
    """The catalogue's line for `name`, None for a metric that it does not know."""
    if name in METRICS:
        return METRICS[name]
    families = sorted((n for n in METRICS if "*" in n), key=len, reverse=True)
    return next((METRICS[family] for family in families if _matches(family, name)), None)


def markdown_table(names: Iterable[str] = METRICS) -> str:
    """The catalogue as a Markdown table."""
    return "\n".join(["| metric | meaning |", "|---|---|", *(f"| `{name}` | {METRICS[name]} |" for name in names)])


def _matches(family: str, name: str) -> bool:
    start, end = family.split("*")
    return len(name) > len(start) + len(end) and name.startswith(start) and name.endswith(end)
