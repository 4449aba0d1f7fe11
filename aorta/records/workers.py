"""What the workers of a rank's DataLoaders do, as each samples itself: rank_<n>_workers.jsonl and its reader.

Several processes append to the file, whole lines only. Each line is complete in itself: a worker that was
killed, or a line that is damaged, takes no other one with it.
"""

from pathlib import Path
from typing import Literal, get_args

import msgspec

from aorta.errors import NOT_JSON
from aorta.files import read_regular
from aorta.records.seal import seal_of
from aorta.records.stacks import DOING, MOST_BYTES, StackFrame

WorkerState = Literal["starts", "fetches", "hands_over", "waits"]
WORKER_STATES: tuple[WorkerState, ...] = get_args(WorkerState)
"""starts: before it asks for its first batch. fetches: data set and collate function run. hands_over: it has
no batch to make, and its feeder thread pickles or sends one. waits: it has nothing to do."""
NOT_AWAITED, AWAITED, EVALUATES = range(3)
"""Whether the process that trains waits for a batch of a loader meanwhile; EVALUATES: with autograd off."""


class WorkerSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Time that was sampled with one stack, in one state."""

    state: int
    awaited: int
    doing: int
    node: int
    """-1 where no function of the program or of a library was seen."""
    us: int
    num: int
    """Samples that it is the sum of."""


class WorkerChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the file: what came of one worker since its line before. Tables are of this line alone."""

    run_id: str | None = None
    iterator: int = 0
    """Tells workers of one iterator over a loader from others."""
    worker: int = 0
    num_workers: int = 0
    dataset: str = ""
    """Name of its type."""
    frames: list[StackFrame] = []
    nodes: list[tuple[int, int]] = []
    """Parent (-1: none) and frame."""
    samples: list[WorkerSample] = []
    num_batches: int = 0
    draws: bool | None = None
    """Whether the random states of torch, numpy or Python changed while it made batches; None: not looked."""
    cpu_s: float = 0.0
    """CPU time of the sampling thread since the worker began, and the worker's time by the clock."""
    elapsed_s: float = 0.0

    def frames_of(self, sample: WorkerSample) -> list[StackFrame]:
        """Of its stack, the outermost first."""
        found, node = [], sample.node
        while node >= 0:
            node, frame = self.nodes[node]
            found.append(self.frames[frame])
        return found[::-1]

    def us_of(self, *states: WorkerState) -> int:
        """While a batch was awaited."""
        return sum(
            one.us for one in self.samples if one.awaited == AWAITED and WORKER_STATES[one.state] in states
        )


def read_workers(path: Path, run_id: str | None = None) -> list[WorkerChunk]:
    """Lines of a rank's file; damaged ones, and those of another run, are left out. Empty without a file."""
    try:
        data = read_regular(path, MOST_BYTES)
    except OSError:
        return []
    decoder = msgspec.json.Decoder(WorkerChunk)
    chunks = []
    for line in data.splitlines():
        seal = seal_of(line)
        try:
            chunk = decoder.decode(line)
        except NOT_JSON:
            continue
        is_own = run_id is None or chunk.run_id in (None, run_id)
        if is_own and seal is not None and seal.is_whole and _is_sound(chunk):
            chunks.append(chunk)
    return chunks


def _is_sound(chunk: WorkerChunk) -> bool:
    """Whether it refers to nothing that it has not."""
    return all(
        -1 <= parent < place and 0 <= frame < len(chunk.frames)
        for place, (parent, frame) in enumerate(chunk.nodes)
    ) and all(
        -1 <= one.node < len(chunk.nodes)
        and 0 <= one.state < len(WORKER_STATES)
        and 0 <= one.awaited <= EVALUATES
        and 0 <= one.doing < len(DOING)
        and 0 <= one.us < 2**53
        and 0 < one.num < 2**31
        for one in chunk.samples
    )
