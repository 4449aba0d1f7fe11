"""Confirms a finding: delays its earlier operation in one step, and looks whether the later one overtakes it.

Where the later operation is about to be issued, the host waits for the later one's stream alone. If the
delayed operation has not ended by then, nothing kept the two apart. The bytes are compared as the later
one would have found them, and as it finds them once the earlier one has ended; or, where the later one
overwrites what the earlier one reads, before and after it. The later one itself then runs behind all
others: the step computes what it should.

On the CPU one rank after the other is late instead, so that its peers' collectives are still under way.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aorta.check.operators import Issued

SPIN_CYCLES = 60_000_000
"""About 30 ms on a GPU of 2 GHz."""
LONGEST = 8
"""Most times SPIN_CYCLES that an operation is delayed by."""
LATE_S = 0.1
"""Delay of a rank on the CPU."""
MAX_BYTES = 1 << 28
"""Most bytes that are compared."""


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
    tries: int = 0
    is_overtaken: bool = False
    is_confirmed: bool = False

    @property
    def acts_at(self) -> int:
        return self.following if self.following >= 0 else self.later


class DeviceDelay:
    """Delays one suspect's earlier operation on its stream, in one step."""

    def __init__(self, suspect: Suspect, stream: Callable[[], int]) -> None:
        self._suspect = suspect
        self._stream = stream
        self._end: Any = None
        self._ranges: list[tuple[int, int]] = []
        self._own = torch.cuda.Stream()

    def issue(self, issued: Issued, run: Callable[[], Any]) -> Any:
        """Issue an operation, delayed or compared where it is one of the suspect's."""
        suspect = self._suspect
        if torch.cuda.is_current_stream_capturing():
            return run()
        if issued.site == suspect.earlier and self._end is None:
            return self._delayed(issued, run)
        if issued.site == suspect.acts_at and self._end is not None and not suspect.is_confirmed:
            return self._compared(issued, run)
        return run()

    def _delayed(self, issued: Issued, run: Callable[[], Any]) -> Any:
        suspect = self._suspect
        suspect.tries += 1
        stream: Any = torch.cuda.current_stream()
        if isinstance(suspect.earlier_stream, int) and suspect.earlier_stream != self._stream():
            stream = torch.cuda.ExternalStream(suspect.earlier_stream)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SPIN_CYCLES * min(LONGEST, 2 ** (suspect.tries - 1)))
        result = run()
        with torch.cuda.stream(stream):
            self._end = torch.cuda.Event()
            self._end.record()
        self._ranges = [
            (access[0], access[0] + access[1])
            for tensor, access in (*issued.reads, *issued.writes)
            if tensor is not None and tensor.is_cuda
        ]
        return result

    def _compared(self, issued: Issued, run: Callable[[], Any]) -> Any:
        suspect = self._suspect
        if not suspect.is_later_on_host:
            reached = torch.cuda.Event()
            reached.record()
            reached.synchronize()
        overtaken = not self._end.query()
        if not overtaken:
            self._end = None  # the wait came too late for the delay, or something orders them: again
            return run()
        suspect.is_overtaken = True
        parts = self._common(issued)
        found = [self._copy(part) for part in parts]
        torch.cuda.synchronize()
        self._end = None
        if any(_differ(was, part) for was, part in zip(found, parts, strict=True)):
            suspect.is_confirmed = True  # it would have read, or overwritten, what was not there yet
            return run()
        parts = parts or [_bytes(start, end) for start, end in self._ranges if end - start <= MAX_BYTES]
        before = [self._copy(part) for part in parts]
        torch.cuda.synchronize()
        result = run()
        torch.cuda.synchronize()
        if any(_differ(was, part) for was, part in zip(before, parts, strict=True)):
            suspect.is_confirmed = True  # it would have changed what was still to be read
        return result

    def _copy(self, tensor: Tensor) -> Tensor:
        """Copy on the current stream, into memory of another stream: the program's must not be taken."""
        if not tensor.is_cuda:
            return tensor.detach().clone()
        with torch.cuda.stream(self._own):
            copy = torch.empty_like(tensor, requires_grad=False)
        return copy.copy_(tensor.detach())

    def _common(self, issued: Issued) -> list[Tensor]:
        """Bytes that the operation shares with the delayed one."""
        parts: list[Tensor] = []
        for tensor, access in (*issued.reads, *issued.writes):
            if tensor is not None and not tensor.is_cuda:
                if tensor.is_pinned() and tensor.nbytes <= MAX_BYTES:
                    parts.append(tensor)
                continue
            for start, end in self._ranges:
                first, last = max(start, access[0]), min(end, access[0] + access[1])
                if first < last <= first + MAX_BYTES:
                    parts.append(_bytes(first, last))
        return parts


class HostDelay:
    """On the CPU: this rank is late for the suspect's collective, or looks whether the others' lateness
    shows."""

    def __init__(
        self, suspect: Suspect, is_late: bool, is_done: Callable[[Any], bool | None], last: Callable[[], Any]
    ) -> None:
        """is_late: whether it is this rank's turn. last: the stream of the collective that was issued
        last."""
        self._suspect = suspect
        self._is_late = is_late
        self._is_done = is_done
        self._last = last
        self._stream: Any = None

    def issue(self, issued: Issued, run: Callable[[], Any]) -> Any:
        suspect = self._suspect
        if issued.site == suspect.earlier and self._stream is None:
            suspect.tries += 1
            if self._is_late:
                time.sleep(LATE_S)
            result = run()
            self._stream = self._last()
            return result
        if issued.site == suspect.later and self._stream is not None and not suspect.is_confirmed:
            overtaken = self._is_done(self._stream) is False
            suspect.is_overtaken |= overtaken
            sides = (*issued.reads, *issued.writes)
            touched = [t for t, _ in sides if t is not None and t.nbytes <= MAX_BYTES]
            found = [tensor.detach().clone() for tensor in touched]
            until = time.monotonic() + 5 * LATE_S
            while overtaken and self._is_done(self._stream) is False and time.monotonic() < until:
                time.sleep(0.001)
            if overtaken:
                suspect.is_confirmed = any(
                    _differ(was, tensor) for was, tensor in zip(found, touched, strict=True)
                )
            before = [tensor.detach().clone() for tensor in touched] if overtaken else []
            result = run()
            if any(_differ(was, tensor) for was, tensor in zip(before, touched, strict=False)):
                suspect.is_confirmed = True
            return result
        return run()


def _differ(a: Tensor, b: Tensor) -> bool:
    """True unless all bytes are equal; a NaN is equal to itself."""
    return not torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.detach().contiguous().view(-1).view(torch.uint8)
    )


class _Memory:
    """Bytes at an address of the device, for torch.as_tensor."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def _bytes(start: int, end: int) -> Tensor:
    return torch.as_tensor(_Memory(start, end - start), device="cuda")
