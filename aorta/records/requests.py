"""Files by which `aorta capture` asks a running job for a kernel trace: no port is opened.

<run>/capture_request.json   written by `aorta capture`: how many steps to trace
<run>/capture_plan.json      written by rank 0 of the job: from which step on

The job acts on them with its own rights, so it reads only what its own user, root or the owner of the folder
wrote, and takes no id that is more than a part of a file's name and no number of steps that would not end.
"""

import secrets
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from aorta.errors import NOT_JSON
from aorta.files import read_order
from aorta.records.files import TRACE_FOLDER
from aorta.records.writer import write_json

REQUEST = "capture_request.json"
PLAN = "capture_plan.json"
MOST_STEPS = 1000
"""Most steps of one trace; a step of a large model takes megabytes of it."""
_MOST_BYTES = 4096

RequestId = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{1,32}\Z")]
NumSteps = Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)]
FirstStep = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]

T = TypeVar("T")


class CaptureRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for a kernel trace of the next steps."""

    id: RequestId
    num_steps: NumSteps


class CapturePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that all ranks trace for the request with this id."""

    id: RequestId
    first_step: FirstStep
    num_steps: NumSteps


def new_request(num_steps: int) -> CaptureRequest:
    """A request with an id of its own. num_steps: 1 to MOST_STEPS."""
    return CaptureRequest(id=secrets.token_hex(8), num_steps=num_steps)


def ask_for_capture(folder: Path, request: CaptureRequest) -> None:
    """Write the request beside the records of a run; OSError where that cannot be."""
    write_json(folder / REQUEST, msgspec.to_builtins(request))


def read_request(folder: Path) -> CaptureRequest | None:
    """The request that is there; None for none, one that is no request, and one that somebody else wrote."""
    return _read(folder / REQUEST, CaptureRequest)


def plan_capture(folder: Path, plan: CapturePlan) -> None:
    write_json(folder / PLAN, msgspec.to_builtins(plan))


def read_plan(folder: Path) -> CapturePlan | None:
    """The plan of the last request; None for none, one that is no plan, and one that somebody else wrote."""
    return _read(folder / PLAN, CapturePlan)


def trace_name(capture: str, rank: int) -> str:
    """Path, within the run's folder, of what a rank wrote for the request with this id."""
    return f"{TRACE_FOLDER}/rank{rank}/capture_{capture}.json.gz"


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(read_order(path, _MOST_BYTES), type=kind)
    except (OSError, *NOT_JSON):
        return None
