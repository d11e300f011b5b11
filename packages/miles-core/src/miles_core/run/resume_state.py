"""Where a stopped run goes on: the ledger's open groups, with their results from the spool and their prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from miles_rollout.resume import Resume, ResumedGroup, Retry
from miles_tito.errors import MilesError
from miles_tito.records import Prompt
from miles_tito.records.summary import GroupRef, TrajectorySummary

from miles_core.durable.ledger import Ledger, OpenGroup
from miles_core.durable.spool import SpoolAddress, read_group, spooled


class ResumeDataError(MilesError, ValueError):
    """The data does not hold what the ledger says was issued from it."""


def resume_state(ledger: Ledger, *, trajectories: Path, prompts: Sequence[Prompt]) -> Resume:
    """Everything that was open when the run stopped, as buffer and producer need it to go on.

    Raises:
        ResumeDataError: a prompt that has to run again is not among `prompts`.
        SpoolError: a group that the ledger calls finished cannot be read back.
    """
    by_id = {prompt.id: prompt for prompt in prompts}
    return Resume(
        counts=ledger.counts(),
        groups=tuple(_resumed(group, by_id, trajectories) for group in ledger.open_groups()),
        retries=tuple(
            Retry(prompt=_prompt(pending.prompt_id, by_id), retry_of=pending.retry_of)
            for pending in ledger.pending_retries()
        ),
        next_group=ledger.next_group(),
    )


def _resumed(group: OpenGroup, prompts: Mapping[str, Prompt], trajectories: Path) -> ResumedGroup:
    return ResumedGroup(
        id=group.id,
        prompt=_prompt(group.prompt_id, prompts),
        issued_version=group.issued_version,
        ref=None if group.address is None else _result(group, group.address, trajectories),
        is_admitted=group.is_admitted,
        attempt=group.attempt,
    )


def _result(group: OpenGroup, address: SpoolAddress, trajectories: Path) -> GroupRef:
    """What lies in the spool, its versions as they count on the branch that the run goes on from."""
    ref = spooled(read_group(trajectories, address), address, trajectories)
    return replace(
        ref,
        episodes=tuple(
            replace(episode, trajectories=tuple(_on_this_branch(group, t) for t in episode.trajectories))
            for episode in ref.episodes
        ),
    )


def _on_this_branch(group: OpenGroup, trajectory: TrajectorySummary) -> TrajectorySummary:
    versions = group.versions(trajectory.oldest_version, trajectory.newest_version)
    if versions is None:
        return trajectory
    return replace(trajectory, oldest_version=versions[0], newest_version=versions[1])


def _prompt(prompt_id: str, prompts: Mapping[str, Prompt]) -> Prompt:
    found = prompts.get(prompt_id)
    if found is None:
        raise ResumeDataError(
            f"The ledger says that prompt {prompt_id!r} was issued and is not finished, but it is not among the "
            f"{len(prompts)} prompts of the data. Resume with the data that the run was started with."
        )
    return found
