"""GPU time that an event takes on the stream it is recorded on, without and with timing.

    python benchmarks/event_cost.py --output event_cost.json      # one GPU

A chain of small kernels is queued behind a spin, so that the host is far ahead, with nothing, one event or
two after each kernel. The second chain hands over to another stream and back for each kernel, as a collective
does, without marks and with those of the recorder: around the collective, and around the wait for it. Median
and range over rounds.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import torch
from cases import environment
from in_turn import us_in_turn

NUM_KERNELS, SPIN_CYCLES = 400, 40_000_000
"""The spin takes about 20 ms, in which the chain is queued."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path("event_cost.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    chain = Chain()
    variants = {
        name: partial(chain.us_per_kernel, after_kernel) for name, after_kernel in chain.variants.items()
    }
    us = us_in_turn(variants, options.rounds)
    document: dict[str, Any] = environment() | {"num_kernels": NUM_KERNELS, "us_per_kernel": us}
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))


class Chain:
    def __init__(self) -> None:
        self.x, self.y = torch.ones(64, device="cuda"), torch.ones(64, device="cuda")
        self.stream, self.other = torch.cuda.current_stream(), torch.cuda.Stream()
        self.plain = cycle([torch.cuda.Event() for _ in range(4 * NUM_KERNELS)])
        self.timing = cycle([torch.cuda.Event(enable_timing=True) for _ in range(4 * NUM_KERNELS)])
        self.variants: dict[str, Callable[[], None]] = {
            "kernels": lambda: None,
            "an event after each": lambda: self._record(self.plain, 1),
            "two events": lambda: self._record(self.plain, 2),
            "a timing event": lambda: self._record(self.timing, 1),
            "two timing events": lambda: self._record(self.timing, 2),
            "over to a stream and back": lambda: self._hand_over(False, False),
            "the same, collective marked": lambda: self._hand_over(True, False),
            "the same, wait marked": lambda: self._hand_over(False, True),
            "the same, both marked": lambda: self._hand_over(True, True),
        }

    def us_per_kernel(self, after_kernel: Callable[[], None]) -> float:
        torch.cuda.synchronize()
        torch.cuda._sleep(SPIN_CYCLES)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(NUM_KERNELS):
            self.x.add_(1)
            after_kernel()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / NUM_KERNELS * 1e3

    def _record(self, events: Any, num: int) -> None:
        for _ in range(num):
            next(events).record(self.stream)

    def _hand_over(self, marks_collective: bool, marks_wait: bool) -> None:
        ready, done = next(self.plain), next(self.plain)
        ready.record(self.stream)
        self.other.wait_event(ready)
        if marks_collective:
            next(self.timing).record(self.other)
        with torch.cuda.stream(self.other):
            self.y.add_(1)
        if marks_collective:
            next(self.timing).record(self.other)
        done.record(self.other)
        if marks_wait:
            next(self.timing).record(self.stream)
        self.stream.wait_event(done)
        if marks_wait:
            next(self.timing).record(self.stream)


if __name__ == "__main__":
    main()
