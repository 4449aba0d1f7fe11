"""Arithmetic on arrays [rank, step]; percentiles of the rows of large ones, a block of rows at a time.

A block fits in the processor's cache, and blocks are sorted by as many threads as there are cores (numpy
lets go of the interpreter's lock for that): no copy of the whole array is ever made.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from aorta.processes import usable_cores
from aorta.timeline.arrays import Floats, Ints

NumKnown = Ints
Result = TypeVar("Result")
BLOCK_NUMBERS = 1 << 18
"""2 MiB of numbers."""
MANY_RANKS = 16
"""One rank more or less is no matter to the median of so many."""


def positive(values: Floats) -> Floats:
    """Without what is below 0; NaN counts as 0."""
    return np.maximum(np.nan_to_num(values), 0.0)


def ratio(part: Floats, whole: Floats, unknown: float = np.nan) -> Floats:
    """part / whole; unknown where whole is not above 0."""
    result: Floats = np.divide(part, whole, out=np.full(whole.shape, unknown), where=whole > 0)
    return result


def of_the_others(values: Floats) -> Floats:
    """[rank, step]: median of the other ranks' values, of many ranks that of all; 0 of a single rank."""
    if len(values) < 2:
        return np.zeros_like(values)
    if len(values) > MANY_RANKS:
        return np.broadcast_to(np.median(values, axis=0), values.shape)
    return np.stack([np.median(np.delete(values, i, axis=0), axis=0) for i in range(len(values))])


def row_percentiles(values: Floats, percents: Sequence[float]) -> list[Floats]:
    """Per percent one value of each row, without its NaN, as numpy.nanpercentile gives it; NaN of a row
    that has no other."""
    return _of_sorted(values, lambda rows, num: [_percentile(rows, num, percent) for percent in percents])


def row_medians_and_percentile(values: Floats, percent: float) -> tuple[Floats, Floats]:
    """numpy.nanmedian and numpy.nanpercentile of each row."""
    medians, percentiles = _of_sorted(
        values, lambda rows, num: [_median(rows, num), _percentile(rows, num, percent)]
    )
    return medians, percentiles


def row_blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Neighbouring rows of about BLOCK_NUMBERS numbers together, and of one row at least."""
    num_rows = max(BLOCK_NUMBERS // max(shape[1], 1), 1)
    return (slice(first, first + num_rows) for first in range(0, shape[0], num_rows))


def map_blocks(function: Callable[[slice], Result], shape: tuple[int, ...]) -> list[Result]:
    """Results of function(rows), in order, by threads where there are several blocks."""
    blocks = list(row_blocks(shape))
    if len(blocks) < 2:
        return [function(rows) for rows in blocks]
    with ThreadPoolExecutor(min(len(blocks), usable_cores())) as threads:
        return list(threads.map(function, blocks))


def _of_sorted(values: Floats, columns: Callable[[Floats, NumKnown], list[Floats]]) -> list[Floats]:
    """columns(rows in order of size, number of values in each), NaN last, of all blocks together."""

    def sorted_block(rows: slice) -> list[Floats]:
        ordered = np.sort(values[rows], axis=1)
        num_known = ordered.shape[1] - np.isnan(ordered).sum(axis=1)
        return columns(ordered, num_known)

    return [np.concatenate(parts) for parts in zip(*map_blocks(sorted_block, values.shape), strict=True)]


def _median(ordered: Floats, num_known: NumKnown) -> Floats:
    middle = _at(ordered, num_known // 2)
    return np.where(num_known % 2, middle, (_at(ordered, num_known // 2 - 1) + middle) / 2)


def _percentile(ordered: Floats, num_known: NumKnown, percent: float) -> Floats:
    """numpy's default, linear between the neighbours; in its order of arithmetic."""
    places = (num_known - 1) * (percent / 100)
    below = np.floor(places).astype(np.int64)
    low, high = _at(ordered, below), _at(ordered, np.minimum(below + 1, num_known - 1))
    share, difference = places - below, high - low
    values: Floats = np.where(share >= 0.5, high - difference * (1 - share), low + difference * share)
    return values


def _at(ordered: Floats, places: NumKnown) -> Floats:
    """NaN of rows without a value, whose last one is NaN: their place is below 0."""
    return ordered[np.arange(len(ordered)), places]
