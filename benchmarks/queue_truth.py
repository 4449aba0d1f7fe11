"""Parts of queues.py: does the probe of hardware queues tell the truth, and what do waiting streams cost?

truth: planted lengths, counts and delays on one GPU. Every part is on its own: what fails leaves its error in
the file, the others go on. The stamps of every run go to a compressed file beside it. Needs Triton or an
NVIDIA driver. Exits 1 where a planted truth was not found.

waiting: time between kernels of one stream, by what waits beside it. A chain of small kernels is queued
behind a spin, so that the host is far ahead, and timed by two events on its stream. Beside it a kernel of one
block spins on another stream, and further streams wait for its end: by an event without timing, by one with
timing, or with a timing event of their own queued behind the wait. All variants in turn, a number of rounds.
"""

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from harness import arguments, need_gpus, write

from aorta.queues.probe.gpu import Device, DeviceMachine, warm_up
from aorta.queues.probe.kernels import NUM_SLOTS, WIDE_THREADS, PtxKernels, TritonKernels, measure_clock
from aorta.queues.probe.machine import Op, Outcome, ProbeError, Spin, Stamp
from aorta.queues.probe.priority import FLOOD_CTA_US, FLOOD_WAVES, FLOODS, SMALL_US, effect, inversion
from aorta.queues.probe.probe import conclude, parse_values, probe, probe_setting, queue_variable
from aorta.queues.probe.staircase import predicted_spins, staircase
from aorta.queues.probe.switch import CONSTANT_WITHIN, Chains, chains, measure_switch

WITHIN = 0.1
"""Relative distance at which a planted truth counts as found."""
CONTROLS = 5
SAME_SWITCH_US = 0.1
"""Distance within which two measurements of the switch between two queues are the same."""


Kept = tuple[str, list[int], Outcome]
"""Label, stream by kernel, stamps."""


class Stamped:
    """A machine that keeps the stamps of every run, and the streams of its kernels."""

    def __init__(self, machine: DeviceMachine, keep: list[Kept]) -> None:
        self.machine, self.keep = machine, keep
        self.num_streams, self.clock = machine.num_streams, machine.clock
        self.resident_ctas = machine.resident_ctas
        self.label = ""

    def run(self, program: Sequence[Op]) -> Outcome:
        outcome = self.machine.run(program)
        self.keep.append((self.label, [op.stream for op in program if isinstance(op, Spin | Stamp)], outcome))
        return outcome


def truth() -> None:
    parser = argparse.ArgumentParser(description="Planted lengths, counts and delays on one GPU.")
    parser.add_argument("--output", type=Path, default=Path("queue_truth.json"))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--settings", default="1,2,8,32", help="values of CUDA_DEVICE_MAX_CONNECTIONS")
    parser.add_argument("--setting-timeout", type=float, default=40.0, help="seconds for each value")
    given = parser.parse_args()
    need_gpus()
    values = parse_values(given.settings, queue_variable())
    bench = Bench(given.output, given.streams)
    bench.part("device", 60, lambda: open_device(bench))
    if bench.failed:
        sys.exit(1)
    bench.part("kernels", 30, lambda: both_kernels(bench))
    bench.part("spins", 10, lambda: spin_lengths(bench))
    bench.part("stamps", 10, lambda: first_stamps(bench))
    bench.part("staircase", 15, lambda: count(bench))
    bench.part("priorities", 15, lambda: priorities(bench))
    bench.part("switch 2", 25, lambda: switch(bench, 2))
    bench.part("switch 8", 15, lambda: switch(bench, 8))
    bench.write_stamps()
    for value in values:
        name, limit = f"{value} queues", given.setting_timeout
        bench.part(name, limit + 5, lambda value=value, limit=limit: setting(bench, value, limit))  # type: ignore[misc]
    bench.part("whole probe", 40, lambda: whole(bench))
    print(f"wrote {given.output} and {given.output.with_suffix('.npz')}")
    sys.exit(1 if bench.failed else 0)


class Bench:
    """Runs parts, judges, writes after each."""

    def __init__(self, output: Path, streams: int) -> None:
        self.output, self.streams = output, streams
        self.parts: dict[str, Any] = {}
        self.stamps: list[Kept] = []
        self.found: dict[str, Any] = {}
        self.failed: list[str] = []
        self.shared: Device
        self.machine: Stamped

    def part(self, name: str, budget_s: float, run: Callable[[], dict[str, Any]]) -> None:
        started = time.perf_counter()
        if "machine" in self.__dict__:
            self.machine.label = name
        try:
            with time_limit(budget_s):
                entry = run()
        except (Exception, SystemExit) as error:  # one part must not cost the others
            trace = traceback.format_exc().splitlines()[-12:]
            entry = {"error": f"{type(error).__name__}: {error}", "traceback": trace, "ok": False}
        entry["seconds"] = round(time.perf_counter() - started, 2)
        self.parts[name] = entry
        if entry.get("ok") is False:
            self.failed.append(name)
        self.show(name, entry)
        self.flush()

    def show(self, name: str, entry: dict[str, Any]) -> None:
        verdict = {True: "ok", False: "FAILED", None: "-"}[entry.get("ok")]
        said = entry.get("error") or entry.get("says", "")
        print(f"{name:14s} {verdict:7s} {entry['seconds']:6.1f} s  {said}", flush=True)

    def flush(self) -> None:
        about = {
            "torch": torch.__version__,
            "variables": {k: v for k, v in os.environ.items() if k.startswith(("CUDA_", "GPU_MAX", "HIP_"))},
            "streams": self.streams,
            "failed": self.failed,
            "parts": self.parts,
        }
        text = json.dumps(about, indent=1, default=msgspec.to_builtins)
        self.output.write_text(text)

    def write_stamps(self) -> None:
        """All runs one after the other: starts and ends in µs, streams; by run its length and label."""
        labels, streams, outcomes = zip(*self.stamps, strict=True)
        arrays: dict[str, Any] = {
            "lengths": np.array([len(outcome.start_us) for outcome in outcomes]),
            "labels": np.array(labels),
            "primed": np.array([outcome.primed for outcome in outcomes]),
            "stream": np.concatenate(streams).astype(np.int16),
            "start_us": np.concatenate([outcome.start_us for outcome in outcomes]).astype(np.float32),
            "end_us": np.concatenate([outcome.end_us for outcome in outcomes]).astype(np.float32),
        }
        np.savez_compressed(self.output.with_suffix(".npz"), **arrays)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"over its budget of {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def near(measured: float, planted: float) -> bool:
    return abs(measured / planted - 1) <= WITHIN


def open_device(bench: Bench) -> dict[str, Any]:
    bench.shared = Device(torch.device("cuda", 0))
    warm_up(bench.shared)
    try:
        machine = bench.shared.machine([0] * bench.streams)
    except ProbeError as error:  # beyond torch's pool of 32, one of which the gate uses
        print(f"{bench.streams} streams: {error}; going on with 31")
        bench.streams = 31
        machine = bench.shared.machine([0] * bench.streams)
    bench.machine = Stamped(machine, bench.stamps)
    clock = bench.shared.clock
    kernels = bench.shared.kernels
    return {
        "ok": abs(clock.host_ratio - 1) < 0.02,
        "says": f"{bench.shared.name}; {clock.source}: tick {clock.tick_ns:g} ns, read every "
        f"{clock.read_ns:.0f} ns, {clock.host_ratio:.4f} of the host's rate",
        "clock": clock,
        "by_handle": getattr(kernels, "_by_handle", None),
        "submit_us": bench.shared.launch_ms * 1e3,
        "resident_ctas": bench.shared.resident_ctas,
        "priorities": bench.shared.least_and_greatest_priority(),
    }


def both_kernels(bench: Bench) -> dict[str, Any]:
    """Triton's and PTX's kernels tell the same of a spin of 500 µs; what each costs to launch."""
    device = bench.shared.device
    entry: dict[str, dict[str, Any]] = {}
    buffer = torch.zeros((NUM_SLOTS, 2), dtype=torch.int64, device=device)
    makers: dict[str, Callable[[], Any]] = {
        "triton": lambda: TritonKernels(device, buffer),
        "ptx": lambda: PtxKernels(device, buffer, WIDE_THREADS),
    }
    for name, make in makers.items():
        try:
            kernels = make()
            clock = measure_clock(kernels, device, buffer)
            spins = [spin_us(kernels, buffer, ctas, clock.ns_per_count) for ctas in (1, 1, 1, 264)]
            entry[name] = {
                "tick_ns": clock.tick_ns,
                "spin_500_us": spins,
                "launch_us": launch_us(kernels),
                "by_handle": getattr(kernels, "_by_handle", None),
            }
        except Exception as error:
            entry[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
    worked = [value for value in entry.values() if "error" not in value]
    ok = bool(worked) and all(near(us, 500) for value in worked for us in value["spin_500_us"])
    says = "   ".join(
        f"{name}: {value['launch_us']:.1f} µs per launch"
        if "error" not in value
        else f"{name}: {value['error'][:60]}"
        for name, value in entry.items()
    )
    return {"ok": ok, "says": says, **entry}


def spin_us(kernels: Any, buffer: torch.Tensor, ctas: int, ns_per_count: float) -> float:
    buffer[0, 0], buffer[0, 1] = torch.iinfo(torch.int64).max, 0
    torch.cuda.synchronize()
    kernels.spin(torch.cuda.current_stream(), 0, round(500e3 / ns_per_count), ctas)
    torch.cuda.synchronize()
    start, end = buffer[0].tolist()
    return float(end - start) * ns_per_count / 1e3


def launch_us(kernels: Any) -> float:
    stream = torch.cuda.current_stream()
    started = time.perf_counter()
    for _ in range(200):
        kernels.stamp(stream, 1)
    us = (time.perf_counter() - started) / 200 * 1e6
    torch.cuda.synchronize()
    return us


def spin_lengths(bench: Bench) -> dict[str, Any]:
    """A spin lasts as it was told; a device full of CTAs runs at once, one more takes two waves."""
    lengths = {us: bench.machine.run([Spin(0, us)]).span_us for us in (20.0, 100.0, 1000.0, 10_000.0)}
    full = bench.shared.resident_ctas
    waves = {
        ctas: bench.machine.run([Spin(0, 300.0, ctas)]).span_us / 300.0 for ctas in (full, full + 1, 4 * full)
    }
    expected = dict(zip(waves, (1, 2, 4), strict=True))
    ok = all(near(found, us) for us, found in lengths.items())
    ok_waves = all(near(found, expected[ctas]) for ctas, found in waves.items())
    says = f"planted 20 µs: {lengths[20.0]:.2f}, 10 ms: {lengths[10_000.0]:.1f}; waves of {full} CTAs + 1: "
    return {
        "ok": ok and ok_waves,
        "says": says + " ".join(f"{found:.2f}" for found in waves.values()),
        "lengths_us": {str(us): found for us, found in lengths.items()},
        "waves": {str(ctas): found for ctas, found in waves.items()},
    }


def count(bench: Bench) -> dict[str, Any]:
    found = staircase(bench.machine)
    bench.found["queues"] = found
    rows = []
    for step in found.steps:
        order = found.order or "start"
        pairs, singles = predicted_spins(step.streams, found.queues, order)
        rows.append((step.streams, step.pair_spins, pairs, step.single_spins, singles))
    ok = found.agrees and all(near(a, b) and near(c, d) for _, a, b, c, d in rows)
    says = f"{'at least ' if found.at_least else ''}{found.queues} queues, order {found.order}, times say "
    says += f"{found.from_times}, worst time off by {found.worst_error:.1%}, primed {found.primed}"
    return {"ok": ok, "says": says, "queues": found, "measured_and_predicted_spins": rows}


def switch(bench: Bench, num_streams: int) -> dict[str, Any]:
    """Around streams of different queues, seen in every run."""
    streams, queues = list(range(num_streams)), bench.found["queues"].queues
    if queues < num_streams:
        return {"ok": None, "says": f"there are not {num_streams} queues: {queues}"}
    found, spans = chains(bench.machine, streams, apart=True)
    entry = {"chains": found, "spans_us": {name: span.round(3).tolist() for name, span in spans.items()}}
    if num_streams == 2:
        more = [
            chains(bench.machine, streams, repetitions=6, seed=seed, apart=True)[0]
            for seed in range(1, CONTROLS)
        ]
        entry["controls"] = [found.control, *[other.control for other in more]]
        entry["again"] = [other.per_switch for other in more]
    slopes = found.slopes
    controls: Any = entry.get("controls", [found.control])
    entry["ok"] = (
        found.primed
        and found.seen is not None
        and found.seen.always
        and all(control.is_zero for control in controls)
        and slopes["same"].constant
        and slopes["switching"].constant
    )
    entry["says"] = f"{streams}: {describe(found)}"
    return entry


def describe(found: Chains) -> str:
    low, high = found.per_switch.interval_us
    control = found.control.interval_us
    slopes = found.slopes
    return (
        f"{found.per_switch.us:.3f} µs per switch [{low:.3f}, {high:.3f}], same stream "
        f"{slopes['same'].us:.3f}, "
        f"recorded {slopes['recorded'].us:.3f}, no events {slopes['free'].us:.3f}; control "
        f"[{control[0]:+.4f}, {control[1]:+.4f}]; short/long {slopes['same'].short_us:.3f}/"
        f"{slopes['same'].long_us:.3f}, {slopes['switching'].short_us:.3f}/{slopes['switching'].long_us:.3f} "
        f"(constant within {CONSTANT_WITHIN:.0%}); primed {found.primed}; {found.seen}"
    )


def first_stamps(bench: Bench) -> dict[str, Any]:
    """One chain of each kind as it is: gaps between the first and the last kernels."""
    machine = bench.machine
    gaps = {}
    for num in (2, 160):
        gaps[str(num)] = np.diff(machine.run([Stamp(0)] * num).start_us).round(3).tolist()
    return {"ok": None, "says": f"first gaps {gaps['160'][:6]} µs", "gaps_us": gaps}


def priorities(bench: Bench) -> dict[str, Any]:
    def make(priorities: Sequence[int]) -> Stamped:
        machine = Stamped(bench.shared.machine(priorities), bench.stamps)
        machine.label = f"priorities {list(priorities)}"
        return machine

    _, greatest = bench.shared.least_and_greatest_priority()
    queues = bench.found["queues"].queues if "queues" in bench.found else None
    found = effect(make, greatest, queues)
    inverted = inversion(make, greatest)
    high, equal = found.high, found.equal
    # A high kernel waits for one CTA, an equal one for the waves of a flood; an inverted one for all floods.
    ok = high is not None and equal is not None and high.largest_us <= (1 + WITHIN) * FLOOD_CTA_US
    ok = ok and equal is not None and equal.p50_us >= (1 - WITHIN) * (FLOOD_WAVES - 1) * FLOOD_CTA_US
    all_floods_us = 2 * FLOODS * FLOOD_WAVES * FLOOD_CTA_US
    if inverted.prioritized_us is not None and inverted.alone_us is not None:
        ok = ok and all(near(us, all_floods_us) for us in inverted.prioritized_us)
        ok = ok and max(inverted.alone_us) < 2 * SMALL_US
    says = f"p50 start delay high {high and high.p50_us}, equal {equal and equal.p50_us}, alone "
    says += f"{found.alone and found.alone.p50_us}; inversion {inverted.inverted}: {inverted.prioritized_us} "
    says += f"(all floods: {all_floods_us:g}) against {inverted.equal_us}, alone {inverted.alone_us}; "
    says += f"high waits behind low in a queue: {found.high_behind_low}"
    return {"ok": ok, "says": says, "effect": found, "inversion": inverted}


def setting(bench: Bench, value: int, timeout_s: float) -> dict[str, Any]:
    found = probe_setting(torch.device("cuda", 0), bench.streams, value, timeout_s)
    says = f"set {value}, found {found.queues}{' or more' if found.at_least else ''}: {found.because}"
    # A device that does something else than it was told is not a failed measurement; an unclear one is.
    return {"ok": found.queues is not None, "says": says, "setting": found}


def whole(bench: Bench) -> dict[str, Any]:
    result = probe(torch.device("cuda", 0), bench.streams)
    costs = {num: measure_switch(torch.device("cuda", 0), num) for num in (2, 4, 16)}
    again = msgspec.json.decode(msgspec.json.encode(result), type=type(result))
    ok = again == result and not result.not_measured and all(cost.reason is None for cost in costs.values())
    one = result.switch.per_switch_us if result.switch else None
    other = costs[2].per_switch_us
    # The same quantity on other streams, in another machine: around two streams of different queues.
    ok = ok and one is not None and other is not None and abs(one - other) < SAME_SWITCH_US
    shown = ", ".join(f"around {num} streams {cost.per_switch_us}" for num, cost in costs.items())
    because = conclude(result.queues).because
    says = f"{result.seconds:.1f} s; {because}; per switch {one}; {shown}"
    return {"ok": ok, "says": says, "result": result, "switch": costs}


# ---- streams that only wait -------------------------------------------------------------------------

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


def waiting() -> None:
    parser = arguments("Microseconds between kernels of one stream, by what waits beside it.")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    need_gpus()
    chain = Chain()
    variants = {name: partial(chain.us_per_kernel, beside) for name, beside in VARIANTS.items()}
    rows = [
        {"beside": name, "us_per_kernel": float(np.median(us)), "low": min(us), "high": max(us)}
        for name, us in us_in_turn(variants, options.rounds).items()
    ]
    write(options.output, rows)


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


def us_in_turn(variants: Mapping[str, Callable[[], float]], num_rounds: int) -> dict[str, list[float]]:
    """Measure each variant in each round, so that a drift of the machine meets all of them.

    Leaves out a first round and prints medians in µs a kernel.
    """
    us: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(num_rounds + 1):
        for name, measure in variants.items():
            us[name].append(measure())
    for name, values in us.items():
        del values[0]
        print(f"{name:36} {np.median(values):6.3f} us a kernel   [{min(values):.3f}, {max(values):.3f}]")
    return us
