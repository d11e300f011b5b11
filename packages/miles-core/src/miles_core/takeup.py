"""Where a stopped run goes on: the ledger's open groups, with their results from the spool and their prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from miles_rollout.resume import Resume, ResumedGroup, Retry
from miles_tito.errors import MilesError
from miles_tito.records import Prompt
from miles_tito.summary import GroupRef, TrajectorySummary, summarize

from .ledger import Ledger, OpenGroup, effective_versions
from .spool import GroupHandle, SpoolAddress, read_group


class TakeUpError(MilesError, ValueError):
    """The data does not hold what the ledger says was issued from it."""


def take_up(ledger: Ledger, *, trajectories: Path, prompts: Sequence[Prompt]) -> Resume:
    """Everything that was open when the run stopped, as buffer and producer take it up.

    Raises:
        TakeUpError: a prompt that has to run again is not among `prompts`.
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
        ref=None if group.address is None else _on_this_branch(_summary(trajectories, group.address), group.rewinds),
        is_admitted=group.is_admitted,
        attempt=group.attempt,
    )


def _summary(trajectories: Path, address: SpoolAddress) -> GroupRef:
    """A spooled group as its worker would hand it out."""
    handle = GroupHandle(ref=None, address=address, directory=trajectories)
    ref = summarize(read_group(trajectories, address), handle=handle)
    return replace(ref, metadata={**ref.metadata, "spool": (address.file, address.offset)})


def _on_this_branch(ref: GroupRef, rewinds: Sequence[int]) -> GroupRef:
    """The versions of its tokens as they count after the run went back to each of `rewinds`."""

    def versions(trajectory: TrajectorySummary) -> TrajectorySummary:
        oldest, newest = trajectory.oldest_version, trajectory.newest_version
        if oldest is None or newest is None:
            return trajectory
        oldest, newest = effective_versions(oldest, newest, rewinds)
        return replace(trajectory, oldest_version=oldest, newest_version=newest)

    episodes = tuple(
        replace(episode, trajectories=tuple(versions(t) for t in episode.trajectories)) for episode in ref.episodes
    )
    return replace(ref, episodes=episodes)


def _prompt(prompt_id: str, prompts: Mapping[str, Prompt]) -> Prompt:
    found = prompts.get(prompt_id)
    if found is None:
        raise TakeUpError(
            f"The ledger says that prompt {prompt_id!r} was issued and is not finished, but it is not among the "
            f"{len(prompts)} prompts of the data. Resume with the data that the run was started with."
        )
    return found
