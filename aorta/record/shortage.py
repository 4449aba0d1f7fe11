"""Says what held memory when a rank has died of too little: from the exception, and from what is still there.

The exception's frames keep the program's variables, and with them graphs and outputs, until the process ends.
An exception that the program caught and lived with is not looked at.
"""

import gc
import os
import re
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

import msgspec
import torch

from aorta.device.backend import accelerator
from aorta.record.census import LAST_NODE, census
from aorta.record.collective_names import qualified_names
from aorta.record.run_folder import Claim
from aorta.record.stack_tree import StackTree
from aorta.records.libraries import library_of
from aorta.records.memory import MemoryShortage, write_shortage
from aorta.records.stacks import STACK_PHASES
from aorta.steps.notes import RecordedStep

WITHIN_S = 1.0
"""Limit of a look while the program goes on."""
_WORDS = re.compile(
    r"(CUDA|HIP) out of memory|CUDA error: out of memory|hipErrorOutOfMemory|can't allocate memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure 2 'out of memory'"
)
"""Of torch's allocators, the driver, cuBLAS and NCCL."""
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_DEVICE = re.compile(r"\bGPU (\d+)\b")
_ASKED = re.compile(rf"[Tt]ried to allocate {_SIZE}")
_TOTAL = re.compile(rf"total capacity of {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free")
_ALLOWED = re.compile(rf"{_SIZE} allowed")
_ALLOCATED = re.compile(rf"{_SIZE} is allocated by PyTorch")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")


def memory_error(error: BaseException | None) -> BaseException | None:
    """The exception that says that memory ran out: this one, or one that it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return error
        if isinstance(error, RuntimeError) and _WORDS.search(str(error)):
            return error
        error = error.__cause__ or error.__context__
    return None


def note_shortage(
    folder: Path, claim: Claim, rank: int, error: BaseException, step: RecordedStep | None
) -> None:
    """Write rank_<n>_memory.json where a program has died of too little memory. Raises nothing."""
    of_memory = memory_error(error)
    if of_memory is not None:
        with suppress(Exception):  # it goes through all objects of the process, whatever these are
            _write(folder, claim, rank, shortage_of(of_memory, step))


def note_nearness(
    folder: Path, claim: Claim, rank: int, device: torch.device, step: RecordedStep, limit_bytes: int
) -> None:
    """Write rank_<n>_memory.json while a program goes on with little memory left, before a backward pass.

    Variables of functions that run are not read, since that would keep what they hold. Raises nothing.
    """
    with suppress(Exception):
        found = census(device, step.first_node, longest_s=WITHIN_S)
        memory = accelerator().memory_of(device.index or 0)
        shortage = MemoryShortage(
            why="near the limit",
            global_step=step.global_step,
            phase="forward",
            device=str(device),
            limit_bytes=limit_bytes,
            allocated_bytes=None if memory is None else memory[0],
            unused_bytes=None if memory is None else memory[1] - memory[0],
            held=found.held,
            is_whole=found.is_whole and not gc.get_freeze_count(),
            expands_segments=_expands_segments(),
        )
        _write(folder, claim, rank, shortage)


def _write(folder: Path, claim: Claim, rank: int, shortage: MemoryShortage) -> None:
    write_shortage(
        folder, rank, msgspec.structs.replace(shortage, run_id=claim.run_id, attempt=claim.attempt)
    )


def shortage_of(error: BaseException, step: RecordedStep | None) -> MemoryShortage:
    """What the exception says, and who holds the device's memory. step: that was open."""
    text = str(error)
    device = _device_of(text)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    phase, place = _where(error.__traceback__)
    if phase == "rest" and step is not None and not any(note.kind == "backward" for note in step.host_notes):
        phase = "forward"  # the loss, or what else the loop does before a backward pass
    has_begun = step is not None and step.body_end is None
    first_of_step = 0 if step is None else step.first_node if has_begun else LAST_NODE
    gc.unfreeze()  # what the program has frozen is not among the objects that Python tells
    found = census(device, first_of_step, frames)
    called = _called(frames)
    module = found.module if phase == "backward" else _name_of(called)
    models = called[-1:] or _models_of(frames)
    if phase in ("forward", "rest") and models and not any(one.training for one in models):
        phase = "evaluation"
    total, allowed = _bytes(_TOTAL, text), _bytes(_ALLOWED, text)
    limits = [size for size in (total, allowed) if size is not None]
    allocated, unused = _bytes(_ALLOCATED, text), _bytes(_UNUSED, text)
    if allocated is None and device.type != "cpu":
        counted = accelerator().memory_of(device.index or 0)
        allocated, unused = (None, None) if counted is None else (counted[0], counted[1] - counted[0])
    return MemoryShortage(
        why="out of memory",
        global_step=None if step is None else step.global_step + (not has_begun),
        phase=phase,
        place=place,
        module=module,
        device=str(device),
        asked_bytes=_bytes(_ASKED, text),
        limit_bytes=min(limits, default=None),
        allocated_bytes=allocated,
        unused_bytes=unused,
        free_bytes=_bytes(_FREE, text),
        held=found.held,
        is_whole=found.is_whole,
        expands_segments=None if device.type == "cpu" else _expands_segments(),
    )


def _expands_segments() -> bool:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    return any("expandable_segments:True" in os.environ.get(name, "") for name in names)


def _bytes(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else round(float(found[1]) * _UNITS[found[2]])


def _device_of(text: str) -> torch.device:
    """The one that the message names; else the process's own, as of NCCL and cuBLAS."""
    named = _DEVICE.search(text)
    device = accelerator()
    if named is not None:
        return torch.device(device.torch_type, int(named[1]))
    is_of_host = "CPUAllocator" in text or not device.is_initialized() or not device.is_device
    return torch.device("cpu") if is_of_host else torch.device(device.torch_type, device.current_index())


def _where(trace: TracebackType | None) -> tuple[str, str]:
    """Phase, and the innermost line of the program."""
    tree = StackTree()
    walked = [(tree.known(frame.f_code), line) for frame, line in traceback.walk_tb(trace)]
    node, phase = tree.add(walked[::-1])
    while node >= 0:
        caller, number = tree.nodes[node]
        if tree.frames[number].is_program:
            return STACK_PHASES[phase], tree.frames[number].text
        node = caller
    return STACK_PHASES[phase], ""


def _models_of(frames: list[FrameType]) -> list[torch.nn.Module]:
    """Those with weights that the innermost function of the program has."""
    for frame in frames[::-1]:
        if not library_of(frame.f_code.co_filename):
            models = [one for one in frame.f_locals.values() if issubclass(type(one), torch.nn.Module)]
            if models := [one for one in models if next(one.parameters(), None) is not None]:
                return models
    return []


def _called(frames: list[FrameType]) -> list[torch.nn.Module]:
    """Modules that were being called, the outermost first."""
    return [
        module
        for frame in frames
        if frame.f_code.co_name == "_call_impl"
        and isinstance(module := frame.f_locals.get("self"), torch.nn.Module)
    ]


def _name_of(called: list[torch.nn.Module]) -> str:
    """Of the innermost, in the outermost."""
    if not called:
        return ""
    named = qualified_names(called[0]).get(id(called[-1]))
    return type(called[-1]).__name__ if named is None else named[1]
