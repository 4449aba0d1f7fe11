"""Streams that are made once per process and lent again and again.

torch hands out 32 streams per priority in turn, to process groups as well. Whoever makes new ones for every
comparison gets, after a while, the very stream that a process group communicates on, and what is put there
can no longer overlap with that communication.
"""

from collections.abc import Sequence
from typing import Any

import torch

from aorta.device.streams import DeviceStreams
from aorta.host_ir.expr import HostProgramError

POOL_SIZE = 32
RESERVED = 8
"""Of each priority: for process groups."""

_kept: dict[tuple[torch.device, int], dict[int, Any]] = {}
_capturing: dict[torch.device, torch.cuda.Stream] = {}


def kept_streams(priorities: Sequence[int], device: torch.device) -> DeviceStreams:
    """One stream per priority, lower runs first; MAIN is the caller's current one.

    The same streams for every caller, so that callers must take turns. Raises HostProgramError for more
    than torch has beside those of process groups.
    """
    streams = DeviceStreams(0, device)
    lent: dict[int, int] = {}
    for priority in priorities:
        number = lent.get(priority, 0)
        streams.streams.append(_kept_stream(number, priority, device, streams.main.cuda_stream))
        lent[priority] = number + 1
    return streams


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Where captures begin, which cannot be the default stream; none of those that kept_streams lends."""
    if device not in _capturing:
        kept = {handle for streams in _kept.values() for handle in streams}
        stream = torch.cuda.Stream(device)
        while stream.cuda_stream in kept:
            stream = torch.cuda.Stream(device)
        _capturing[device] = stream
    return _capturing[device]


def _kept_stream(number: int, priority: int, device: torch.device, main: int) -> Any:
    kept = _kept.setdefault((device, priority), {})
    usable = [stream for handle, stream in kept.items() if handle != main]
    while len(usable) <= number:
        if len(kept) >= POOL_SIZE - RESERVED:
            raise HostProgramError(f"more than {POOL_SIZE - RESERVED} streams of one priority: use fewer")
        stream = torch.cuda.Stream(device, priority=priority)
        taken = {main, *kept, *(other.cuda_stream for other in _capturing.values())}
        if stream.cuda_stream not in taken:
            kept[stream.cuda_stream] = stream
            usable.append(stream)
    return usable[number]
