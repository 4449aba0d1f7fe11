"""Files by which `aorta capture` asks a running job for a kernel trace: no port is opened.

<run>/capture_request.json   written by `aorta capture`: how many steps to trace
<run>/capture_plan.json      written by rank 0 of the job: from which step on
"""

from pathlib import Path
from typing import TypeVar

import msgspec

from aorta.errors import NOT_JSON
from aorta.records.writer import write_json

REQUEST = "capture_request.json"
PLAN = "capture_plan.json"

T = TypeVar("T")


class CaptureRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for a kernel trace of the next steps."""

    id: str
    num_steps: int


class CapturePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that all ranks trace for the request with this id."""

    id: str
    first_step: int
    num_steps: int


def ask_for_capture(folder: Path, request: CaptureRequest) -> None:
    """Write the request beside the records of a run; OSError where that cannot be."""
    write_json(folder / REQUEST, msgspec.to_builtins(request))


def read_request(folder: Path) -> CaptureRequest | None:
    """The request that is there; None for none, or one that is no request."""
    return _read(folder / REQUEST, CaptureRequest)


def plan_capture(folder: Path, plan: CapturePlan) -> None:
    write_json(folder / PLAN, msgspec.to_builtins(plan))


def read_plan(folder: Path) -> CapturePlan | None:
    """The plan of the last request; None for none, or one that is no plan."""
    return _read(folder / PLAN, CapturePlan)


def trace_name(capture: str, rank: int) -> str:
    """Path, within the run's folder, of what a rank wrote for the request with this id."""
    return f"torch_profiler/rank{rank}/capture_{capture}.json.gz"


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *NOT_JSON):
        return None
