"""Simulated runs without a difference, and with one: the cells of comparison.py.

Steps of 40 ms, noise that all ranks share and noise of each rank. Groups: what the method was made with, what
it was made with because blocks of steps break there (two states, drifts, settling), cells written down
before the first of them was run, and a second set of those (KEPT_BACK_AGAIN), written down before drifts that
short runs cannot show were allowed for, and run once that was done.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

STEP_MS = 40.0


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
    cold_steps: int = 0
    """Leading steps that are slower by cold; each run draws 0.5 to 1.5 times as many."""
    cold: float = 0.0
    ramp: float = 0.0
    """Slowdown of the reference alone over its run, since its machine warms up."""
    pause_every: int = 0
    """Every so many steps one takes pause longer, as for a checkpoint."""
    pause: float = 0.0
    bursts: float = 0.0
    """Standard deviation of the logarithm of the noise's size, which has a memory of 0.95."""
    warmup: bool = False
    """Leave leading steps out by the report's rule."""
    slowdown: float = 0.0
    """Planted in the candidate."""
    runs_per_side: int = 1
    candidate_runs: int | None = None
    """None: as many."""
    run_noise: float = 0.0
    """Standard deviation between runs."""

    def run(self, rng: np.random.Generator, is_candidate: bool = False) -> Floats:
        """Step times [rank, step]."""
        num = self.candidate_steps if is_candidate and self.candidate_steps else self.num_steps
        own = self.own_noise * rng.standard_normal((self.num_ranks, num))
        level = 1 + self.slowdown * is_candidate + self.run_noise * rng.standard_normal()
        shared = self._shared(rng, num)
        if self.ramp and not is_candidate:
            shared += self.ramp * np.linspace(0, 1, num)
        return STEP_MS * level * (1 + shared + own)

    def num_runs(self, is_candidate: bool) -> int:
        return self.candidate_runs if is_candidate and self.candidate_runs else self.runs_per_side

    def _shared(self, rng: np.random.Generator, num: int) -> Floats:
        scores = autoregressive(rng, num, self.persistence)
        match self.shape:
            case "skewed":
                scores = np.expm1(0.6 * scores)
            case "t2":
                scores = rng.standard_t(2, num)
            case "pareto":
                scores = rng.pareto(1.5, num)
        if self.bursts:
            scores = scores * np.exp(self.bursts * autoregressive(rng, num, 0.95))
        shared = self.noise * scores + 0.5 * (rng.random(num) < self.slow_share)
        shared += self.white * rng.standard_normal(num)
        shared += self.walk * np.cumsum(rng.standard_normal(num))
        shared += self.slope * rng.standard_normal() * np.linspace(0, 1, num)
        shared += self.settling * np.exp(-np.arange(num) / self.settling_steps)
        if self.gap:
            shared += self.gap * telegraph(rng, num, self.dwell, self.slow_state)
        if self.wave:
            periods, phase = rng.uniform(0.7, 3), rng.uniform(0, 2 * math.pi)
            shared += self.wave * np.sin(2 * math.pi * periods * np.linspace(0, 1, num) + phase)
        return shared + self._further(rng, num)

    def _further(self, rng: np.random.Generator, num: int) -> Floats:
        """Noise of the second set of cells kept back. Draws nothing for other cells, whose pairs stay."""
        places, shared = np.arange(num), np.zeros(num)
        if self.ringing:
            shared += self.ringing * swinging(rng, num, period=12.0, decay=0.9)
        if self.pink:
            shared += self.pink * pink(rng, num)
        if self.saw:
            shared += self.saw * ((places + rng.integers(self.saw_steps)) % self.saw_steps) / self.saw_steps
        if self.jump:
            shared += self.jump * rng.choice([-1, 1]) * (places >= rng.integers(num))
        if self.cold_steps:
            shared += self.cold * (places < rng.uniform(0.5, 1.5) * self.cold_steps)
        if self.pause_every:
            shared += self.pause * ((places + rng.integers(self.pause_every)) % self.pause_every == 0)
        return shared


def _states(name: str, dwell: float, num_steps: int, **more: Any) -> Simulation:
    more = {"gap": 0.03, "noise": 0.004} | more
    return Simulation(name=name, dwell=dwell, num_steps=num_steps, **more)


NO_DIFFERENCE = [
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
]
BLOCKS_BREAK = [
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
]  # fmt: skip
KEPT_BACK = [
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
    Simulation(name="shared noise of 4 ranks, 0.5", persistence=0.5, num_ranks=4, own_noise=0.01),
    Simulation(name="shared noise of 64 ranks, 0.5", persistence=0.5, num_ranks=64, own_noise=0.01),
    Simulation(name="shared noise of 512 ranks, 0.5", persistence=0.5, num_ranks=512, own_noise=0.01),
    Simulation(name="4 runs a side that differ by 0.5 %, memory 0.4", persistence=0.4, runs_per_side=4,
               run_noise=0.005),
    Simulation(name="3 runs a side in two states, 100 steps", gap=0.03, dwell=15, noise=0.004, num_steps=100,
               runs_per_side=3),
]  # fmt: skip
KEPT_BACK_AGAIN = [
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
"""Among them levels that no single run tells: after a jump, or of the one machine that warms, the level
of a run is not its job's."""
PLANTED = [
    Simulation(name="3 % slower", slowdown=0.03),
    Simulation(name="3 % slower, correlated 0.3", slowdown=0.03, persistence=0.3),
    Simulation(name="3 % slower, correlated 0.6", slowdown=0.03, persistence=0.6),
    Simulation(name="0.3 % slower, below what can be seen", slowdown=0.003),
    Simulation(name="3 % slower, 3 runs a side", slowdown=0.03, runs_per_side=3, run_noise=0.002),
]
ABOUT_TWO_RUNS = [
    Simulation(name="one run a side that differ by 0.5 %", persistence=0.3, run_noise=0.005),
    Simulation(name="one run a side that differ by 1 %", persistence=0.3, run_noise=0.01),
]
"""The runs do differ: what is called is right of these two runs, which is what the headline says, and would
be wrong of the jobs that they come from."""
GROUPS = {
    "no_difference": NO_DIFFERENCE,
    "blocks_break": BLOCKS_BREAK,
    "kept_back": KEPT_BACK,
    "kept_back_again": KEPT_BACK_AGAIN,
    "planted": PLANTED,
    "about_two_runs": ABOUT_TWO_RUNS,
}


def autoregressive(rng: np.random.Generator, num: int, persistence: float) -> Floats:
    """A stationary series of unit variance."""
    fresh = rng.standard_normal(num)
    series = np.empty(num)
    series[0] = fresh[0]
    scale = math.sqrt(1 - persistence**2)
    for i in range(1, num):
        series[i] = persistence * series[i - 1] + scale * fresh[i]
    return series


def telegraph(rng: np.random.Generator, num: int, dwell: float, share: float) -> Floats:
    """0 and 1, stationary: 1 in that share of the steps, for dwell steps at a time on average."""
    leave = 1 / dwell
    enter = leave * share / (1 - share)
    is_slow, series = rng.random() < share, np.empty(num)
    for i in range(num):
        series[i] = is_slow
        is_slow = rng.random() >= leave if is_slow else rng.random() < enter
    return series


def swinging(rng: np.random.Generator, num: int, period: float, decay: float) -> Floats:
    """Autoregression of second order of unit variance, settled from its first step on."""
    settle = 100
    fresh, series = rng.standard_normal(num + settle), np.zeros(num + settle)
    first, second = 2 * decay * math.cos(2 * math.pi / period), -(decay**2)
    for i in range(2, len(series)):
        series[i] = first * series[i - 1] + second * series[i - 2] + fresh[i]
    variance = (1 - second) / ((1 + second) * ((1 - second) ** 2 - first**2))
    return series[settle:] / math.sqrt(variance)


def pink(rng: np.random.Generator, num: int) -> Floats:
    """Noise of power 1/f from a period of eight times the run on, of unit variance over that length."""
    frequencies = np.fft.rfftfreq(8 * num)
    amplitudes = np.zeros(len(frequencies))
    amplitudes[1:] = frequencies[1:] ** -0.5
    waves = rng.standard_normal((2, len(frequencies)))
    series = np.fft.irfft(amplitudes * (waves[0] + 1j * waves[1]), 8 * num)
    scale = math.sqrt(4 * float(amplitudes @ amplitudes)) / (8 * num)
    return series[:num] / scale
