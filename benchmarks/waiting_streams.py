"""What streams that only wait cost the others: time between kernels of one stream, by what waits beside it.

    python benchmarks/waiting_streams.py --output waiting_streams.json

A chain of small kernels is queued behind a spin, so that the host is far ahead, and timed by two events on
its stream. Beside it a kernel of one block spins on another stream, and further streams wait for its end: by
an event without timing, by one with timing, or with a timing event of their own queued behind the wait. All
variants in turn, a number of rounds. Median and range over rounds.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from cases import environment
from in_turn import us_in_turn

NUM_KERNELS = 800
SPIN_CYCLES, LONG_SPIN_CYCLES = 18_000_000, 60_000_000
"""About 9 ms, in which the chain is queued, and 30 ms, for which it is waited."""


class Beside(NamedTuple):
    running: bool = True
    num_waiting: int = 0
    timed: bool = False
    """The event that is waited for."""
    marks: bool = False
    """A timing event follows each wait."""
    priority: int = 0


VARIANTS = {
    "alone": Beside(running=False),
    "a stream runs": Beside(),
    "one waits": Beside(num_waiting=1),
    "one waits, high priority": Beside(num_waiting=1, priority=-1),
    "two wait": Beside(num_waiting=2),
    "six wait": Beside(num_waiting=6),
    "one waits, timing event behind": Beside(num_waiting=1, marks=True),
    "two wait, timing events behind": Beside(num_waiting=2, marks=True),
    "one waits for a timing event": Beside(num_waiting=1, timed=True),
    "a stream runs, timing event behind": Beside(timed=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path("waiting_streams.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    chain = Chain()
    variants = {name: partial(chain.us_per_kernel, beside) for name, beside in VARIANTS.items()}
    us = us_in_turn(variants, options.rounds)
    document: dict[str, Any] = environment() | {"num_kernels": NUM_KERNELS, "us_per_kernel": us}
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))


class Chain:
    def __init__(self) -> None:
        self.x = torch.ones(64, device="cuda")
        self.runs = torch.cuda.Stream()
        self.waits = {
            priority: [torch.cuda.Stream(priority=priority) for _ in range(6)] for priority in (0, -1)
        }

    def us_per_kernel(self, beside: Beside) -> float:
        torch.cuda.synchronize()
        if beside.running:
            self._fill(beside)
        torch.cuda._sleep(SPIN_CYCLES)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(NUM_KERNELS):
            self.x.add_(1)
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / NUM_KERNELS * 1e3

    def _fill(self, beside: Beside) -> None:
        over = torch.cuda.Event(enable_timing=beside.timed)
        with torch.cuda.stream(self.runs):
            torch.cuda._sleep(LONG_SPIN_CYCLES)
            over.record()
        for stream in self.waits[beside.priority][: beside.num_waiting]:
            stream.wait_event(over)
            if beside.marks:
                torch.cuda.Event(enable_timing=True).record(stream)


if __name__ == "__main__":
    main()
