"""Effect of the variable that sets the number of hardware queues: one fresh process per value."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

import aorta
from aorta.queues.probe.machine import ProbeError
from aorta.queues.probe.result import ProbeResult, conclude

TIMEOUT_S = 120.0
CUDA_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
HIP_VARIABLE = "GPU_MAX_HW_QUEUES"
CUDA_MOST = 32
"""Source: CUDA programming guide, environment variables: 1 to 32, default 8."""


class ProbeSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One value and what the device did with it."""

    value: int
    queues: int | None
    """Found; None where it is unclear."""
    at_least: bool
    as_set: bool | None
    """True if the device has as many queues as were set; None where that is unclear."""
    because: str
    result: ProbeResult | None


def queue_variable() -> str:
    """The variable of this platform."""
    return HIP_VARIABLE if torch.version.hip else CUDA_VARIABLE


def parse_values(text: str, variable: str) -> list[int]:
    """Values of "1,2,8"; ProbeError names the one that is none."""
    largest = CUDA_MOST if variable == CUDA_VARIABLE else 128
    values = []
    for word in text.split(","):
        if not word.strip().isdecimal() or not 1 <= int(word) <= largest:
            raise ProbeError(
                f"--max-connections takes numbers from 1 to {largest} ({variable}), got {word.strip()!r}"
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
    return os.environ | {queue_variable(): str(value), "PYTHONPATH": os.pathsep.join(paths)}


def _unclear(value: int, because: str) -> ProbeSetting:
    return ProbeSetting(value=value, queues=None, at_least=False, as_set=None, because=because, result=None)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else ""
