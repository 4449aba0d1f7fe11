"""Stacks of the thread that trains, as a rank samples them: rank_<n>_stacks.jsonl and its reader.

A stack is a node of a tree; its parent is the caller. Frames of the program have file and line; those of
torch and other libraries are folded to the function that the program called, without a line. Arguments and
locals are never read. Each line of the file adds to the tables that the lines before it began; one with
`begins` starts anew, as the next attempt of a run does.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import msgspec
import numpy as np

from aorta.errors import NOT_JSON
from aorta.files import read_regular
from aorta.records.seal import seal_of
from aorta.timeline.arrays import Ints

StackPhase = Literal[
    "rest", "data", "forward", "backward", "optimizer", "checkpoint", "communication", "evaluation"
]
STACK_PHASES: tuple[StackPhase, ...] = get_args(StackPhase)
"""What the functions of a stack show the thread to be in; rest: none of the others. By their places here in a
sample. communication: a call of torch.distributed that the program, or a library, makes outside of the
others. evaluation: whatever goes on in one, or in a pause that was announced."""
Doing = Literal["runs", "ready", "sleeps", "locked_out"]
Does = Doing | Literal["waits"]
"""And by the account: waits for a device that is busy."""
DOING: tuple[Doing, ...] = get_args(Doing)
"""ready: to run, but others have the cores. sleeps: a system call, a lock, another thread. locked_out: waits
for the interpreter's lock, which another thread holds; the stack is that thread's."""
Place = Literal["body", "behind_body", "no_step"]
PLACES: tuple[Place, ...] = ("body", "behind_body", "no_step")
NO_STEP = -1


MOST_BYTES = 1 << 28
"""Of a rank's file that is read; an attempt writes at most a sixteenth of it."""


Function = tuple[str, str]
"""File and outer_function of the lines of one function."""


class StackFrame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A line of the program, or a library's function that it called."""

    file: str
    """Path; of a library the name of its package; '' of what is called and has no frame of its own."""
    line: int
    """0 of a library's."""
    function: str
    """Qualified."""
    is_program: bool

    @property
    def text(self) -> str:
        """'augment(), train.py:5', 'train.py:5' of a module's own code, 'Tensor.backward of torch'."""
        name = self.outer_function.rpartition(".<locals>.")[2]
        if not self.is_program:
            return f"{name} of {self.file}" if self.file else name
        place = f"{Path(self.file).name}:{self.line}"
        return place if name.startswith("<") else f"{name}(), {place}"

    @property
    def outer_function(self) -> str:
        """Without the comprehension or lambda of it that the line is in."""
        return self.function.partition(".<locals>.<")[0]

    @property
    def function_id(self) -> Function:
        """The function of the program or of a library that the line is in."""
        return self.file, self.outer_function


class StackSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Time of a step that was sampled with one stack, in one state."""

    global_step: int
    """NO_STEP where no step was open."""
    place: int
    phase: int
    doing: int
    is_behind: bool
    """A backward pass of the step had ended before."""
    node: int
    us: int


class StackChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the file: what came since the line before."""

    begins: bool = False
    attempt: int = 0
    run_id: str | None = None
    frames: list[StackFrame] = []
    nodes: list[tuple[int, int]] = []
    """Parent (-1: none) and frame."""
    samples: list[StackSample] = []
    cpu_s: float = 0.0
    """CPU time of the sampling thread, since it began, and its time by the clock."""
    elapsed_s: float = 0.0


@dataclass(slots=True)
class Stacks:
    """All samples of one rank, as columns."""

    frames: list[StackFrame] = field(default_factory=list)
    nodes: list[tuple[int, int]] = field(default_factory=list)
    samples: list[StackSample] = field(default_factory=list)
    cpu_s: float = 0.0
    elapsed_s: float = 0.0
    _columns: Ints | None = None

    @property
    def columns(self) -> Ints:
        """[sample, field of StackSample]"""
        if self._columns is None or len(self._columns) != len(self.samples):
            rows = [msgspec.structs.astuple(sample) for sample in self.samples]
            shape = len(rows), len(StackSample.__struct_fields__)
            self._columns = np.array(rows, dtype=np.int64).reshape(shape)
        return self._columns

    def path(self, node: int) -> list[StackFrame]:
        """Of a stack, the outermost first."""
        found = []
        while node >= 0:
            node, frame = self.nodes[node]
            found.append(self.frames[frame])
        return found[::-1]


def read_stacks(path: Path, run_id: str | None = None, notes: list[str] | None = None) -> Iterator[Stacks]:
    """Stacks of each attempt in a rank's file, oldest first; nothing where there is no such file.

    A damaged or cut line, and one of another run, ends its attempt: what the lines before it say holds. That
    is added to notes, once.
    """
    try:
        data = read_regular(path, MOST_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        _note(notes, f"{path} is left out: {error.strerror or error}")
        return
    decoder = msgspec.json.Decoder(StackChunk)
    stacks, is_whole, number, num_left_out = Stacks(), False, 0, 0 if data else 1
    for line in data.splitlines():
        seal = seal_of(line)
        try:
            chunk = decoder.decode(line)
            is_own = run_id is None or chunk.run_id in (None, run_id)
        except NOT_JSON:
            is_own = False
        if is_own and chunk.begins:
            if stacks.samples:
                yield stacks
            stacks, is_whole, number = Stacks(), True, 0
        is_whole &= is_own and (seal is None or (seal.is_whole and seal.number == number))
        is_whole = is_whole and _add(stacks, chunk)
        number += 1
        num_left_out += not is_whole
    if stacks.samples:
        yield stacks
    if num_left_out:
        _note(notes, f"{path}: {num_left_out} lines of stacks are left out: damaged, cut or of another run")


def _note(notes: list[str] | None, text: str) -> None:
    if notes is not None and text not in notes:
        notes.append(text)


def joined(attempts: Iterable[Stacks]) -> Stacks:
    """One table of all attempts. A step that ran twice has the samples of its last attempt."""
    whole = Stacks()
    for stacks in attempts:
        num_frames, num_nodes = len(whole.frames), len(whole.nodes)
        again = {sample.global_step for sample in stacks.samples} - {NO_STEP}
        whole.samples = [sample for sample in whole.samples if sample.global_step not in again]
        whole.frames += stacks.frames
        whole.nodes += [
            (parent + num_nodes if parent >= 0 else -1, frame + num_frames) for parent, frame in stacks.nodes
        ]
        whole.samples += [
            msgspec.structs.replace(sample, node=sample.node + num_nodes) for sample in stacks.samples
        ]
        whole.cpu_s += stacks.cpu_s
        whole.elapsed_s += stacks.elapsed_s
    return whole


def _add(stacks: Stacks, chunk: StackChunk) -> bool:
    """False, and nothing is added, where the line refers to what no line has."""
    num_frames = len(stacks.frames) + len(chunk.frames)
    first, num_nodes = len(stacks.nodes), len(stacks.nodes) + len(chunk.nodes)
    is_sound = all(
        -1 <= parent < first + place and 0 <= frame < num_frames
        for place, (parent, frame) in enumerate(chunk.nodes)
    ) and all(
        0 <= sample.node < num_nodes
        and 0 <= sample.phase < len(STACK_PHASES)
        and 0 <= sample.doing < len(DOING)
        and 0 <= sample.place < len(PLACES)
        and 0 <= sample.us < 2**53
        and NO_STEP <= sample.global_step < 2**62
        for sample in chunk.samples
    )
    if is_sound:
        stacks.frames += chunk.frames
        stacks.nodes += chunk.nodes
        stacks.samples += chunk.samples
        stacks.cpu_s, stacks.elapsed_s = chunk.cpu_s, chunk.elapsed_s
    return is_sound
