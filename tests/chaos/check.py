"""The invariants of a run, held against what it left on disk and against what the scripts saw.

Nothing here asks the ledger's own proof but the last check: the ledger's tables are read as rows.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from miles_core.durable.ledger.overview import verify
from miles_rollout.fates import Fate
from miles_rollout.prompts import PromptStream

from .evidence import Evidence, Problem

FINAL = frozenset(fate.value for fate in Fate if fate.is_final)


def check(evidence: Evidence) -> list[Problem]:
    """Every invariant that a finished run breaks."""
    checks: tuple[Callable[[Evidence], Iterator[Problem]], ...] = (
        _steps_are_complete,
        _nothing_is_trained_twice,
        _ledger_and_weights_agree,
        _every_group_has_one_fate,
        _credits_are_kept,
        _nothing_trained_is_too_old,
        _no_attempt_runs_twice,
        _what_is_finished_runs_no_more,
        _prompts_come_in_order,
        _what_ran_is_taken_up,
        _nothing_is_lost_to_its_length,
        _metrics_have_one_row_a_step,
        _the_ledger_agrees,
    )
    return [problem for each in checks for problem in each(evidence)]


def _steps_are_complete(run: Evidence) -> Iterator[Problem]:
    steps, size = run.config.run.steps, run.config.rollout.groups_per_step
    if run.final.version != steps:
        yield Problem(text=f"The exported weights are version {run.final.version}, trained were to be {steps} steps.")
    counts = Counter(version for version, _, _ in run.final.groups)
    for version in range(1, steps + 1):
        if counts[version] != size:
            yield Problem(
                text=f"Step {version} of the exported weights has {counts[version]} groups instead of {size}."
            )


def _nothing_is_trained_twice(run: Evidence) -> Iterator[Problem]:
    for what, ids in (
        ("Group", [group for _, group, _ in run.final.groups]),
        ("Trajectory", [row[5] for row in run.final.rows]),
    ):
        for name, count in Counter(ids).items():
            if count > 1:
                yield Problem(text=f"{what} {name} was trained {count} times.", group=name if what == "Group" else None)
    steps_of: defaultdict[str, set[int]] = defaultdict(set)
    for version, _, group, episode, *_ in run.final.rows:
        steps_of[episode].add(version)
        if len(steps_of[episode]) > 1:
            yield Problem(text=f"Episode {episode} was trained in steps {sorted(steps_of[episode])}.", group=group)


def _ledger_and_weights_agree(run: Evidence) -> Iterator[Problem]:
    """What the exported weights were trained on is what the ledger calls trained."""
    lineage = {group: version for version, group, _ in run.final.groups}
    for group, fate in run.fates.items():
        if (fate == Fate.TRAINED) != (group in lineage):
            weights = (
                f"step {lineage[group]} of the weights has it" if group in lineage else "the weights do not have it"
            )
            yield Problem(text=f"The ledger calls group {group} {fate}, but {weights}.", group=group)
    for group in lineage.keys() - run.fates.keys():
        yield Problem(text=f"The weights were trained on group {group}, which the ledger does not know.", group=group)
    steps = run.rows(
        "SELECT version, group_id FROM steps JOIN step_groups USING (step) JOIN groups USING (number) "
        "WHERE dropped_start IS NULL"
    )
    for version, group in steps:
        if lineage.get(group) not in (None, version):
            yield Problem(
                text=f"Group {group}: step {version} in the ledger, {lineage[group]} in the weights.", group=group
            )


def _every_group_has_one_fate(run: Evidence) -> Iterator[Problem]:
    final: Counter[str] = Counter()
    for group, what in run.changes:
        final[group] += what in FINAL
        final[group] -= what == "returned"
        if final[group] not in (0, 1):
            yield Problem(text=f"Group {group} has {final[group]} final fates at its change to {what}.", group=group)
    for group, fate in run.fates.items():
        if fate not in FINAL:
            yield Problem(text=f"The run is over but group {group} is {fate}.", group=group)
        if final[group] != 1:
            yield Problem(text=f"Group {group} ended with {final[group]} final fates.", group=group)
    counts = Counter(run.fates.values())
    if len(run.fates) != sum(counts[fate] for fate in FINAL):
        yield Problem(text=f"{len(run.fates)} groups were issued, and their fates are {dict(counts)}.")
    ran = {fields["group"] for _, fields in run.record.entries("run")}
    for group in sorted(ran - run.fates.keys()):
        yield Problem(text=f"Group {group} ran, but the ledger never issued it.", group=group)


def _credits_are_kept(run: Evidence) -> Iterator[Problem]:
    """Never more open groups than credits; a rewind may return groups while others run, and then nothing is issued."""
    credits, is_open = run.config.rollout.num_credits, set[str]()
    for group, what in run.changes:
        if what in FINAL:
            is_open.discard(group)
            continue
        is_open.add(group)
        if what == "issued" and len(is_open) > credits:
            yield Problem(
                text=f"{len(is_open)} groups were open at the issue of {group}, with {credits} credits.", group=group
            )
            return


def _nothing_trained_is_too_old(run: Evidence) -> Iterator[Problem]:
    """By the way through the tree of weights from those that sampled a token to those that it trained."""
    rollout = run.config.rollout
    if "keep" in (rollout.put_policy, rollout.take_policy):
        return
    for version, trained_from, group, episode, _, _, sampled_by in run.final.rows:
        for node in sampled_by:
            age = run.weights.distance(node, trained_from)
            if age > rollout.max_staleness:
                yield Problem(
                    text=f"Step {version} trained episode {episode} on a token that is {age} steps away from its "
                    f"weights (limit {rollout.max_staleness}): weights {node}, which were version "
                    f"{run.weights.version(node)}, sampled it.",
                    group=group,
                )


def _no_attempt_runs_twice(run: Evidence) -> Iterator[Problem]:
    """A session is opened once: an attempt's number is never used again, whatever died."""
    if run.faults()["full_ledger"]:
        return  # what ran beside the ledger's failure it could not record
    names = (fields["session"] for _, fields in run.record.entries("opened"))
    opened = Counter(name for name in names if name.split("-")[0] in run.fates)
    for session, count in opened.items():
        if count > 1:
            yield Problem(text=f"Session {session} was opened {count} times.", group=session.split("-")[0])


def _what_is_finished_runs_no_more(run: Evidence) -> Iterator[Problem]:
    """What is in the ledger with its result is never sampled again; what runs again has a higher attempt."""
    attempts: dict[str, int] = {}
    could_record = not run.faults()["full_ledger"]
    for _, fields in run.record.entries("run"):
        group, attempt = fields["group"], fields["attempt"]
        if could_record and attempt <= attempts.get(group, -1):
            yield Problem(text=f"Group {group} ran as attempt {attempt} after attempt {attempts[group]}.", group=group)
        attempts[group] = attempt
    results: Counter[str] = Counter()
    for row in run.final.rows:
        results[row[3]] = max(results[row[3]], row[4])
    for episode, attempt in results.items():
        group = episode.split("/")[0]
        if attempt < attempts.get(group, 0):
            yield Problem(
                text=f"Episode {episode} was trained with the result of attempt {attempt}, but its group ran again as "
                f"attempt {attempts[group]}.",
                group=group,
            )


def _prompts_come_in_order(run: Evidence) -> Iterator[Problem]:
    """Crashes neither skip nor repeat a prompt: what was issued is the stream, retries of stale groups aside."""
    stream = PromptStream(run.prompts, seed=run.config.run.seed)
    issued = run.rows("SELECT group_id, prompt_id, retry_of FROM groups ORDER BY number")
    for group, prompt, retry_of in issued:
        if retry_of is not None:
            continue
        due = stream.next().id
        if prompt != due:
            yield Problem(text=f"Group {group} has prompt {prompt}, next in the stream was {due}.", group=group)
            return
    retried = Counter(retry_of for *_, retry_of in issued if retry_of is not None)
    for group, count in retried.items():
        if count > 1:
            yield Problem(text=f"Group {group} was run again {count} times as another group.", group=group)
        if run.fates.get(group) == Fate.TRAINED:
            yield Problem(text=f"Group {group} was trained, and run again as another group.", group=group)


def _what_ran_is_taken_up(run: Evidence) -> Iterator[Problem]:
    """A group that was given up at the end ran until then, in the last start too."""
    last = run.record.last_start()
    ran = {fields["group"] for _, fields in run.record.entries("run") if fields["start"] == last}
    if not ran:
        return  # there was nothing left to train
    old = run.rows(
        "SELECT group_id FROM groups JOIN changes USING (number) WHERE fate = 'aborted' AND finished_at IS NULL "
        "AND what = 'issued' AND start < (SELECT max(start) FROM starts WHERE NOT is_in_place)"
    )
    for (group,) in old:
        if group not in ran:
            yield Problem(text=f"Group {group} was given up at the end, but the last start never ran it.", group=group)


def _nothing_is_lost_to_its_length(run: Evidence) -> Iterator[Problem]:
    """With `stragglers = "wait"` no prompt is lost to the age of its group, which is the age of its longest episode.

    What a rewind has made too old runs again. A synchronous run trains exactly the beginning of the stream, as if it
    had never been interrupted, whatever takes how long.
    """
    rollout = run.config.rollout
    if rollout.stragglers != "wait":
        return
    issued = run.rows("SELECT group_id, prompt_id, fate, is_retry_due, retry_of FROM groups ORDER BY number")
    again = {retry_of: group for group, *_, retry_of in issued if retry_of is not None}
    for group, _, fate, is_due, _ in issued:
        if fate == Fate.STALE and not is_due and group not in again:
            yield Problem(text=f"Group {group} was discarded for its age, and its prompt with it.", group=group)
    if rollout.max_staleness:
        return

    def became(group: str) -> str:
        """The fate of the last group that ran its prompt in its place."""
        while group in again:
            group = again[group]
        return run.fates[group]

    lost = (Fate.FILTERED, Fate.FAILED)
    first = [prompt for group, prompt, *_, retry_of in issued if retry_of is None and became(group) not in lost]
    due = Counter(first[: run.config.run.steps * rollout.groups_per_step])
    missing = due - Counter(prompt for *_, prompt in run.final.groups)
    too_late = Counter(prompt for _, prompt, fate, _, retry_of in issued if retry_of and fate == Fate.ABORTED)
    for prompt in missing - too_late:
        yield Problem(text=f"A run without faults trains prompt {prompt} {due[prompt]} times, this one less often.")


def _metrics_have_one_row_a_step(run: Evidence) -> Iterator[Problem]:
    nodes: defaultdict[int, list[float]] = defaultdict(list)
    for line in (run.run_dir.path / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "chaos/node" in row:
            nodes[row["step"]].append(row["chaos/node"])
    lineage = {version: node for version, node in _lineage(run)}
    for step in range(1, run.config.run.steps + 1):
        found = nodes.pop(step, [])
        if len(found) != 1:
            yield Problem(text=f"metrics.jsonl has {len(found)} rows of step {step}.")
        elif found[0] != lineage[step]:
            yield Problem(
                text=f"The row of step {step} in metrics.jsonl is of weights {found[0]:.0f}, not {lineage[step]}."
            )
    if nodes:
        yield Problem(text=f"metrics.jsonl has rows of steps {sorted(nodes)}, which the run does not have.")


def _lineage(run: Evidence) -> Iterator[tuple[int, int]]:
    """Version and node of the exported weights and of those before them."""
    node = run.final.node
    while node >= 0:
        yield run.weights.version(node), node
        node = run.weights.parent(node)


def _the_ledger_agrees(run: Evidence) -> Iterator[Problem]:
    db = sqlite3.connect(f"file:{run.run_dir.ledger}?mode=ro", uri=True)
    try:
        for sentence in verify(db):
            yield Problem(text=f"The ledger's own proof: {sentence}")
    finally:
        db.close()
