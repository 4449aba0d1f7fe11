"""Write the traces of this folder that no profiler recorded: python -m tests.data.make_traces"""

import gzip
import random
import shutil
import tempfile
from pathlib import Path

from tests.traces import trace_writers
from tests.why.replay.by_hand import COMM, COMPUTE, HandTrace

FOLDER = Path(__file__).parent
NUM_STEPS = 5
UNITS = ("embed", "blocks.0", "blocks.1", "blocks.2")
LOADING_US = (100.0, 1000.0)
"""Rank 1 loads its batch 0.9 ms longer, in each step."""


def main() -> None:
    kineto = empty_folder("traces_kineto")
    vendors = empty_folder("traces_vendors")
    with tempfile.TemporaryDirectory() as name:
        for rank in sharded_training():
            pack(rank.write(Path(name)), kineto)
        for name_of_file, write in (
            ("908_results.json", trace_writers.write_rocprofv3_json),
            ("908_results.db", trace_writers.write_rocpd),
            ("report1.sqlite", trace_writers.write_nsys),
        ):
            write(Path(name) / name_of_file)
            pack(Path(name) / name_of_file, vendors)


def empty_folder(name: str) -> Path:
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def pack(path: Path, folder: Path) -> None:
    (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))


def sharded_training() -> list[HandTrace]:
    """Two ranks that gather each unit, compute, and scatter its gradient; FSDP's order of calls."""
    ranks = [Rank(number) for number in range(2)]
    for step in range(NUM_STEPS):
        begin = [rank.trace.host for rank in ranks]
        for rank, loading_us in zip(ranks, LOADING_US, strict=True):
            rank.load(loading_us)
        for unit in UNITS:
            collective(ranks, "allgather", unit, 180.0)
            compute(ranks, "gemm_forward", 220.0)
        for unit in reversed(UNITS):
            collective(ranks, "allgather", unit, 180.0)
            compute(ranks, "gemm_backward", 430.0)
            collective(ranks, "reduce_scatter", unit, 260.0, is_awaited=False)
        for rank in ranks:
            rank.optimize()
        for rank, start in zip(ranks, begin, strict=True):
            rank.trace.step(step, start, rank.trace.host)
    return [rank.trace for rank in ranks]


class Rank:
    """One rank's host and its two streams, each free from a time on."""

    def __init__(self, number: int) -> None:
        self.trace = HandTrace(number, world=2)
        self.random = random.Random(number)
        self.free_us = {COMPUTE: 0.0, COMM: 0.0}

    def load(self, us: float) -> None:
        start = self.trace.host
        self.trace.think(us + self.random.uniform(0, 40))
        self.trace.scope(
            "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", start, self.trace.host
        )

    def after(self, stream: int, other: int) -> None:
        """Make the stream wait for all that the other one has so far."""
        self.trace.wait(stream, self.trace.record(), other)
        self.free_us[stream] = max(self.free_us[stream], self.free_us[other])

    def ready_us(self, stream: int) -> float:
        """Earliest start of what is launched now."""
        return max(self.free_us[stream], self.trace.host + 8.0) + 1.5

    def kernel(self, name: str, us: float) -> None:
        start = self.ready_us(COMPUTE)
        self.trace.kernel(name, start, us, grid=512)
        self.free_us[COMPUTE] = start + us

    def optimize(self) -> None:
        self.after(COMPUTE, COMM)
        self.kernel("multi_tensor_adam", 90.0 + self.random.uniform(0, 5))
        self.trace.synchronise(self.free_us[COMPUTE] + 6.0)


def compute(ranks: list[Rank], name: str, us: float) -> None:
    for rank in ranks:
        rank.after(COMPUTE, COMM)
        for _ in range(3):
            rank.kernel(name, us / 3 + rank.random.uniform(0, 4))


def collective(ranks: list[Rank], op: str, unit: str, us: float, is_awaited: bool = True) -> None:
    """Transfer for `us` from the moment at which the last rank comes."""
    starts = []
    for rank in ranks:
        if not is_awaited:  # the gradient comes from the compute stream
            rank.after(COMM, COMPUTE)
        starts.append(rank.ready_us(COMM))
    end = max(starts) + us
    for rank, start in zip(ranks, starts, strict=True):
        begin = rank.trace.host
        rank.trace.collective(op, start, end - start)
        rank.trace.scope(f"FSDP::{op} ({unit})", begin - 0.5, rank.trace.host)
        rank.free_us[COMM] = end


if __name__ == "__main__":
    main()
