"""What collectives are for, by their place among those of their group: learned in few steps, used in all.

Collectives of a group come in the same order on all ranks, and mostly in every step. Where two steps that
were looked at agree, a later one with the same operations of the same sizes gets their names. Looked at
again ever more rarely; a name that has changed since is given up.
"""

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter

from aorta.recording.calls import CollectiveCall, Group, RecordedStep

LOOKS = 2
"""Steps that have to agree."""
MOST_SEQUENCES = 64
Key = tuple[Group, tuple[str, ...]]


class _Sequence:
    """The collectives of a group in a step, as they were looked at."""

    __slots__ = ("has_names", "names", "num_looks", "sizes")

    def __init__(self, calls: list[CollectiveCall], names: list[str | None]) -> None:
        self.names = names
        self.sizes: list[int | None] = [call.bytes for call in calls]
        """None: differs from step to step (tokens of experts)."""
        self.num_looks = 1
        self.has_names = any(names)

    def confirm(self, calls: list[CollectiveCall], names: list[str | None]) -> None:
        self.num_looks += 1
        for place, call in enumerate(calls):
            if self.names[place] != names[place]:
                self.names[place] = None
            if self.sizes[place] != call.bytes:
                self.sizes[place] = None
        self.has_names = any(self.names)

    def name(self, calls: list[CollectiveCall]) -> bool:
        """False where sizes are others, and nothing is named."""
        for call, size in zip(calls, self.sizes, strict=True):
            if size is not None and call.bytes != size:
                return False
        for call, name in zip(calls, self.names, strict=True):
            if call.module is None:
                call.module = name
        return True


class LearnedNames:
    def __init__(self) -> None:
        self._sequences: dict[Key, _Sequence] = {}

    def learn(self, step: RecordedStep, looked_at: set[int]) -> bool:
        """True once all that the step issued is known. looked_at: ids of the calls that were looked at."""
        is_known = True
        for key, calls in _by_group(step):
            names = [call.module if id(call) in looked_at else None for call in calls]
            sequence = self._sequences.get(key)
            if sequence is not None:
                sequence.confirm(calls, names)
            elif len(self._sequences) < MOST_SEQUENCES:
                sequence = self._sequences[key] = _Sequence(calls, names)
            is_known &= sequence is not None and sequence.num_looks >= LOOKS
        return is_known

    def name(self, step: RecordedStep) -> bool:
        """Name the calls that have none; True if all that the step issued was known."""
        is_known = True
        for key, calls in _by_group(step):
            sequence = self._sequences.get(key)
            if sequence is None or sequence.num_looks < LOOKS:
                is_known = False
            elif sequence.has_names:
                is_known &= sequence.name(calls)
        return is_known


_group = attrgetter("group")


def _by_group(step: RecordedStep) -> Iterator[tuple[Key, list[CollectiveCall]]]:
    by_group: dict[Group, list[CollectiveCall]] = {}
    for group, run in groupby(step.calls, _group):
        by_group.setdefault(group, []).extend(run)
    for group, calls in by_group.items():
        yield (group, tuple([call.op for call in calls])), calls
