"""Where training stands: how many steps it had done before this process, over restarts and whole jobs.

Told by the checkpoint that the program loads, where an earlier attempt of the run saved it: aorta noted at
which step. What it holds (a counter, a scheduler, a sampler, a loader) was of that step. Else by the state of
the optimizers, or by parameters that are those with which an earlier attempt began.
"""

import io
import os
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from aorta.files import open_regular

if TYPE_CHECKING:
    from aorta.records.schema import PositionSource
    from aorta.records.state import Save

_TAIL_BYTES = 1 << 16
"""End of a file that tells it from others: torch writes there the checksums of all that is in it."""
_FEW_PARAMETERS, _FEW_VALUES = 8, 32
"""Parameters of an optimizer, and values of each, that tell whether parameters are the same."""


class Position(NamedTuple):
    num_steps: int
    """Steps of the optimizer that had been done."""
    told_by: "PositionSource"
    """checkpoint: a file that was loaded. optimizer: its state. weights: an attempt began with them.
    program: the first attempt, which has loaded nothing."""


class Loaded:
    """What a process has loaded before its first backward pass."""

    MOST = 256

    def __init__(self) -> None:
        self.anything = False
        self.marks: list[str] = []
        """Of files, the latest last; no more than MOST are read."""

    def add_file(self, file: Any) -> None:
        self.anything = True
        if len(self.marks) < self.MOST and (mark := mark_of_file(file)) is not None:
            self.marks.append(mark)


def position_of(
    optimizers: Iterable[Any],
    loaded: Loaded,
    saves: "Sequence[Save] | None" = None,
    weights: str | None = None,
) -> Position | None:
    """Where training stands before its first step; None where nothing tells.

    saves: what earlier attempts of the run noted; None: this is the first one. weights: mark_of_weights.
    """
    num_steps = steps_of(optimizers)
    for mark in reversed(loaded.marks):
        save = _noted(mark, saves)
        # Of a file that was loaded for something else, the optimizer is not.
        if save is not None and (
            num_steps is None or save.optimizer_steps is None or save.optimizer_steps == num_steps
        ):
            return Position(save.position, "checkpoint")
    if num_steps is not None:
        return Position(num_steps, "optimizer")
    if saves is None:
        return None if loaded.anything else Position(0, "program")
    begin = _noted(weights, saves)
    return None if begin is None else Position(begin.position, "weights")


def _noted(mark: str | None, saves: "Sequence[Save] | None") -> "Save | None":
    """What was noted of this mark; None where nothing was, and where it was the same at several steps."""
    found = [save for save in saves or () if save.mark == mark]
    return found[-1] if len({save.position for save in found}) == 1 else None


def steps_of(optimizers: Iterable[Any], may_wait: bool = True) -> int | None:
    """Steps in the state of torch's optimizers; None where there is no state, or one without a count.

    Of several the one with fewest steps counts: others may take several in an iteration. may_wait: read
    counts on a device too, which waits for it.
    """
    counts = [count for one in optimizers if (count := _steps_of(one, may_wait)) is not None]
    return min(counts, default=None)


def _steps_of(optimizer: Any, may_wait: bool) -> int | None:
    for state in optimizer.state.values():
        step = state.get("step") if isinstance(state, dict) else None
        if step is not None:
            with suppress(TypeError, ValueError):  # of an optimizer that counts in its own way
                return int(step) if may_wait or not getattr(step, "is_cuda", False) else None
            return None
    return None


def mark_of_file(file: Any) -> str | None:
    """What tells a saved file from others, wherever it is copied to: of its size and its end. None where it
    cannot be read. file: a path, or a file that was written or read."""
    with suppress(Exception):
        if isinstance(file, io.BytesIO):
            with file.getbuffer() as buffer:
                return _mark("f", bytes(buffer[-_TAIL_BYTES:]), len(buffer))
        if not isinstance(file, str | os.PathLike):
            if file.writable():
                file.flush()
            file = file.name
        with open_regular(file) as opened:
            num_bytes = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, num_bytes - _TAIL_BYTES))
            return _mark("f", opened.read(_TAIL_BYTES), num_bytes)
    return None


def mark_of_weights(optimizers: Iterable[Any], world_size: int) -> str | None:
    """What tells this rank's parameters from others: a few values of a few of them. None where they cannot be
    read: on a device, where a read waits, or may be of memory that was given back; where offloading has freed
    them. world_size: with another one shards are others, and ranks would not agree."""
    marks = []
    with suppress(Exception):
        for optimizer in optimizers:
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            for parameter in parameters[:_FEW_PARAMETERS]:
                local = getattr(parameter, "_local_tensor", parameter).detach()
                if local.device.type != "cpu" or not local.is_contiguous():
                    return None
                if (
                    local.untyped_storage().nbytes()
                    < (local.storage_offset() + local.numel()) * local.element_size()
                ):
                    return None
                marks.append(zlib.crc32(repr(local.flatten()[:_FEW_VALUES].tolist()).encode()))
        return _mark("w", repr(sorted(marks)).encode(), world_size) if marks else None
    return None


def _mark(kind: str, data: bytes, number: int) -> str:
    return f"{kind}{zlib.crc32(data):x}-{number:x}"
