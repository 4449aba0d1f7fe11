"""Collectives that the members of a group have in common, however they were matched."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aorta.timeline.collective import GroupKey

Ints = NDArray[np.int64]
UNKNOWN_SIZE = -1


class TimedCalls(Protocol):
    """The collectives of one rank, with times on the rank's own clock."""

    @property
    def start_ns(self) -> Ints: ...

    @property
    def end_ns(self) -> Ints: ...


@dataclass(frozen=True, slots=True)
class MatchedGroup:
    """The collectives of a group, each with the call of every member."""

    key: GroupKey
    rows: tuple[int, ...]
    """Members, by their place among the ranks given."""
    call: NDArray[np.int32]
    """[collective, member]: index into the member's calls, -1 where it has none."""
    is_whole: bool
    """All ranks of the group were given."""
    is_rooted: NDArray[np.bool_]
    """[collective]: some ranks may leave before the last has arrived."""
    size_bytes: Ints
    """[collective]: the largest size that a member gives, UNKNOWN_SIZE where none does."""
