"""Simulated pairs of runs, with a difference and without one: the cells of comparison.py.

Steps of 40 ms; many pairs at once. A run is a level, a part that all runs of the same data share by step (a
curriculum, buckets of sequence lengths, checkpoints), and noise of its own: shared by its ranks, and of each
rank. Groups: what earlier versions were made with or checked by (EARLIER); what hid a true difference from
them (HID_DIFFERENCES); cells written down before the present engine was, on which nothing was tuned
(INVENTED); cells by another author, written down before any of them was run (KEPT_BACK).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

Floats = NDArray[np.float64]

STEP_MS = 40.0


class Runs(NamedTuple):
    """One side of many pairs."""

    step_ms: Floats
    """[pair, run, rank, step]"""
    tokens: Floats
    """[pair, run, step]; NaN where the program tells none."""
    taken: Floats
    """[pair, run, step]: share of the step in which others had the core."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Times over the step time, unless said otherwise."""

    name: str
    num_steps: int = 50
    candidate_steps: int | None = None
    """None: as many."""
    num_ranks: int = 4
    persistence: float = 0.0
    """Correlation of neighbouring steps in the noise that ranks share."""
    noise: float = 0.02
    """Standard deviation of the shared noise."""
    white: float = 0.0
    """Standard deviation of further shared noise, independent from step to step."""
    own_noise: float = 0.005
    """Standard deviation of each rank's own noise, independent from step to step."""
    slow_share: float = 0.0
    """Share of steps that take 1.5 times as long."""
    shape: Literal["normal", "skewed", "t2", "pareto"] = "normal"
    """Distribution of the shared noise."""
    gap: float = 0.0
    """Between two states of the clock."""
    dwell: float = 10.0
    """Mean number of steps in the slow state."""
    slow_state: float = 0.5
    """Share of steps in it."""
    walk: float = 0.0
    """Standard deviation of the steps of a random walk."""
    slope: float = 0.0
    """Standard deviation, between runs, of a linear change over the run."""
    settling: float = 0.0
    """Extra time of the first step, which decays to nothing (below 0: rises from it)."""
    settling_steps: float = 30.0
    wave: float = 0.0
    """Amplitude of one slow wave of random phase and 0.7 to 3 periods."""
    ringing: float = 0.0
    """Standard deviation of noise that swings with a period of 12 steps (second order)."""
    pink: float = 0.0
    """Standard deviation of noise of as much power in each octave of frequency (1/f)."""
    saw: float = 0.0
    """Height of a saw of saw_steps steps, of random phase."""
    saw_steps: int = 25
    jump: float = 0.0
    """Height of one step of the level, up or down, at a random place."""
    jump_from: float = 0.0
    """Part of the run before which the jump does not come."""
    cold_steps: int = 0
    """Leading steps that are slower by cold; each run draws 0.5 to 1.5 times as many."""
    cold: float = 0.0
    ramp: float = 0.0
    """Slowdown of the reference alone over its run, since its machine warms up."""
    pause_every: int = 0
    """Every so many steps one takes pause longer, as for a checkpoint; the phase is the run's own."""
    pause: float = 0.0
    bursts: float = 0.0
    """Standard deviation of the logarithm of the noise's size, which has a memory of 0.95."""
    neighbour: float = 0.0
    """Slowdown while a neighbour has the core: bursts of 8 steps on average, a quarter of the time."""
    data: Callable[[np.random.Generator, int, int], Floats] | None = None
    """Work of each step over the usual, [pair, step]; the same for all runs where is_same_data."""
    is_same_data: bool = True
    tells_tokens: bool = False
    """The record has the tokens of a step, which are the data's work but for fixed work of a tenth."""
    tells_taken: bool = False
    warmup: bool = False
    """Leave leading steps out by the report's rule."""
    slowdown: float = 0.0
    """Planted in the candidate."""
    runs_per_side: int = 1
    candidate_runs: int | None = None
    """None: as many."""
    run_noise: float = 0.0
    """Standard deviation between runs."""
    is_paired: bool = False
    """The same data, so that a true 3 % has to be found."""

    def pairs(self, rng: np.random.Generator, num_pairs: int) -> tuple[Runs, Runs]:
        """Reference and candidate of so many pairs."""
        longest = max(self.num_steps, self.candidate_steps or 0)
        work = None if self.data is None else self.data(rng, num_pairs, longest)
        return self._side(rng, num_pairs, work, False), self._side(rng, num_pairs, work, True)

    def num_runs(self, is_candidate: bool) -> int:
        return self.candidate_runs if is_candidate and self.candidate_runs else self.runs_per_side

    def _side(
        self, rng: np.random.Generator, num_pairs: int, work: Floats | None, is_candidate: bool
    ) -> Runs:
        num = self.candidate_steps if is_candidate and self.candidate_steps else self.num_steps
        num_runs = self.num_runs(is_candidate)
        rows = num_pairs * num_runs
        shared, taken = self._shared(rng, rows, num, is_candidate)
        level = 1 + self.slowdown * is_candidate + self.run_noise * rng.standard_normal((rows, 1))
        of_data = np.ones((rows, num))
        if work is not None:
            if not self.is_same_data:
                assert self.data is not None
                of_data = self.data(rng, rows, num)
            else:
                of_data = np.repeat(work[:, :num], num_runs, axis=0)
        shape = (rows, self.num_ranks, num)
        own = self.own_noise * rng.standard_normal(shape)
        step_ms = STEP_MS * (level * of_data)[:, None] * np.maximum(1 + shared[:, None] + own, 0.05)
        tokens = np.round(1e4 * (of_data - 0.1)) if self.tells_tokens else np.full((rows, num), np.nan)
        if not self.tells_taken:
            taken = np.full((rows, num), np.nan)
        return Runs(
            step_ms.reshape(num_pairs, num_runs, self.num_ranks, num),
            tokens.reshape(num_pairs, num_runs, num),
            taken.reshape(num_pairs, num_runs, num),
        )

    def _shared(
        self, rng: np.random.Generator, rows: int, num: int, is_candidate: bool
    ) -> tuple[Floats, Floats]:
        """Noise that the ranks share, [row, step], and the share in which a neighbour had the core."""
        scores = autoregressive(rng, rows, num, self.persistence)
        match self.shape:
            case "skewed":
                scores = np.expm1(0.6 * scores)
            case "t2":
                scores = rng.standard_t(2, (rows, num))
            case "pareto":
                scores = rng.pareto(1.5, (rows, num))
        if self.bursts:
            scores = scores * np.exp(self.bursts * autoregressive(rng, rows, num, 0.95))
        places, one = np.arange(num), (rows, 1)
        shared = self.noise * scores + 0.5 * (rng.random((rows, num)) < self.slow_share)
        shared += self.white * rng.standard_normal((rows, num))
        shared += self.walk * np.cumsum(rng.standard_normal((rows, num)), axis=1)
        shared += self.slope * rng.standard_normal(one) * np.linspace(0, 1, num)
        shared += self.settling * np.exp(-places / self.settling_steps)
        if self.gap:
            shared += self.gap * telegraph(rng, rows, num, self.dwell, self.slow_state)
        if self.wave:
            periods, phase = rng.uniform(0.7, 3, one), rng.uniform(0, 2 * math.pi, one)
            shared += self.wave * np.sin(2 * math.pi * periods * np.linspace(0, 1, num) + phase)
        if self.ringing:
            shared += self.ringing * swinging(rng, rows, num, period=12.0, decay=0.9)
        if self.pink:
            shared += self.pink * pink(rng, rows, num)
        if self.saw:
            shared += (
                self.saw
                * ((places + rng.integers(self.saw_steps, size=one)) % self.saw_steps)
                / self.saw_steps
            )
        if self.jump:
            place = num * rng.uniform(self.jump_from, 1, one)
            shared += self.jump * rng.choice([-1, 1], one) * (places >= place)
        if self.cold_steps:
            shared += self.cold * (places < rng.uniform(0.5, 1.5, one) * self.cold_steps)
        if self.pause_every:
            start = rng.integers(self.pause_every, size=one)
            shared += self.pause * ((places + start) % self.pause_every == 0)
        if self.ramp and not is_candidate:
            shared += self.ramp * np.linspace(0, 1, num)
        taken = np.zeros((rows, num))
        if self.neighbour:
            busy = telegraph(rng, rows, num, 8, 0.25) * rng.uniform(0.5, 1.5, (rows, num))
            shared += self.neighbour * busy
            taken = self.neighbour * busy / (1 + shared)
        return shared, taken


# ---- work of the steps -------------------------------------------------------------------------


def curriculum(rng: np.random.Generator, rows: int, num: int) -> Floats:
    """Four stages of growing sequences."""
    stage = (4 * np.arange(num)) // num
    return np.broadcast_to(np.array([1.0, 1.6, 2.4, 3.5])[stage], (rows, num))


def buckets(rng: np.random.Generator, rows: int, num: int) -> Floats:
    """Sequences of one of five lengths, drawn anew in each step."""
    return rng.choice([0.6, 0.8, 1.0, 1.4, 2.0], (rows, num))


def lengths(rng: np.random.Generator, rows: int, num: int) -> Floats:
    """Lengths that vary by 15 %."""
    return np.maximum(1 + 0.15 * rng.standard_normal((rows, num)), 0.3)


def checkpoints(rng: np.random.Generator, rows: int, num: int) -> Floats:
    """A checkpoint in each tenth step, a collection of garbage in each seventh."""
    places = np.arange(num)
    work = 1 + 0.8 * (places % 10 == 9) + 0.25 * (places % 7 == 6)
    return np.broadcast_to(work, (rows, num))


def evaluations(rng: np.random.Generator, rows: int, num: int) -> Floats:
    """An evaluation of 25 steps' time after each 25th."""
    return np.broadcast_to(1 + 24.0 * (np.arange(num) % 25 == 24), (rows, num))


def sawtooth(rng: np.random.Generator, rows: int, num: int) -> Floats:
    """Sequences sorted within each shard of 16 steps: from short to long, again and again."""
    return np.broadcast_to(0.7 + 0.6 * (np.arange(num) % 16) / 16, (rows, num))


def log_normal_lengths(rng: np.random.Generator, rows: int, num: int) -> Floats:
    """Long documents are rare."""
    return np.exp(0.35 * rng.standard_normal((rows, num)))


def growing_batch(rng: np.random.Generator, rows: int, num: int) -> Floats:
    """Batch size that ramps up over the first half."""
    return np.broadcast_to(np.minimum(0.4 + 1.2 * np.arange(num) / num, 1.0), (rows, num))


def two_lengths(rng: np.random.Generator, rows: int, num: int) -> Floats:
    """Batches of short sequences, and one in three of long ones."""
    return np.where(rng.random((rows, num)) < 1 / 3, 1.7, 0.8)


# ---- cells -------------------------------------------------------------------------------------


def _states(name: str, dwell: float, num_steps: int, **more: Any) -> Simulation:
    more = {"gap": 0.03, "noise": 0.004} | more
    return Simulation(name=name, dwell=dwell, num_steps=num_steps, **more)


EARLIER = [
    Simulation(name="independent steps"),
    Simulation(name="correlated 0.3", persistence=0.3),
    Simulation(name="correlated 0.6", persistence=0.6),
    Simulation(name="correlated 0.8", persistence=0.8),
    Simulation(name="correlated 0.9", persistence=0.9),
    Simulation(name="correlated 0.6, 20 steps", persistence=0.6, num_steps=20),
    Simulation(name="correlated 0.8, 20 steps", persistence=0.8, num_steps=20),
    Simulation(name="correlated 0.8, 30 steps", persistence=0.8, num_steps=30),
    Simulation(name="correlated 0.8, 100 steps", persistence=0.8, num_steps=100),
    Simulation(name="correlated 0.6, 200 steps", persistence=0.6, num_steps=200),
    Simulation(name="correlated 0.8, 200 steps", persistence=0.8, num_steps=200),
    Simulation(name="correlated 0.6, skewed", persistence=0.6, shape="skewed"),
    Simulation(name="correlated 0.6, 1 in 20 slow", persistence=0.6, slow_share=0.05),
    Simulation(name="correlated 0.6, ranks noisier than steps", persistence=0.6, own_noise=0.04),
    Simulation(name="1 rank, correlated 0.6", persistence=0.6, num_ranks=1),
    Simulation(name="3 runs a side that differ by 1 %", persistence=0.6, runs_per_side=3, run_noise=0.01),
    Simulation(name="2 runs a side that differ by 1 %", persistence=0.6, runs_per_side=2, run_noise=0.01),
    Simulation(name="slow 0.9 and white noise, 100 steps", persistence=0.9, noise=0.015, white=0.015,
               num_steps=100),
    Simulation(name="slow 0.9 and white noise, 300 steps", persistence=0.9, noise=0.015, white=0.015,
               num_steps=300),
    Simulation(name="slow 0.9 and white noise, 50 steps", persistence=0.9, noise=0.015, white=0.015),
    _states("two states, 5 steps each, 50 steps", 5, 50),
    _states("two states, 15 steps each, 100 steps", 15, 100),
    _states("two states, 40 steps each, 300 steps", 40, 300),
    _states("two states, 1 in 5 slow, 200 steps", 15, 200, slow_state=0.2),
    Simulation(name="random walk, 50 steps", walk=0.003, noise=0.0),
    Simulation(name="random walk, 200 steps", walk=0.003, noise=0.0, num_steps=200),
    Simulation(name="random walk and white noise, 50 steps", walk=0.003, noise=0.01),
    Simulation(name="random walk and white noise, 200 steps", walk=0.001, noise=0.01, num_steps=200),
    Simulation(name="correlated 0.95", persistence=0.95),
    Simulation(name="linear drift, 2 % between runs, 50 steps", slope=0.02, noise=0.01),
    Simulation(name="linear drift, 2 % between runs, 200 steps", slope=0.02, noise=0.01, num_steps=200),
    Simulation(name="40 and 300 steps, 3 % settling over 30", settling=0.03, noise=0.01, num_steps=40,
               candidate_steps=300, warmup=True),
    Simulation(name="40 and 300 steps, nothing settling", num_steps=40, candidate_steps=300, warmup=True),
    _states("regimes of 2 %, 8 steps each, 80 steps", 8, 80, gap=0.02, noise=0.005),
    _states("regimes of 6 %, 25 steps each, 150 steps", 25, 150, gap=0.06, noise=0.01),
    _states("rare regime, 1 in 10, 250 steps", 12, 250, slow_state=0.1, gap=0.08, noise=0.01),
    _states("regimes and memory 0.7, 120 steps", 12, 120, gap=0.04, noise=0.006, persistence=0.7),
    Simulation(name="slow wave of 1 %, 100 steps", wave=0.01, noise=0.01, num_steps=100),
    Simulation(name="slow wave of 2 %, 60 steps", wave=0.02, noise=0.005, num_steps=60),
    Simulation(name="walk within memory 0.5, 150 steps", walk=0.002, noise=0.01, persistence=0.5,
               num_steps=150),
    Simulation(name="tails of t with 2 degrees", shape="t2", noise=0.01),
    Simulation(name="Pareto tails, 80 steps", shape="pareto", noise=0.02, num_steps=80),
    Simulation(name="thermal ramp of 4 % over 40 in both, 120 steps", settling=-0.04, settling_steps=40,
               noise=0.008, num_steps=120, warmup=True),
    Simulation(name="thermal ramp, 60 and 240 steps", settling=-0.04, settling_steps=40, noise=0.008,
               num_steps=60, candidate_steps=240, warmup=True),
    Simulation(name="settling, 30 and 100 steps", settling=0.05, settling_steps=20, noise=0.01, num_steps=30,
               candidate_steps=100, warmup=True),
    Simulation(name="memory 0.7, 60 and 400 steps", persistence=0.7, num_steps=60, candidate_steps=400),
    Simulation(name="shared noise of 64 ranks, 0.5", persistence=0.5, num_ranks=64, own_noise=0.01),
    Simulation(name="4 runs a side that differ by 0.5 %, memory 0.4", persistence=0.4, runs_per_side=4,
               run_noise=0.005),
    Simulation(name="3 runs a side in two states, 100 steps", gap=0.03, dwell=15, noise=0.004, num_steps=100,
               runs_per_side=3),
    Simulation(name="swinging, period of 12 steps, 90 steps", ringing=0.02, noise=0.005, num_steps=90),
    Simulation(name="1/f noise, 120 steps", pink=0.015, noise=0.0, num_steps=120),
    Simulation(name="1/f and white noise, 30 steps", pink=0.01, noise=0.01, num_steps=30),
    Simulation(name="saw of 3 % over 25 steps, 110 steps", saw=0.03, noise=0.01, num_steps=110),
    Simulation(name="a jump of 2 % at a random place, 70 steps", jump=0.02, noise=0.01, num_steps=70),
    Simulation(name="15 to 45 cold steps of 4 %, 160 steps", cold=0.04, cold_steps=30, noise=0.01,
               num_steps=160, warmup=True),
    Simulation(name="ramp of 2 % in the reference alone, 100 steps", ramp=0.02, noise=0.015,
               num_steps=100, warmup=True),
    Simulation(name="memory 0.5, wave of 0.5 %, 1 in 30 slow, 250 steps", persistence=0.5, noise=0.015,
               wave=0.005, slow_share=1 / 30, num_steps=250),
    Simulation(name="a pause every 20 steps, memory 0.4, 60 and 75 steps", persistence=0.4, pause_every=20,
               pause=0.3, num_steps=60, candidate_steps=75),
    Simulation(name="bursts of noise, 200 steps", bursts=0.6, noise=0.015, persistence=0.3, num_steps=200),
    Simulation(name="3 runs against 1 that differ by 0.7 %, memory 0.5", persistence=0.5, runs_per_side=3,
               candidate_runs=1, run_noise=0.007),
    Simulation(name="walk within t tails, 400 steps", walk=0.001, shape="t2", noise=0.006, num_steps=400),
]  # fmt: skip
"""Cells of the engine before, which blocks of steps and a theory of their noise were made with."""
HID_DIFFERENCES = [
    Simulation(name="quiet, 20 steps", noise=0.01, num_steps=20),
    Simulation(name="quiet, 100 steps", noise=0.01, num_steps=100),
    Simulation(name="quiet, 200 steps", noise=0.01, num_steps=200),
    Simulation(name="wave of 2 % within the run, 100 steps", wave=0.02, noise=0.01, num_steps=100),
    Simulation(name="curriculum in four stages, same data", data=curriculum, noise=0.01, num_steps=100,
               is_paired=True),
    Simulation(name="buckets of lengths, same data", data=buckets, noise=0.01, num_steps=100, is_paired=True),
    Simulation(name="buckets of lengths, other data, tokens known", data=buckets, noise=0.01, num_steps=100,
               is_same_data=False, tells_tokens=True),
    Simulation(name="buckets of lengths, other data, tokens unknown", data=buckets, noise=0.01, num_steps=100,
               is_same_data=False),
    Simulation(name="lengths of +-15 %, same seed", data=lengths, noise=0.01, num_steps=100, is_paired=True),
    Simulation(name="checkpoint each 10th, garbage each 7th", data=checkpoints, noise=0.01, num_steps=100,
               is_paired=True),
    _states("two clock states of long dwell, 100 steps", 60, 100, noise=0.01),
    _states("two clock states, 15 steps each, 100 steps", 15, 100, noise=0.01),
    Simulation(name="bursts of a neighbour, 100 steps", neighbour=0.3, noise=0.01, num_steps=100),
    Simulation(name="bursts of a neighbour, known, 100 steps", neighbour=0.3, noise=0.01, num_steps=100,
               tells_taken=True),
    Simulation(name="a late jump of 3 %, 100 steps", jump=0.03, jump_from=0.7, noise=0.01, num_steps=100),
    Simulation(name="slow memory 0.97, 100 steps", persistence=0.97, noise=0.01, num_steps=100),
    Simulation(name="1 run against 3 that differ by 1 %", noise=0.01, num_steps=100, runs_per_side=1,
               candidate_runs=3, run_noise=0.01),
    Simulation(name="3 against 3 runs that differ by 1 %", noise=0.01, num_steps=100, runs_per_side=3,
               run_noise=0.01),
    Simulation(name="single runs that differ by 1 %, 100 steps", noise=0.01, num_steps=100, run_noise=0.01),
    Simulation(name="single runs that differ by 0.5 %, 100 steps", persistence=0.3, num_steps=100,
               run_noise=0.005),
]  # fmt: skip
INVENTED = [
    Simulation(name="sorted shards of 16 steps, same data", data=sawtooth, noise=0.01, num_steps=100,
               is_paired=True),
    Simulation(name="rare long documents, same data, memory 0.3", data=log_normal_lengths, noise=0.01,
               persistence=0.3, num_steps=100, is_paired=True),
    Simulation(name="rare long documents, other data, tokens known", data=log_normal_lengths, noise=0.012,
               num_steps=100, is_same_data=False, tells_tokens=True),
    Simulation(name="growing batch, same data, 1 in 25 slow", data=growing_batch, noise=0.01, slow_share=0.04,
               num_steps=100, is_paired=True),
    Simulation(name="evaluation each 25th of 24 steps' time, 100 steps", data=evaluations, noise=0.01,
               num_steps=100, is_paired=True),
    Simulation(name="curriculum and clock states of 2 %", data=curriculum, gap=0.02, dwell=20, noise=0.006,
               num_steps=150),
    Simulation(name="host jitter: Pareto tails and memory 0.5, 120 steps", shape="pareto", noise=0.01,
               white=0.005, num_steps=120),
    Simulation(name="1/f noise of 3 % and a pause every 15, 90 steps", pink=0.03, noise=0.003, pause_every=15,
               pause=0.4, num_steps=90),
    Simulation(name="throttling: 5 % slower from 60 % on, either way, 80 steps", jump=0.05, jump_from=0.6,
               noise=0.008, num_steps=80),
    Simulation(name="2 against 4 runs that differ by 1.5 %, 60 steps", persistence=0.4, noise=0.012,
               runs_per_side=2, candidate_runs=4, run_noise=0.015, num_steps=60),
    Simulation(name="25 steps, skewed, ranks of 2 % each", shape="skewed", noise=0.012, own_noise=0.02,
               num_steps=25),
    Simulation(name="600 steps, walk, two states of 1 % and memory 0.6", walk=0.0005, gap=0.01, dwell=50,
               noise=0.01, persistence=0.6, num_steps=600),
]  # fmt: skip
KEPT_BACK = [
    Simulation(name="packed sequences of two lengths, same data, tails of t", data=two_lengths, shape="t2",
               noise=0.006, num_steps=100, is_paired=True),
    Simulation(name="8 ranks of 3 % each, a clock of 1.5 % for 30 steps at a time", gap=0.015, dwell=30,
               noise=0.004, own_noise=0.03, num_ranks=8, num_steps=120),
    Simulation(name="3 runs a side that drift by 1 % and differ by 0.6 %", slope=0.01, run_noise=0.006,
               noise=0.01, runs_per_side=3, num_steps=80),
    Simulation(name="a saw of 7 steps, memory 0.4, 100 steps", saw=0.04, saw_steps=7, persistence=0.4,
               noise=0.01, num_steps=100),
    Simulation(name="curriculum, bursts of a neighbour known, same data", data=curriculum, neighbour=0.2,
               tells_taken=True, noise=0.008, num_steps=150, is_paired=True),
    Simulation(name="lengths of +-15 %, other data, tokens known, a pause of 6 steps", data=lengths,
               is_same_data=False, tells_tokens=True, pause_every=25, pause=6.0, noise=0.01, num_steps=100),
]  # fmt: skip
GROUPS = {
    "earlier": EARLIER, "hid_differences": HID_DIFFERENCES, "invented": INVENTED, "kept_back": KEPT_BACK,
}  # fmt: skip


# ---- noise -------------------------------------------------------------------------------------


def autoregressive(rng: np.random.Generator, rows: int, num: int, persistence: float) -> Floats:
    """Stationary series of unit variance, [row, step]."""
    fresh = rng.standard_normal((rows, num))
    if persistence == 0:
        return fresh
    fresh[:, 1:] *= math.sqrt(1 - persistence**2)
    series: Floats = lfilter([1.0], [1.0, -persistence], fresh, axis=1)
    return series


def telegraph(rng: np.random.Generator, rows: int, num: int, dwell: float, share: float) -> Floats:
    """0 and 1, stationary: 1 in that share of the steps, for dwell steps at a time on average."""
    leave = 1 / dwell
    enter = leave * share / (1 - share)
    is_slow, series = rng.random(rows) < share, np.empty((rows, num))
    for i in range(num):
        series[:, i] = is_slow
        drawn = rng.random(rows)
        is_slow = np.where(is_slow, drawn >= leave, drawn < enter)
    return series


def swinging(rng: np.random.Generator, rows: int, num: int, period: float, decay: float) -> Floats:
    """Autoregression of second order of unit variance, settled from its first step on."""
    settle = 100
    first, second = 2 * decay * math.cos(2 * math.pi / period), -(decay**2)
    fresh = rng.standard_normal((rows, num + settle))
    series: Floats = lfilter([1.0], [1.0, -first, -second], fresh, axis=1)
    variance = (1 - second) / ((1 + second) * ((1 - second) ** 2 - first**2))
    return series[:, settle:] / math.sqrt(variance)


def pink(rng: np.random.Generator, rows: int, num: int) -> Floats:
    """Noise of power 1/f from a period of eight times the run on, of unit variance over that length."""
    frequencies = np.fft.rfftfreq(8 * num)
    amplitudes = np.zeros(len(frequencies))
    amplitudes[1:] = frequencies[1:] ** -0.5
    waves = rng.standard_normal((2, rows, len(frequencies)))
    series = np.fft.irfft(amplitudes * (waves[0] + 1j * waves[1]), 8 * num)
    scale = math.sqrt(4 * float(amplitudes @ amplitudes)) / (8 * num)
    result: Floats = series[:, :num] / scale
    return result
