"""What noting the host's parts of a step costs: hooks, and the module of a collective.

    python benchmarks/host_notes.py --output host_notes_cpu.json

Blocks with and without in turn, in one process: a backward pass of one element, an SGD step of one parameter,
a batch of a DataLoader, and the note of a collective with the module beside it. The thread's own time,
medians of the differences of neighbouring blocks, with a bootstrap interval.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from cases import environment
from torch.utils.data import DataLoader, TensorDataset

from aorta.recording.calls import CollectiveCall, Group, RecordedStep
from aorta.recording.host.spans import HostWatch
from aorta.recording.journal import Journal
from aorta.timeline.statistics import median_interval

CALLS = 200
PAIRS = 200


def us(work: Callable[[], Any], journal: Journal) -> float:
    journal.current = RecordedStep(0, 0, 0, None)
    start = time.thread_time_ns()
    for _ in range(CALLS):
        work()
    return (time.thread_time_ns() - start) / CALLS / 1e3


def hooks(journal: Journal, work: Callable[[], Any]) -> dict[str, Any]:
    watch = HostWatch(journal)
    differences, without = [], []
    for _ in range(PAIRS):
        off = us(work, journal)
        watch.install(waits_for_device=False)
        differences.append(us(work, journal) - off)
        watch.uninstall()
        without.append(off)
    median, low, high = median_interval(np.array(differences))
    return {"added_us": median, "interval": [low, high], "without_us": float(np.median(without))}


def module(journal: Journal) -> dict[str, Any]:
    """Setting the module of a call beside leaving it at its default."""
    group = Group("0", "default", [0, 1], "gloo")

    def plain() -> None:
        call = CollectiveCall(group, "all_reduce", 4, "float32", False)
        call.seq = 1

    def named() -> None:
        call = CollectiveCall(group, "all_reduce", 4, "float32", False)
        call.seq = 1
        call.module = journal.module

    journal.module = "layers.3"
    differences = [us(named, journal) - us(plain, journal) for _ in range(PAIRS)]
    median, low, high = median_interval(np.array(differences))
    return {"added_us": median, "interval": [low, high]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    journal = Journal()
    parameter = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1e-9)
    loader = DataLoader(TensorDataset(torch.ones(1 << 20, 1)), batch_size=None)
    batches = iter(loader)
    results = {
        "backward": hooks(journal, lambda: parameter.sum().backward()),
        "optimizer": hooks(journal, optimizer.step),
        "batch": hooks(journal, lambda: next(batches)),
        "module of a collective": module(journal),
    }
    for name, row in results.items():
        low, high = row["interval"]
        print(f"{name:24s} +{row['added_us']:.2f} us [{low:.2f}, {high:.2f}]")
    if options.output is not None:
        document = environment() | {"added_us_per_call": results}
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))


if __name__ == "__main__":
    main()
