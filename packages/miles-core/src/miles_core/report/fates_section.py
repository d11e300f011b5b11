"""Draws the fate waterfall and what was sampled for nothing."""

from __future__ import annotations

from collections.abc import Iterator

from miles_rollout.fates import Fate

from miles_core.monitor.summary import format_seconds

from .fates import ORDER, Cause, Ended, Fates
from .markup import Share, card, count, percent, plural, section, shares, steps_down

MOST = 6
"""Reasons shown of one fate, and causes of waste."""

COLOURS = {
    Fate.TRAINED: 1,
    Fate.FILTERED: 3,
    Fate.STALE: 2,
    Fate.FAILED: 4,
    Fate.ABORTED: 5,
    Fate.BUFFERED: 6,
    Fate.IN_FLIGHT: 7,
}
_NAMES = {Fate.BUFFERED: "open: in the buffer", Fate.IN_FLIGHT: "open: running"}


def fates_section(fates: Fates) -> str:
    """Nothing where nothing was issued."""
    if not fates.issued:
        return ""
    whole = Share(name="issued", value=fates.issued, text=_text(fates.issued, fates.sampled), colour=7)
    falls = steps_down([(share, is_part) for share, is_part in _rows(fates)], total=fates.issued)
    first = steps_down([(whole, False)], total=fates.issued)
    note = "What became of every group issued so far, with the tokens that were sampled for it."
    return section("Fates", note, card(first, falls), _waste(fates))


def _rows(fates: Fates) -> Iterator[tuple[Share, bool]]:
    for fate in ORDER:
        ended = fates.of(fate)
        if not ended:
            continue
        groups, tokens = sum(e.groups for e in ended), sum(e.tokens for e in ended)
        name = _NAMES.get(fate, str(fate))
        yield Share(name=name, value=groups, text=_text(groups, tokens), colour=COLOURS[fate]), False
        if fate is not Fate.TRAINED and any(e.reason not in ("", fate) for e in ended):
            yield from ((_reason(e), True) for e in ended[:MOST])
            if rest := ended[MOST:]:
                groups, tokens = sum(e.groups for e in rest), sum(e.tokens for e in rest)
                name = plural(len(rest), "other reason")
                yield Share(name=name, value=groups, text=_text(groups, tokens), colour=COLOURS[fate]), True


def _reason(ended: Ended) -> Share:
    name = ended.reason or "no reason given"
    return Share(name=name, value=ended.groups, text=_text(ended.groups, ended.tokens), colour=COLOURS[ended.fate])


def _text(groups: int, tokens: int) -> str:
    return f"{plural(groups, 'group')} · {plural(tokens, 'token')}"


def _colour(cause: Cause) -> int:
    return 6 if cause.fate is None else COLOURS[cause.fate]


def _waste(fates: Fates) -> str:
    """One bar: trained, open, and each cause of waste."""
    if not fates.sampled:
        return ""
    causes = fates.wasted()
    trained = sum(e.tokens - e.masked_tokens for e in fates.of(Fate.TRAINED))
    still = fates.sampled - trained - fates.num_wasted
    parts = [Share(name="trained", value=trained, text=count(trained), colour=1)]
    if still:
        parts.append(Share(name="open", value=still, text=count(still), colour=7))
    parts += [
        Share(name=cause.name, value=cause.tokens, text=count(cause.tokens), colour=_colour(cause))
        for cause in causes[: MOST - 1]
    ]
    if rest := sum(cause.tokens for cause in causes[MOST - 1 :]):
        parts.append(Share(name="other causes", value=rest, text=count(rest), colour=6))
    notes = [f"{count(fates.num_wasted)} of {count(fates.sampled)} ({percent(fates.num_wasted / fates.sampled)})."]
    if fates.retrained:
        again = plural(fates.retrained, "token")
        notes.append(f"Rewinds took {again} out of a step; a later step trained them again.")
    if fates.failed_attempts:
        took = format_seconds(fates.failed_seconds)
        attempts = plural(fates.failed_attempts, "failed attempt")
        notes.append(f"{attempts} took {took} besides; what they sampled is not recorded.")
    lead = "Sampled tokens that no surviving step trained and none will, by cause. " + " ".join(notes)
    return section("Wasted tokens", lead, card(shares(parts)))
