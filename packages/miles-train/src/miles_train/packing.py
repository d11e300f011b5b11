"""Which rows share a micro-batch: balanced, within a token budget, the same count on every rank.

lengths ─▶ fewest bins that hold all rows (best fit, decreasing)
        ─▶ as many micro-batches a rank on every rank
        ─▶ rows spread by cost ─▶ micro-batches of like cost meet in the same step
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from .errors import PackingError

Rows = tuple[int, ...]
"""Row indices of one micro-batch, ascending."""

ATTENTION_TOKENS = 8192
"""Length at which attention costs about as much as everything else; only balance depends on it."""


def row_cost(length: int) -> float:
    """Estimated work of a row: linear layers grow with its length, attention with the square."""
    return length + length * length / ATTENTION_TOKENS


def pack(
    lengths: Sequence[int], *, token_budget: int, ranks: int, multiple_of: int = 1
) -> tuple[tuple[Rows, ...], ...]:
    """Assign rows to micro-batches.

    Every row appears once and no micro-batch exceeds the budget. Each rank gets the same number of micro-batches,
    because ranks meet in collectives in each of them; a micro-batch is empty only where there are fewer rows
    than micro-batches. Deterministic.

    Args:
        lengths: tokens of each row.
        token_budget: most tokens of one micro-batch.
        ranks: ranks that train different rows.
        multiple_of: each rank gets a multiple of so many micro-batches.

    Returns:
        `[ranks][micro-batches][rows]` row indices. No micro-batches at all for no rows.

    Raises:
        PackingError: a row is longer than the budget.
    """
    _check(lengths, token_budget, ranks, multiple_of)
    if not lengths:
        return tuple(() for _ in range(ranks))
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    tight = _best_fit(order, lengths, token_budget)
    per_rank = -(-len(tight) // (ranks * multiple_of)) * multiple_of
    bins = _spread(order, lengths, token_budget, per_rank * ranks)
    if bins is None:
        bins = _split(tight, lengths, per_rank * ranks)
    return _deal(bins, lengths, ranks)


def _check(lengths: Sequence[int], token_budget: int, ranks: int, multiple_of: int) -> None:
    if ranks < 1 or token_budget < 1 or multiple_of < 1:
        raise PackingError(
            f"`ranks` is {ranks}, `token_budget` {token_budget} and `multiple_of` {multiple_of}; "
            "each must be at least 1."
        )
    too_long = [row for row, length in enumerate(lengths) if length > token_budget]
    if too_long:
        worst = max(too_long, key=lambda row: lengths[row])
        raise PackingError(
            f"{len(too_long)} of {len(lengths)} rows are longer than the token budget of {token_budget}; the longest, "
            f"row {worst}, has {lengths[worst]} tokens. Raise `token_budget` to at least {lengths[worst]}, or limit "
            "the tokens that an episode may use."
        )
    empty = [row for row, length in enumerate(lengths) if length < 1]
    if empty:
        raise PackingError(f"{len(empty)} rows have no tokens, the first is row {empty[0]}.")


def _best_fit(order: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Best-fit decreasing: each row into the fullest bin that still has room."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for row in order:
        place = bisect_left(room, (lengths[row], -1))
        if place == len(room):
            left, index = token_budget, len(bins)
            bins.append([])
        else:
            left, index = room.pop(place)
        bins[index].append(row)
        insort(room, (left - lengths[row], index))
    return bins


def _spread(order: Sequence[int], lengths: Sequence[int], token_budget: int, num_bins: int) -> list[list[int]] | None:
    """Longest first into the cheapest bin with room; None when the greedy choice runs out of room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    tokens = [0] * num_bins
    heap = [(0.0, index) for index in range(num_bins)]
    shortest = lengths[order[-1]]
    for row in order:
        full: list[tuple[float, int]] = []
        while heap and tokens[heap[0][1]] + lengths[row] > token_budget:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, index = heap[0]
        heapq.heapreplace(heap, (cost + row_cost(lengths[row]), index))
        bins[index].append(row)
        tokens[index] += lengths[row]
        for entry in full:
            if tokens[entry[1]] + shortest <= token_budget:  # else no row fits any more
                heapq.heappush(heap, entry)
    return bins


def _split(bins: list[list[int]], lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Halve the bin with most rows until there are `num_bins`; empty bins only when single rows are left."""
    while len(bins) < num_bins:
        rows = max(bins, key=lambda rows: (len(rows), _tokens(rows, lengths)))
        bins[bins.index(rows)] = rows[::2]
        bins.append(rows[1::2])  # empty when `rows` is a single row
    return bins


def _tokens(rows: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[row] for row in rows)


def _deal(bins: list[list[int]], lengths: Sequence[int], ranks: int) -> tuple[tuple[Rows, ...], ...]:
    """Bins of like cost form one step across ranks; within a step the rank with least work so far gets the most."""
    cost = {id(rows): sum(row_cost(lengths[row]) for row in rows) for rows in bins}
    bins = sorted(bins, key=lambda rows: (-cost[id(rows)], rows[:1]))
    dealt: list[list[Rows]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for start in range(0, len(bins), ranks):
        lightest_first = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        for rank, rows in zip(lightest_first, bins[start : start + ranks], strict=True):
            dealt[rank].append(tuple(sorted(rows)))
            load[rank] += cost[id(rows)]
    return tuple(tuple(micro_batches) for micro_batches in dealt)
