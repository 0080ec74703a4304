"""Blocks of queries with the keys that they see, as integers: the plan of attention calls in every framework.

A *segment* is a run of positions that attend only to each other: a row of a batch, or one packed document. Its queries
are split into blocks whose keys are at most three runs: those that only the earlier queries see (the left edge), those
that all of them see, and those that only the later queries see (the right edge). Blocks of one shape can share one
call; the results for the runs of one block are combined by their log-partitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple


class Segment(NamedTuple):
    """Positions that attend only to each other; the queries are the last of the keys."""

    first_query: int
    num_queries: int
    first_key: int
    num_keys: int


class KeyRun(NamedTuple):
    """Consecutive keys; query i of a block sees the j-th of them if low <= j - i <= high."""

    start: int
    """Of the first key, counted from the block's origin."""
    num_keys: int
    low: int | None = None
    high: int | None = None


class Blocks(NamedTuple):
    """Blocks of queries that see the same runs of keys, each counted from its own origin."""

    num_queries: int
    """Of each block."""
    runs: tuple[KeyRun, ...]
    """Every query sees at least one key of every run."""
    queries: Sequence[int]
    """The first query of each block; a range where they are evenly spaced."""
    origins: Sequence[int]
    """The key that each block counts from; a range where they are evenly spaced."""


class _Block(NamedTuple):
    num_queries: int
    runs: tuple[KeyRun, ...]


def plan_blocks(
    segments: Iterable[Segment], *, causal: bool, window: int | None, size: int, least_keys: int
) -> tuple[Blocks, ...]:
    """Return blocks that cover every query of every segment once, those of one shape together.

    Args:
        segments: Positions that attend only to each other.
        causal: No query sees a later key.
        window: A query sees keys fewer than this many positions away; None sees the whole segment.
        size: Queries of a block where a window ends on the left; elsewhere blocks are as long as possible.
        least_keys: A block with fewer keys than this has them in one run, with more keys in up to three.
    """
    places: dict[_Block, tuple[list[int], list[int]]] = {}
    shapes: dict[tuple[int, int], list[tuple[_Block, int, int]]] = {}
    for segment in segments:
        shape = (segment.num_queries, segment.num_keys)
        if shape not in shapes:
            shapes[shape] = list(_cut_segment(*shape, causal, window, size, least_keys))
        for block, query, origin in shapes[shape]:
            queries, origins = places.setdefault(block, ([], []))
            queries.append(segment.first_query + query)
            origins.append(segment.first_key + origin)
    return tuple(Blocks(*block, _as_range(queries), _as_range(origins)) for block, (queries, origins) in places.items())


def _cut_segment(
    num_queries: int, num_keys: int, causal: bool, window: int | None, size: int, least_keys: int
) -> Iterator[tuple[_Block, int, int]]:
    """Yield each block of a segment with its first query and its origin, both counted from the segment's own first."""
    before = num_keys - num_queries
    back = num_keys if window is None else window - 1
    ahead = 0 if causal else back
    # Positions from `back` on do not see the first key, those before `num_keys - ahead` not the last one.
    cuts = sorted({before, num_keys} | {cut for cut in (back, num_keys - ahead) if before < cut < num_keys})
    for start, stop in pairwise(cuts):
        has_left, has_right = start >= back, stop <= num_keys - ahead
        step = size if has_left else stop - start
        for first in range(start, stop, step):
            last = min(first + step, stop)
            left = first - back if has_left else 0
            right = last + ahead if has_right else num_keys
            runs = _runs(last - first, right - left, has_left, first + ahead - left if has_right else None, least_keys)
            yield _Block(last - first, runs), first - before, left


def _runs(
    num_queries: int, num_keys: int, has_left: bool, right_edge: int | None, least_keys: int
) -> tuple[KeyRun, ...]:
    """Return the runs of one block's keys, counted from the first of them.

    Args:
        num_queries: Number of queries in the block.
        num_keys: Number of keys in the block.
        has_left: Each query after the first sees one key less at the left.
        right_edge: Last key that the first query sees, each later one sees one more; None if all see all.
        least_keys: As in `plan_blocks`.
    """
    start, stop = num_queries if has_left else 0, num_keys if right_edge is None else right_edge
    left = [KeyRun(0, num_queries, low=0)] if has_left else []
    middle = [KeyRun(start, stop - start)] if stop > start else []
    right = [KeyRun(right_edge, num_queries, high=0)] if right_edge is not None else []
    runs = (*left, *middle, *right)
    overlapping = stop < start
    if overlapping or (len(runs) > 1 and num_keys < least_keys):
        return (KeyRun(0, num_keys, 0 if has_left else None, right_edge),)
    return runs


def _as_range(starts: list[int]) -> Sequence[int]:
    """Return rising numbers as a range if they are evenly spaced, else as they are."""
    step = starts[1] - starts[0] if len(starts) > 1 else 1
    evenly = range(starts[0], starts[-1] + 1, step)
    return evenly if list(evenly) == starts else starts
