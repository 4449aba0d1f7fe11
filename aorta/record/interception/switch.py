"""Puts everything on that sees collectives, and takes it off; compares with what the backends counted.

The recorder makes one Interception with an observer per kind of device. Every collective then reaches its
observer through a replaced operator (operators.py), or on a shorter way (method_calls.py).
"""

import logging
import warnings
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from aorta._version import OLDEST_TORCH
from aorta.errors import InstrumentError
from aorta.record.interception.method_calls import MethodCalls
from aorta.record.interception.operators import inside_operators, kernels
from aorta.record.interception.replaced import ReplacedMethods, uncompiled
from aorta.record.interception.works import FutureMethods, Observer
from aorta.record.journal import Journal
from aorta.steps.notes import Group

logger = logging.getLogger(__name__)


def require_torch(version: str) -> None:
    """Raise InstrumentError for a torch whose collectives cannot be recorded."""
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise InstrumentError(f"aorta records with torch {oldest} or newer, and this is torch {version}")


class Interception:
    """The replacements in one process while a recorder is on; there is one at a time."""

    _installed: "Interception | None" = None
    """The one that is on."""

    _was_installed = False
    """True: one was on before in this process."""

    give_way: "Callable[[], None] | None" = None
    """Takes off the recorder of `aorta run`, which is on only as long as the program has none of its own."""

    def __init__(self, observers: dict[str, Observer]) -> None:
        """observers: by dispatch key, one of the CPU and perhaps one of an accelerator."""
        self._observers = observers
        self._kernels = {name: uncompiled(kernel) for name, kernel in kernels(observers).items()}
        self._libraries: list[torch.library.Library] = []
        self._coalescing = ReplacedMethods(ProcessGroup)
        self.method_calls = MethodCalls(observers)
        self._futures = FutureMethods()

    def install(self) -> None:
        assert Interception._installed is None
        require_torch(torch.__version__)
        if not Interception._was_installed and hasattr(ProcessGroup, "register_pre_hook"):
            logger.info("hooks registered on process groups do not fire while aorta records")
        Interception._installed = self
        library = torch.library.Library("c10d", "IMPL")
        self._libraries.append(library)
        if Interception._was_installed:
            self._register_kernels(library)
        else:
            # torch may warn, once per process, that a kernel is overridden: that is what we are here for. Not
            # at every resume: the end of this context makes Python show every other warning once more.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*[Oo]verrid")
                self._register_kernels(library)
            Interception._was_installed = True
        self._bracket_coalescing()
        self.method_calls.install()
        self._futures.install()

    def rest(self) -> None:
        """Take everything off for steps that are not recorded; no other recorder may be put on meanwhile."""
        self.uninstall()
        Interception._installed = self

    def wake(self) -> None:
        """Put everything back on after `rest`."""
        Interception._installed = None
        self.install()

    @property
    def is_entered(self) -> bool:
        """True while another thread is inside a replaced operator, which must not be taken away from it."""
        return bool(inside_operators - {get_ident()})

    def uninstall(self) -> None:
        self._futures.uninstall()
        self.method_calls.uninstall()
        for library in self._libraries:
            library._destroy()
        self._libraries.clear()
        self._coalescing.restore()
        Interception._installed = None

    def _register_kernels(self, library: torch.library.Library) -> None:
        for name, kernel in self._kernels.items():
            library.impl(name, kernel, "BackendSelect", with_keyset=True, allow_override=True)

    def _bracket_coalescing(self) -> None:
        """See the start and the end of coalesced groups, which are methods and no operators."""
        observers = self._observers

        def observer_of(device: Any) -> Observer | None:
            return observers.get(torch.device(device).type.upper())

        def start(original: Callable[..., Any]) -> Callable[..., Any]:
            def _start_coalescing(group: ProcessGroup, device: Any) -> None:
                original(group, device)  # before we believe it: not every backend can
                observer = observer_of(device)
                if observer is not None:
                    observer.coalescing_started(group)

            return _start_coalescing

        def end(original: Callable[..., Any]) -> Callable[..., Any]:
            def _end_coalescing(group: ProcessGroup, device: Any) -> Any:
                observer = observer_of(device)
                if observer is None:
                    return original(group, device)
                return observer.coalescing_ended(group, lambda: original(group, device))

            return _end_coalescing

        self._coalescing.replace("_start_coalescing", start)
        self._coalescing.replace("_end_coalescing", end)


class BackendCounts:
    """Compares our count of collectives with the backend's, per group, over the times the recorder is on."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._left_at: dict[str, int] = {}
        """The backend's count when the instrument was taken off, by the group's name."""
        self._began: dict[str, tuple[int, int]] = {}
        """The backend's count and ours when the instrument was put on, by the group's name."""
        self._grown: dict[str, tuple[int, int]] = {}
        """Growth of the two counts in the earlier times in which the instrument was on."""

    def begin(self) -> None:
        """Note the counts: the instrument is put on. What was issued meanwhile has numbers, too."""
        for group, num_unseen in self._unseen():
            group.next_seq += num_unseen
        self._left_at = {}
        self._began = self._read()

    def unseen(self) -> dict[str, tuple[int, int]]:
        """Return by group's key what was issued since the instrument was taken off; {} where it is on.

        The backend's count at that time, and how many came since. May be asked on any thread: backends count
        in C++.
        """
        return {
            group.key: (self._left_at.get(group.key, 0), num_unseen) for group, num_unseen in self._unseen()
        }

    def _unseen(self) -> list[tuple[Group, int]]:
        if not self._left_at:
            return []
        by_key = {group.key: group for group in self._journal.groups()}
        found = []
        for group in list(dist.distributed_c10d._world.pg_map):
            noted, left_at = by_key.get(group.group_name), self._left_at.get(group.group_name)
            if noted is not None and left_at is not None:
                found.append((noted, max(0, (_sequence_number(group) or 0) - left_at)))
        return found

    @staticmethod
    def read() -> dict[str, int]:
        """Return what the backends have counted so far, by the group's key; some do not count."""
        if not (dist.is_available() and dist.is_initialized()):
            return {}
        numbers = {
            group.group_name: _sequence_number(group) for group in list(dist.distributed_c10d._world.pg_map)
        }
        return {key: number for key, number in numbers.items() if number is not None}

    def next_numbers(self, counts: dict[str, int]) -> dict[str, int]:
        """Return our number of each group's next call, while the instrument is off. counts: of `read`."""
        return {
            group.key: group.next_seq + max(0, counts[group.key] - self._left_at[group.key])
            for group in self._journal.groups()
            if group.key in counts and group.key in self._left_at
        }

    def end(self) -> None:
        """Add up the growth of the counts: the instrument is taken off."""
        self._left_at = {}
        for name, (backend, num_seen) in self._read().items():
            self._left_at[name] = backend + self._num_internal(name)
            first_backend, first_seen = self._began.get(name, (0, 0))
            grown_backend, grown_seen = self._grown.get(name, (0, 0))
            self._grown[name] = (
                grown_backend + max(0, backend - first_backend),
                grown_seen + max(0, num_seen - first_seen),
            )
        self._began = {}

    def result(self) -> dict[str, dict[str, int]]:
        """Return, for each group that is alive at the end, what its backend counted and what was seen."""
        return {
            self._journal.name_of(name): {"backend": backend, "seen": num_seen}
            for name, (backend, num_seen) in self._grown.items()
            if backend or num_seen
        }

    def _num_internal(self, key: str) -> int:
        return sum(group.num_internal for group in self._journal.groups() if group.key == key)

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
    """Return the collectives that the group's backend counted so far; None where it keeps no count."""
    try:
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return None
