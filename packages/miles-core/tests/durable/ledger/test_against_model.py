"""Random lives of a run, with crashes and rewinds at any moment, against a model that keeps everything in dicts."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_life import event, make_ref
from miles_core.durable.ledger import Ledger, Limits
from miles_rollout.fates import Fate

LIMITS = Limits(max_staleness=2, credits=6, retries=1)


@dataclass
class Group:
    """What must be known of one group."""

    fate: Fate = Fate.IN_FLIGHT
    sampled: list[int] | None = None
    """The branch of its tokens: labels of the weights from the root to those that sampled it. None while it runs."""
    is_told: bool = False
    """The ledger heard of its end."""
    first_attempt: int = 0
    is_due: bool = False
    """Its prompt is to run again."""


@dataclass
class Model:
    groups: dict[str, Group] = field(default_factory=dict[str, Group])
    branch: list[int] = field(default_factory=lambda: [0])
    """Identities of the weights of the surviving lineage; the version of `branch[v]` is v."""
    steps: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    committed: list[int] = field(default_factory=lambda: [0])
    weights: int = 0
    """States of the weights so far, on all branches."""

    @property
    def version(self) -> int:
        return len(self.branch) - 1

    def having(self, fate: Fate) -> list[str]:
        return [name for name, group in self.groups.items() if group.fate is fate]

    def age(self, name: str) -> int:
        """Steps between the policy that sampled a group and the present one, along the tree."""
        sampled = self.groups[name].sampled
        assert sampled is not None, "it has finished"
        common = sum(1 for one, other in zip(sampled, self.branch, strict=False) if one == other)
        return len(sampled) + len(self.branch) - 2 * common


class LedgerAgainstModel(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.model = Model()
        self.ledger = Ledger.open(self.folder / "ledger.db", create=True)
        self.ledger.start(0, limits=LIMITS)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()
            shutil.rmtree(self.folder)

    def pick(self, data: st.DataObject, names: list[str]) -> str:
        return data.draw(st.sampled_from(names), label="group")

    @precondition(lambda self: len(self.open()) < 6)
    @rule(data=st.data())
    def issue(self, data: st.DataObject) -> None:
        name = f"g{len(self.model.groups):06d}"
        due = [old for old, group in self.model.groups.items() if group.is_due]
        retry_of = data.draw(st.none() | st.sampled_from(due) if due else st.none(), label="retry of")
        if retry_of is not None:
            self.model.groups[retry_of].is_due = False
        self.model.groups[name] = Group()
        self.ledger(
            event(name, Fate.IN_FLIGHT, version=self.model.version, drawn=len(self.model.groups), retry_of=retry_of)
        )

    @precondition(lambda self: self.running())
    @rule(data=st.data(), is_told=st.booleans())
    def finish(self, data: st.DataObject, is_told: bool) -> None:
        """Spooled; whether the ledger hears of it before the next crash is another matter."""
        group = self.model.groups[name := self.pick(data, self.running())]
        group.sampled = list(self.model.branch)
        group.is_told = is_told
        if is_told:
            self.ledger.finished(self.ref(name))

    def ref(self, name: str) -> Any:
        group = self.model.groups[name]
        assert group.sampled is not None, "it has finished"
        return make_ref(name, oldest=len(group.sampled) - 1, attempt=group.first_attempt, place=("w.000.spool", 0))

    @precondition(lambda self: self.told())
    @rule(data=st.data(), fate=st.sampled_from([Fate.BUFFERED, Fate.BUFFERED, Fate.FILTERED, Fate.STALE, Fate.FAILED]))
    def put(self, data: st.DataObject, fate: Fate) -> None:
        name = self.pick(data, self.told())
        self.model.groups[name].fate = fate
        self.model.groups[name].is_due = fate is Fate.STALE
        self.ledger(event(name, fate, version=self.model.version, will_retry=fate is Fate.STALE))

    @precondition(lambda self: self.fresh())
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(self.fresh()), min_size=1, max_size=3, unique=True), label="batch")
        version = self.model.version + 1
        self.model.weights += 1
        self.model.branch.append(self.model.weights)
        self.model.steps[version] = names
        for name in names:
            self.model.groups[name].fate = Fate.TRAINED
            self.ledger(event(name, Fate.TRAINED, version=version))
        self.ledger.step(version, [self.ref(name) for name in names])

    @precondition(lambda self: self.model.version > self.model.committed[-1])
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(self.model.committed[-1] + 1, self.model.version), label="step")
        self.model.committed.append(step)
        self.ledger.commit(step, f"step-{step:06d}")

    @rule(data=st.data(), in_place=st.booleans())
    def go_back(self, data: st.DataObject, in_place: bool) -> None:
        """To the newest checkpoint or to an older one, after a crash of the process or of the trainer alone."""
        step = data.draw(st.sampled_from([self.model.committed[-1], *self.model.committed]), label="step")
        if in_place:
            self.ledger.event("trainer", "rank 0", "died")
        dropped = [name for version, names in self.model.steps.items() if version > step for name in names]
        if in_place:
            assert self.ledger.rewind(step) == len(dropped)
        else:
            self.crash()
            for name in self.running():
                self.model.groups[name].is_told = False
            for name, group in self.model.groups.items():
                if group.fate is Fate.IN_FLIGHT and group.sampled is not None and not group.is_told:
                    assert self.ledger.recover(self.ref(name))
                    group.is_told = True
            self.ledger.start(step, limits=LIMITS)
        assert self.ledger.rewind(step) == len(dropped), "once more it only answers"
        for name in dropped:
            self.model.groups[name].fate = Fate.BUFFERED
        for group in self.model.groups.values():
            if group.fate is Fate.IN_FLIGHT and not group.is_told:
                group.sampled, group.first_attempt = None, group.first_attempt + 2
        self.model.steps = {version: names for version, names in self.model.steps.items() if version <= step}
        self.model.committed = [at for at in self.model.committed if at <= step]
        del self.model.branch[step + 1 :]

    def crash(self) -> None:
        self.ledger._db.close()  # pyright: ignore[reportPrivateUsage]  (nothing is written any more)
        self.ledger = Ledger.open(self.folder / "ledger.db")

    @invariant()
    def the_ledger_tells_the_same_as_the_model(self) -> None:
        if not hasattr(self, "ledger"):
            return
        counts, fates = self.ledger.counts(), Counter(group.fate for group in self.model.groups.values())
        assert (counts.issued, counts.lost) == (len(self.model.groups), 0)
        for fate in Fate:
            if fate.is_final:
                assert getattr(counts, fate) == fates[fate]
        found = [(g.id, g.is_admitted, g.address is not None, g.attempt) for g in self.ledger.open_groups()]
        assert found == [
            (name, group.fate is Fate.BUFFERED, group.is_told, group.first_attempt)
            for name, group in self.model.groups.items()
            if not group.fate.is_final
        ]
        for group in self.ledger.open_groups():
            sampled = self.model.groups[group.id].sampled
            if group.address is not None and sampled is not None:
                oldest, newest = group.versions(len(sampled) - 1, len(sampled) - 1) or (None, None)
                assert oldest == newest == self.model.version - self.model.age(group.id)
        assert self.ledger.drawn() == self.ledger.next_group() == len(self.model.groups)
        assert [r.retry_of for r in self.ledger.pending_retries()] == [
            n for n, g in self.model.groups.items() if g.is_due
        ]
        assert self.ledger.verify() == []

    def open(self) -> list[str]:
        return [name for name, group in self.model.groups.items() if not group.fate.is_final]

    def running(self) -> list[str]:
        return [name for name in self.model.having(Fate.IN_FLIGHT) if self.model.groups[name].sampled is None]

    def told(self) -> list[str]:
        return [name for name in self.model.having(Fate.IN_FLIGHT) if self.model.groups[name].is_told]

    def fresh(self) -> list[str]:
        return [name for name in self.model.having(Fate.BUFFERED) if self.model.age(name) <= 2]


LedgerAgainstModel.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLedgerAgainstModel = LedgerAgainstModel.TestCase
