"""Times of competing pieces of work, taken in turns, with the ranks aligned on the device.

One timed leg on a device: the host waits until nothing runs; a spin keeps the device busy while the host
submits everything (the host is ahead, as in a training step that the device bounds); a tiny all-reduce at
the end of the spin lets all ranks start together; an event, the work, an event. Without the spin (the host
is level with the device) the same leg shows what submitting costs. There is one pair of events around the
whole leg and none within it, because timing events within it can themselves serialise streams.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from aorta.device.backend import backend_of
from aorta.device.streams import MAIN, StreamEvent, Streams
from aorta.timeline.arrays import Floats

SPIN_FACTOR = 1.5
"""Spin as a multiple of the host time that submitting took last time."""
SPIN_EXTRA_MS = 0.2
MAX_SPIN_MS = 20.0
TIMEOUT_S = 15.0
"""Seconds until work that has not ended is taken for stuck."""
POLL_S = 20e-6
"""Seconds between looks at an event."""
NUM_DRAWS = 1000
"""Bootstrap draws of an interval."""
INTERVAL = (2.5, 97.5)
"""Percentiles at which an interval ends."""


class Stuck(RuntimeError):
    """Raised where work did not end within TIMEOUT_S: ranks wait for each other, and nothing more can run."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One piece of work: submitted to MAIN and what it forks into, and joined into MAIN."""

    name: str
    submit: Callable[[], None]
    host_ahead: bool = True


@dataclass(slots=True)
class RoundTimes:
    """Times of the legs in all rounds."""

    ms: dict[str, Floats]
    """Milliseconds of every leg, [round, rank]."""

    def slowest(self, name: str) -> Floats:
        """Milliseconds of the rank that took longest, per round."""
        values: Floats = self.ms[name].max(axis=1)
        return values


class Stopwatch:
    """Stopwatch for legs on these streams; every rank of the group must measure the same ones."""

    def __init__(self, streams: Streams, device: torch.device, group: dist.ProcessGroup) -> None:
        self.streams = streams
        self.device = device
        self._backend = backend_of(device)
        self.group = group
        self.token = torch.zeros(1, device=device)
        self._spin_ms: dict[str, float] = {}
        self._cycles_per_ms = self._calibrate_spin()

    def measure(self, legs: Sequence[Leg], num_rounds: int, num_warmup: int = 2) -> RoundTimes:
        """Times of all legs in num_rounds rounds; the order of legs changes per round, alike on all ranks.

        The host waits. Raises Stuck where a leg does not end.
        """
        mine = {leg.name: np.zeros(num_rounds) for leg in legs}
        shuffle = random.Random(num_rounds)
        for number in range(-num_warmup, num_rounds):
            for leg in shuffle.sample(legs, len(legs)):
                ms = self._timed(leg)
                if number >= 0:
                    mine[leg.name][number] = ms
        return RoundTimes(self._of_all_ranks(mine))

    def finish(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait on the host for MAIN. Raises Stuck, or what a thread raised."""
        wait_for(self.streams.record(MAIN), timeout_s)
        self.streams.synchronize()

    def _timed(self, leg: Leg) -> float:
        """Milliseconds of one leg."""
        self.finish()
        if self.device.type == "cpu":
            dist.barrier(group=self.group)
        else:
            if leg.host_ahead:
                spin_ms = self._spin_ms.get(leg.name, 1.0)
                self._backend.spin(int(spin_ms * self._cycles_per_ms))
            # Behind the spin, so that the ranks meet when all their spins have ended.
            dist.all_reduce(self.token, group=self.group)
        start = self.streams.record(MAIN, timing=True)
        begun_s = time.perf_counter()
        leg.submit()
        end = self.streams.record(MAIN, timing=True)
        # Passed already: the spin ended before the host had submitted everything.
        late = self.device.type != "cpu" and leg.host_ahead and start.query()
        self._adapt_spin(leg.name, 1e3 * (time.perf_counter() - begun_s), late)
        wait_for(end, TIMEOUT_S)
        self.streams.synchronize()
        return self.streams.elapsed_ms(start, end)

    def _adapt_spin(self, name: str, submitted_ms: float, late: bool) -> None:
        spin_ms = SPIN_FACTOR * submitted_ms + SPIN_EXTRA_MS
        if late:
            spin_ms = max(spin_ms, 2 * self._spin_ms.get(name, 1.0))
        self._spin_ms[name] = min(max(spin_ms, self._spin_ms.get(name, 0.0) * 0.9), MAX_SPIN_MS)

    def _calibrate_spin(self) -> float:
        """Cycles of a spin per millisecond."""
        if self.device.type == "cpu":
            return 0.0
        cycles = 2_000_000
        for _ in range(2):  # the first one also loads the kernel
            start = self.streams.record(MAIN, timing=True)
            self._backend.spin(cycles)
            end = self.streams.record(MAIN, timing=True)
            end.synchronize()
        return cycles / self.streams.elapsed_ms(start, end)

    def _of_all_ranks(self, mine: Mapping[str, Floats]) -> dict[str, Floats]:
        table = torch.tensor(np.stack(list(mine.values())), dtype=torch.float64, device=self.device)
        tables = [torch.empty_like(table) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(tables, table, group=self.group)
        stacked = torch.stack(tables, dim=-1).cpu().numpy()
        return {name: stacked[number] for number, name in enumerate(mine)}


def wait_for(event: StreamEvent, timeout_s: float) -> None:
    """Wait on the host for an event; raise Stuck where the device does not reach it in time."""
    deadline_s = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > deadline_s:
            raise Stuck(f"work on the device did not end within {timeout_s:.0f} s")
        time.sleep(POLL_S)


class Figure(msgspec.Struct, frozen=True):
    """A number made of medians over rounds, with the interval that holds 95 % of its bootstrap draws."""

    value: float
    low: float
    high: float


def figure_of(columns: Mapping[str, Floats], figure: Callable[[Mapping[str, float]], float]) -> Figure:
    """Value of figure(medians) with its interval; seeded, so that the same data gives the same interval.

    Whole rounds are drawn, all columns together, because legs of one round share clocks and temperature.
    """
    names = list(columns)
    data = np.stack([columns[name] for name in names])
    value = figure(dict(zip(names, np.median(data, axis=1).tolist(), strict=True)))
    draws = np.random.default_rng(0).integers(0, data.shape[1], (NUM_DRAWS, data.shape[1]))
    medians = np.median(data[:, draws], axis=2)
    values = [figure(dict(zip(names, row, strict=True))) for row in medians.T.tolist()]
    low, high = np.percentile(values, INTERVAL)
    return Figure(value, float(low), float(high))


def median_of(values: Floats) -> Figure:
    """The median with its interval."""
    return figure_of({"x": values}, lambda medians: medians["x"])
