"""Runs the parts of the probe on a GPU, in this process or, for each number of queues, in a fresh one."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

import aorta
from aorta.device.backend import QueueLimit, accelerator
from aorta.queues.catalogue import PROBE_PARTS
from aorta.queues.probe.gpu import Device, warm_up
from aorta.queues.probe.machine import ProbeClock, ProbeError, check_streams
from aorta.queues.probe.priority import EFFECT_STREAMS, Effect, effect
from aorta.queues.probe.staircase import QueueCount, staircase
from aorta.queues.probe.switch import SwitchCost, switch_cost

VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "GPU_MAX_HW_QUEUES", "DEBUG_HIP_IGNORE_STREAM_PRIORITY")
"""Environment variables that set queues and priorities: a result keeps their values."""
SWITCH_STREAMS = 2
"""Streams that the chains of the switch cost go around."""
SCHEMA = 6
TIMEOUT_S = 120.0
"""Longest wait for the process of one setting."""


def probe(device: torch.device, num_streams: int = 64, parts: Sequence[str] = PROBE_PARTS) -> "ProbeResult":
    """Probes streams of priority 0; the host waits. ProbeError where there is no GPU or no clock to read.

    A part that fails leaves null and its reason, and so do the parts that need what it would have found.
    """
    check_streams(num_streams)
    started = time.perf_counter()
    shared = Device(device)
    warm_up(shared)
    machine = shared.machine([0] * num_streams)
    _, greatest = shared.least_and_greatest_priority()
    reasons: dict[str, str] = {}
    results: dict[str, Any] = dict.fromkeys(PROBE_PARTS)

    def measure(part: str, run: Callable[[], Any]) -> None:
        if part not in parts:
            reasons[part] = "not asked for"
        else:
            try:
                results[part] = run()
            except (ProbeError, RuntimeError) as error:
                reasons[part] = " ".join(str(error).split())

    measure("queues", lambda: staircase(machine))
    conclusion = conclude(results["queues"])
    num_queues = None if conclusion.at_least else conclusion.queues
    measure("switch", lambda: switch_cost(shared.machine([0] * SWITCH_STREAMS)))

    def effect_of_priority() -> Effect:
        if num_queues is not None and num_queues < EFFECT_STREAMS:
            raise ProbeError(
                f"{EFFECT_STREAMS} streams must have a queue each, and there are {num_queues} queues"
            )
        return effect(shared.machine, greatest)

    measure("effect", effect_of_priority)
    return ProbeResult(
        schema=SCHEMA,
        device=shared.name,
        environment={name: os.environ.get(name) for name in VARIABLES},
        num_streams=num_streams,
        clock=shared.clock,
        **results,
        not_measured=reasons,
        seconds=time.perf_counter() - started,
    )


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One device, one process. A part that is null has its reason in not_measured."""

    schema: int
    device: str
    environment: dict[str, str | None]
    """Variables that set the number of queues, as this process saw them; null where unset."""
    num_streams: int
    clock: ProbeClock
    queues: QueueCount | None
    switch: SwitchCost | None
    effect: Effect | None
    not_measured: dict[str, str]
    seconds: float


class Conclusion(msgspec.Struct, frozen=True, kw_only=True):
    """The number of queues that the streams use, and why it is believed."""

    queues: int | None
    """None where starts and times disagree."""
    at_least: bool
    """Every stream tried has a queue to itself."""
    because: str


def conclude(count: QueueCount | None) -> Conclusion:
    """Believes a number that the kernels' starts and the runs' lengths both give."""
    if count is None:
        return Conclusion(queues=None, at_least=False, because="the staircase was not measured")
    agreed = count.agrees and count.even and count.primed
    reasons = [
        f"{count.queues} of up to {count.steps[-1].streams} streams start at once",
        f"run times fit {count.from_times} evenly filled queues",
    ]
    if not count.even:
        reasons.append(f"but the queues are filled unevenly (times off by {100 * count.worst_error:.0f} %)")
    if not count.primed:
        reasons.append("but some runs were launch-bound")
    return Conclusion(
        queues=count.queues if agreed else None,
        at_least=agreed and count.at_least,
        because="; ".join(reasons),
    )


class ProbeSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One value and what the device did with it."""

    value: int
    queues: int | None
    """Queues that the device used; None: unclear."""
    at_least: bool
    as_set: bool | None
    """True if the device has as many queues as were set; None where that is unclear."""
    because: str
    result: ProbeResult | None


def queue_variable() -> QueueLimit:
    """The variable that --max-connections sets. ProbeError where the devices have none."""
    limit = accelerator().queue_limit
    if limit is None:
        raise ProbeError(f"--max-connections: no variable limits the queues of {accelerator().kind} devices")
    return limit


def parse_values(text: str, limit: QueueLimit) -> list[int]:
    """Values of "1,2,8". ProbeError for one that is no number or beyond the variable's range."""
    values = []
    for word in text.split(","):
        if not word.strip().isdecimal() or not 1 <= int(word) <= limit.most:
            raise ProbeError(
                f"--max-connections takes numbers from 1 to {limit.most} ({limit.variable}),"
                f" got {word.strip()!r}"
            )
        values.append(int(word))
    return values


def probe_settings(
    device: torch.device, num_streams: int, values: Sequence[int], timeout_s: float = TIMEOUT_S
) -> list[ProbeSetting]:
    """Starts one process after the other; each uses the GPU alone."""
    return [probe_setting(device, num_streams, value, timeout_s) for value in values]


def probe_setting(
    device: torch.device, num_streams: int, value: int, timeout_s: float = TIMEOUT_S
) -> ProbeSetting:
    command = [sys.executable, "-m", "aorta.queues", "probe", "--part", "queues", "--json"]
    command += ["--device", str(device), "--streams", str(num_streams)]
    try:
        process = subprocess.run(
            command, env=_environment(value), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return _unclear(value, f"no answer within {timeout_s:.0f} s")
    if process.returncode != 0:
        return _unclear(value, _last_line(process.stderr) or f"exit status {process.returncode}")
    return judge(value, msgspec.json.decode(process.stdout.strip().splitlines()[-1], type=ProbeResult))


def judge(value: int, result: ProbeResult) -> ProbeSetting:
    """More queues than streams cannot be seen, so that a setting above num_streams is as set when every
    stream has its own."""
    conclusion = conclude(result.queues)
    as_set = None
    if conclusion.queues is not None:
        as_set = value >= conclusion.queues if conclusion.at_least else value == conclusion.queues
    return ProbeSetting(
        value=value,
        queues=conclusion.queues,
        at_least=conclusion.at_least,
        as_set=as_set,
        because=conclusion.because,
        result=result,
    )


def _environment(value: int) -> dict[str, str]:
    """The variable is set before Python, and with it the runtime, starts."""
    root = str(Path(aorta.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {queue_variable().variable: str(value), "PYTHONPATH": os.pathsep.join(paths)}


def _unclear(value: int, because: str) -> ProbeSetting:
    return ProbeSetting(value=value, queues=None, at_least=False, as_set=None, because=because, result=None)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else ""
