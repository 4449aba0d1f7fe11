"""Runs a workload as the harness does, only without timing: fork, iteration, join."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from aorta.device.streams import MAIN, ThreadStreams
from aorta.queues.workload import Context, Workload, WorkloadOptions

CPU = torch.device("cpu")


@dataclass
class Driven:
    """A workload that is set up, and how many pieces each stream has got so far."""

    workload: Workload
    streams: ThreadStreams
    pieces: "Counter[int]"
    names: "Counter[str]"

    def iterate(self, num: int, join: bool = True, work: Callable[[int], None] | None = None) -> None:
        """`join` False: iterations follow each other on each stream, and on nothing else (mode `none`)."""
        for index in range(num):
            if join or index == 0:
                start = self.streams.record(MAIN)
                for stream in range(len(self.streams)):
                    self.streams.wait(stream, start)
            (work or self.workload.iteration)(index)
            if join:
                for stream in range(len(self.streams)):
                    self.streams.wait(MAIN, self.streams.record(stream))
        self.streams.synchronize()


@contextmanager
def driven(
    kind: type[Workload],
    num_streams: int,
    options: WorkloadOptions | None = None,
    group: dist.ProcessGroup | None = None,
) -> Iterator[Driven]:
    streams = ThreadStreams(num_streams)
    pieces: Counter[int] = Counter()
    names: Counter[str] = Counter()

    def span(stream: int, name: str, work: Callable[[], object]) -> None:
        assert 0 <= stream < num_streams
        pieces[stream] += 1
        names[name] += 1
        streams.submit(stream, work)

    world_size = 1 if group is None else dist.get_world_size()
    rank = 0 if group is None else dist.get_rank()
    context = Context(streams, CPU, "small", rank, world_size, group, 7, span)
    options = options or kind.Options()
    assert kind.refusal(num_streams, options, "cpu", world_size) is None
    workload = kind(context, options)
    try:
        workload.setup()
        yield Driven(workload, streams, pieces, names)
    finally:
        workload.teardown()
        streams.close()
