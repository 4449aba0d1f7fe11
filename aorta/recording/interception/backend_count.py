"""Collectives beside what the backends counted themselves: is there one that the instrument did not see?

Every process group numbers its collectives (`_get_sequence_number_for_group`), whoever issued them. While the
instrument is on, its own count must grow by as much. Not counted: calls that a backend makes of itself.
"""

from typing import Any

import torch.distributed as dist

from aorta.recording.journal import Journal


class BackendCounts:
    """Counts per process group, over the times in which the instrument is on."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._began: dict[str, tuple[int, int]] = {}
        """By the group's name: the backend's number and ours when the instrument was put on."""
        self._grown: dict[str, tuple[int, int]] = {}
        """Grown since, in the earlier times in which it was on."""

    def begin(self) -> None:
        """The instrument is put on."""
        self._began = self._read()

    def end(self) -> None:
        """The instrument is taken off."""
        for name, (backend, num_seen) in self._read().items():
            first_backend, first_seen = self._began.get(name, (0, 0))
            grown_backend, grown_seen = self._grown.get(name, (0, 0))
            self._grown[name] = (
                grown_backend + max(0, backend - first_backend),
                grown_seen + max(0, num_seen - first_seen),
            )
        self._began = {}

    def result(self) -> dict[str, dict[str, int]]:
        """For each group that is alive at the end: what its backend counted, and what was seen."""
        return {
            self._journal.name_of(name): {"backend": backend, "seen": num_seen}
            for name, (backend, num_seen) in self._grown.items()
            if backend or num_seen
        }

    def _read(self) -> dict[str, tuple[int, int]]:
        if not (dist.is_available() and dist.is_initialized()):
            return {}
        by_key = {group.key: group for group in self._journal.groups()}
        counts: dict[str, tuple[int, int]] = {}
        for group in list(dist.distributed_c10d._world.pg_map):
            number = _sequence_number(group)
            if number is None:
                continue
            noted = by_key.get(group.group_name)
            counts[group.group_name] = (
                (number, 0) if noted is None else (number - noted.num_internal, noted.next_seq)
            )
        return counts


def _sequence_number(group: Any) -> int | None:
    """Collectives that the group's backend counted so far; None where it keeps no count."""
    try:
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return None
