"""Confirms a finding: delays its earlier operation, and looks whether the later one overtakes it.

Where the later operation is about to be issued, the host waits for the later one's stream alone. If the
delayed operation has not ended by then, nothing kept the two apart. The bytes are compared as the later
one would have found them, and as it finds them once the earlier one has ended; or, where the later one
overwrites what the earlier one reads, before and after it. The later one itself then runs behind all
others: the step computes what it should.

A trial lasts two steps, since an optimizer and the next forward pass may be the two. The sites of a finding
issue many operations in a step. The first trial delays the first of them, and sees which two touch the same
bytes and follow one another closest; the next trials delay that one.

On the CPU one rank after the other is late instead, so that its peers' collectives are still under way.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from aorta.check.device_order import DeviceOrder
from aorta.check.operators import Issued

SPIN_CYCLES = 60_000_000
"""About 30 ms on a GPU of 2 GHz."""
LONGEST = 64
"""Most times SPIN_CYCLES that an operation is delayed by."""
LATE_S = 0.1
"""Delay of a rank on the CPU."""
MAX_BYTES = 1 << 28
"""Most bytes that are compared."""
MAX_ISSUES = 1024
"""Operations of one site in a trial whose bytes are remembered."""

Ranges = list[tuple[int, int]]
"""Starts and ends of bytes, in ascending order."""


@dataclass
class Suspect:
    """A finding as its operations are recognised when they are issued again."""

    earlier: int
    later: int
    """Numbers of their sites."""
    earlier_stream: Any
    is_later_on_host: bool = False
    following: int = -1
    """Of memory that was freed too early: the site of its next allocation, which stands for the later one."""
    pair: tuple[int, int] | None = None
    """Which of the two sites' operations in a trial touch the same bytes, by their places from 0."""
    num_trials: int = 0
    num_delayed: int = 0
    """Trials in which the earlier operation came and was delayed."""
    is_overtaken: bool = False
    is_confirmed: bool = False
    is_short: bool = False
    """There was too little memory for copies to compare with."""

    @property
    def acts_at(self) -> int:
        return self.following if self.following >= 0 else self.later


class Bytes:
    """What an operation touches."""

    __slots__ = ("touched", "written")

    def __init__(self, issued: Issued) -> None:
        self.written = _ranges(issued.writes)
        self.touched = sorted((*_ranges(issued.reads), *self.written))

    def conflict_with(self, other: "Bytes") -> bool:
        """True where both touch the same bytes and one of them writes."""
        return bool(common(self.written, other.touched) or common(self.touched, other.written))


def _ranges(accesses: Iterable[tuple[Any, Any]]) -> Ranges:
    return sorted({(access[0], access[0] + access[1]) for _, access in accesses})


def common(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> Ranges:
    """Bytes that ranges share, each range of a with each one of b."""
    longest = max((end - start for start, end in b), default=0)
    found: Ranges = []
    for start, end in a:
        for other, until in b[bisect_right(b, (start - longest, 0)) :]:
            if other >= end:
                break
            if until > start:
                found.append((max(start, other), min(end, until)))
    return found


class Trial:
    """One suspect's operations, in the two steps of a trial."""

    def __init__(self, suspect: Suspect) -> None:
        self._suspect = suspect
        self._issues: list[tuple[float, Bytes]] = []
        """When each operation of the earlier site was issued, and its bytes."""
        self._num_later = 0
        self._shortest_s = float("inf")
        self._pair: tuple[int, int] | None = None
        self._came = False
        self._bytes: Bytes | None = None
        """Of the delayed operation, while it may be under way."""
        self.is_done = False
        """The later operation came while the earlier one was under way, and was compared."""
        suspect.num_trials += 1

    def issue(self, issued: Issued, run: Callable[[], Any]) -> Any:
        """Issue an operation, delayed or compared where it is one of the suspect's."""
        suspect = self._suspect
        is_earlier, is_later = issued.site == suspect.earlier, issued.site == suspect.acts_at
        if not (is_earlier or is_later) or len(self._issues) >= MAX_ISSUES:
            return run()
        issued_at = time.monotonic()
        if is_later and self._bytes is not None and self._is_due(issued):
            result = self.compared(issued, run)
            self._bytes = None
        elif is_earlier and not self._came and len(self._issues) == (suspect.pair or (0, 0))[0]:
            self._came = True
            suspect.num_delayed += 1
            result = self.delayed(issued, run)
            self._bytes = Bytes(issued)
        else:
            result = run()
        if is_later:
            self._look_for_pair(issued, issued_at)
        if is_earlier:
            self._issues.append((issued_at, Bytes(issued)))
        return result

    def delayed(self, issued: Issued, run: Callable[[], Any]) -> Any:
        """Issue the earlier operation late."""
        raise NotImplementedError

    def compared(self, issued: Issued, run: Callable[[], Any]) -> Any:
        """Issue the later operation; find out whether it would have overtaken the earlier one."""
        raise NotImplementedError

    def end(self) -> None:
        """Note what was learned for the next trial."""
        if self._pair is not None:
            self._suspect.pair = self._pair

    def _is_due(self, issued: Issued) -> bool:
        """True if this operation of the later site is the one to compare."""
        assert self._bytes is not None
        suspect = self._suspect
        if suspect.pair is not None and self._num_later == suspect.pair[1]:
            return True
        if suspect.following >= 0:  # which memory it gets is not known before it has run
            return suspect.pair is None
        return self._bytes.conflict_with(Bytes(issued))

    def _overtakes(self, has_ended: bool) -> bool:
        """Note whether the earlier operation had ended where the later one came."""
        self.is_done = not has_ended
        self._suspect.is_overtaken |= not has_ended
        return not has_ended

    def _look_for_pair(self, issued: Issued, issued_at: float) -> None:
        mine = Bytes(issued)
        for place in range(len(self._issues) - 1, -1, -1):
            began, others = self._issues[place]
            if issued_at - began >= self._shortest_s:
                break
            if others.conflict_with(mine):
                self._shortest_s, self._pair = issued_at - began, (place, self._num_later)
                break
        self._num_later += 1


class DeviceTrial(Trial):
    """Delays the earlier operation on its stream."""

    def __init__(self, suspect: Suspect, order: DeviceOrder) -> None:
        super().__init__(suspect)
        self._order = order
        self._end: Any = None
        self._on_device: Ranges = []
        """The delayed operation's bytes on the device."""
        self._own = torch.cuda.Stream()

    def issue(self, issued: Issued, run: Callable[[], Any]) -> Any:
        return run() if torch.cuda.is_current_stream_capturing() else super().issue(issued, run)

    def delayed(self, issued: Issued, run: Callable[[], Any]) -> Any:
        suspect = self._suspect
        stream: Any = torch.cuda.current_stream()
        if isinstance(suspect.earlier_stream, int) and suspect.earlier_stream != self._order.stream():
            stream = torch.cuda.ExternalStream(suspect.earlier_stream)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SPIN_CYCLES * min(LONGEST, 4 ** (suspect.num_delayed - 1)))
        result = run()
        with torch.cuda.stream(stream):
            self._end = torch.cuda.Event()
            self._end.record()
        self._on_device = [
            (access[0], access[0] + access[1])
            for tensor, access in (*issued.reads, *issued.writes)
            if tensor is None or tensor.is_cuda
        ]
        return result

    def compared(self, issued: Issued, run: Callable[[], Any]) -> Any:
        suspect = self._suspect
        if not suspect.is_later_on_host:
            reached = torch.cuda.Event()
            reached.record()
            reached.synchronize()
        if not self._overtakes(has_ended=self._end.query()):
            return run()  # it came too late for the delay, or something orders them
        parts = self._common(issued)
        try:
            found = [self._copy(part) for part in parts]
            torch.cuda.synchronize()
            # It would have read, or overwritten, what was not there yet.
            is_changed = any(_differ(was, part) for was, part in zip(found, parts, strict=True))
            del found
            before = [self._copy(part) for part in parts]
        except torch.OutOfMemoryError:
            suspect.is_short = True
            return run()
        torch.cuda.synchronize()
        result = run()
        torch.cuda.synchronize()
        assert self._bytes is not None
        if suspect.following >= 0 and not self._bytes.conflict_with(Bytes(issued)):
            is_changed = False  # this time it got other memory
        # Or it would have changed what was still to be read.
        is_changed |= any(_differ(was, part) for was, part in zip(before, parts, strict=True))
        suspect.is_confirmed |= is_changed
        return result

    def _copy(self, tensor: Tensor) -> Tensor:
        """Copy on the current stream, into memory of another one: none that the program has freed is taken,
        and its allocator can give it back, as it cannot that of the check's pool."""
        if not tensor.is_cuda:
            return tensor.detach().clone()
        with torch.cuda.stream(self._own):
            copy = torch.empty_like(tensor, requires_grad=False)
        return copy.copy_(tensor.detach())

    def _common(self, issued: Issued) -> list[Tensor]:
        """Bytes that the operation shares with the delayed one; of memory that it does not have yet, all of
        the delayed one's."""
        assert self._bytes is not None
        touched, parts = self._bytes.touched, list[Tensor]()
        on_device: Ranges = []
        for tensor, access in (*issued.reads, *issued.writes):
            span = [(access[0], access[0] + access[1])]
            if tensor is None or tensor.is_cuda:
                on_device += common(span, touched)
            elif common(span, touched) and tensor.nbytes <= MAX_BYTES:
                parts.append(tensor)
        if not parts and not on_device:
            on_device = self._on_device
        return parts + [_bytes(start, end) for start, end in on_device if end - start <= MAX_BYTES]


class HostTrial(Trial):
    """On the CPU: this rank is late for the suspect's collective, or looks whether the others' lateness
    shows."""

    def __init__(
        self, suspect: Suspect, is_late: bool, is_done: Callable[[Any], bool | None], last: Callable[[], Any]
    ) -> None:
        """is_late: whether it is this rank's turn. is_done: of a collective, by its stream. last: the stream
        of the collective that was issued last."""
        super().__init__(suspect)
        self._is_late = is_late
        self._has_ended = is_done
        self._last = last
        self._stream: Any = None

    def delayed(self, issued: Issued, run: Callable[[], Any]) -> Any:
        if self._is_late:
            time.sleep(LATE_S)
        result = run()
        self._stream = self._last()
        return result

    def compared(self, issued: Issued, run: Callable[[], Any]) -> Any:
        suspect = self._suspect
        if not self._overtakes(has_ended=self._has_ended(self._stream) is not False):
            return run()
        sides = (*issued.reads, *issued.writes)
        touched = [t for t, _ in sides if t is not None and t.nbytes <= MAX_BYTES]
        found = [tensor.detach().clone() for tensor in touched]
        until = time.monotonic() + 5 * LATE_S
        while self._has_ended(self._stream) is False and time.monotonic() < until:
            time.sleep(0.001)
        is_changed = any(_differ(was, tensor) for was, tensor in zip(found, touched, strict=True))
        before = [tensor.detach().clone() for tensor in touched]
        result = run()
        is_changed |= any(_differ(was, tensor) for was, tensor in zip(before, touched, strict=True))
        suspect.is_confirmed |= is_changed
        return result


def _differ(a: Tensor, b: Tensor) -> bool:
    """True unless all bytes are equal; a NaN is equal to itself."""
    return not torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.detach().contiguous().view(-1).view(torch.uint8)
    )


def _bytes(start: int, end: int) -> Tensor:
    """Bytes at an address of the device."""
    size, place = (end - start,), (start, False)
    interface = {"shape": size, "typestr": "|u1", "data": place, "version": 3, "strides": None}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device="cuda")
