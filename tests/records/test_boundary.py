"""Whoever may write into the folder of a run can neither stop a reader nor give the job orders."""

import ast
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from aorta.account.load.open import load_run
from aorta.errors import AortaError
from aorta.files import open_regular, read_order, read_regular, regular_descriptor
from aorta.hang.last_calls import read_counts, with_last_calls
from aorta.hang.report import read_reports, report_name
from aorta.records.digests import Digest, read_digests
from aorta.records.files import (
    HANG_FOLDER,
    call_counts_name,
    columns_name,
    digest_name,
    kernels_name,
    last_calls_name,
    state_name,
    steps_name,
    unwritten_name,
)
from aorta.records.newest import Follower
from aorta.records.reader import read_kernel_names, read_run, read_steps
from aorta.records.requests import (
    MOST_STEPS,
    PLAN,
    REQUEST,
    CapturePlan,
    CaptureRequest,
    ask_for_capture,
    new_request,
    plan_capture,
    read_plan,
    read_request,
)
from aorta.records.rotation import dropped_path, read_dropped
from aorta.records.state import ProcessState, StateFile, read_states
from aorta.records.writer import LineWriter
from aorta.steps.unwritten import unwritten_steps
from tests.hang.reports_by_hand import report as hang_report
from tests.records.run_folders import run_record, step_record, step_timeline, write_run

LIMIT_S = 60.0
OPENERS = {"open", "os.open", "os.fdopen", "read_bytes", "read_text"}
ROOT = Path(__file__).resolve().parents[2]


def report_of(folder: Path) -> object:
    return load_run(folder, "run")


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "run.json": ("run.json", read_run),
    "steps": (steps_name(0), lambda folder: list(read_steps(folder / steps_name(0)))),
    "steps-in-a-report": (steps_name(0), report_of),
    "columns-in-a-report": (columns_name(0), report_of),
    "steps-in-top": (steps_name(0), lambda folder: Follower(folder).poll()),
    "state": (state_name(0), read_states),
    "digest": (digest_name(0), read_digests),
    "kernels": (kernels_name(0), lambda folder: read_kernel_names(folder / kernels_name(0))),
    "dropped": (dropped_path(Path(steps_name(0))).name, lambda folder: read_dropped(folder / steps_name(0))),
    "unwritten": (
        unwritten_name(0),
        lambda folder: unwritten_steps(folder / unwritten_name(0), None, None),
    ),
    "last-calls": (last_calls_name(0), lambda folder: with_last_calls(folder, [hang_report(1)])),
    "counts": (call_counts_name(0), lambda folder: read_counts(folder / call_counts_name(0))),
    "request": (REQUEST, read_request),
    "plan": (PLAN, read_plan),
    "hang": (f"{HANG_FOLDER}/{report_name(0)}", read_reports),
    "append": (steps_name(0), lambda folder: LineWriter.append(folder / steps_name(0))),
    "write-digest": (digest_name(0), lambda folder: written_digest(folder)),
    "write-state": (state_name(0), lambda folder: StateFile(folder / state_name(0), 0).write(STATE)),
}
STATE = ProcessState(
    run_id="a", attempt=0, rank=0, world_size=1, host="", pid=1, process_start=None, started_unix_ns=0,
    written_unix_ns=0,
)  # fmt: skip


def written_digest(folder: Path) -> None:
    digest = Digest(folder)
    digest.add(step_record(step_timeline(step=0)))
    digest.write()


def whole_run(folder: Path) -> Path:
    records = [step_record(step_timeline(step=step), world_size=1) for step in range(3)]
    write_run(folder, records, run_record(1))
    return folder


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_no_reader_waits_for_what_is_no_file(name: str, kind: str, tmp_path: Path) -> None:
    file, read = READERS[name]
    path = whole_run(tmp_path) / file
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda path: path.symlink_to("/dev/zero")}[kind](path)
    ended: list[Exception | None] = []

    def call() -> None:
        try:
            read(tmp_path)
            ended.append(None)
        except Exception as error:
            ended.append(error)

    reader = threading.Thread(target=call, daemon=True)
    reader.start()
    reader.join(LIMIT_S)
    assert ended
    assert isinstance(ended[0], AortaError | OSError | None)


def test_a_file_without_end_is_refused_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(AortaError, match="is larger than"):
        read_run(tmp_path)
    with pytest.raises(OSError, match="is larger than 3 bytes"):
        read_regular(path, 3)


def test_every_file_of_a_run_is_opened_by_the_one_opener() -> None:
    allowed = {
        ("records/deaths.py", "open"),  # standard error, by its descriptor
        ("record/host.py", "os.open"),  # /proc
        ("record/run_folder.py", "os.open"),  # the folder, for its lock
        ("record/lock_holder.py", "os.open"),  # /proc
        ("record/thread_state.py", "os.open"),  # /proc
        ("record/stacks.py", "open"),  # /proc
        ("record/profiler.py", "open"),  # the profiler's temporary file
        ("attach/program.py", "Path(SIBLINGS.format(cpu)).read_text"),  # /sys
        ("attach/program.py", "Path(path).read_text"),  # /sys
        ("attach/program.py", "Path(STAT).read_text"),  # /proc
    }
    calls = {
        (str(path.relative_to(ROOT / "aorta")), ast.unparse(node.func))
        for wing in ("records", "record", "steps", "hang", "attach", "merge", "account/load")
        for path in (ROOT / "aorta" / wing).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and not opens_a_descriptor(node)
        if path.name != "deaths.py" or "Path" not in ast.unparse(node.func)  # /proc and /sys
    }
    names = {name.rpartition(".")[2] for name in OPENERS if "." not in name and name != "open"}
    opens = {(path, call) for path, call in calls if call in OPENERS or call.rpartition(".")[2] in names}
    assert opens - allowed == set()


def opens_a_descriptor(call: ast.Call) -> bool:
    """Return True for open() of a descriptor, which an opener gave."""
    first = ast.unparse(call.args[0]) if call.args else ""
    return any(word in first for word in ("descriptor", "fileno()", "os.dup"))


# ---- orders ------------------------------------------------------------------------------------------


def test_a_request_and_a_plan_come_through(tmp_path: Path) -> None:
    request = new_request(MOST_STEPS)
    ask_for_capture(tmp_path, request)
    assert read_request(tmp_path) == request
    plan = CapturePlan(id=request.id, first_step=7, num_steps=MOST_STEPS)
    plan_capture(tmp_path, plan)
    assert read_plan(tmp_path) == plan


@pytest.mark.parametrize(
    "id",
    ["", "x", "../0", "x/../../../../../evil", "0/1", "a" * 33, "A1", "01\n", "0\0", "..", "0 1", "é"],
)
def test_an_id_that_is_more_than_a_part_of_a_name_is_no_request(id: str, tmp_path: Path) -> None:
    ask_for_capture(tmp_path, CaptureRequest(id=id, num_steps=1))
    plan_capture(tmp_path, CapturePlan(id=id, first_step=0, num_steps=1))
    assert read_request(tmp_path) is None
    assert read_plan(tmp_path) is None


@pytest.mark.parametrize(
    ("first_step", "num_steps"), [(0, 0), (0, -1), (0, MOST_STEPS + 1), (-1, 1), (2**60, 1)]
)
def test_numbers_that_do_not_end_are_no_request(first_step: int, num_steps: int, tmp_path: Path) -> None:
    plan_capture(tmp_path, CapturePlan(id="0", first_step=first_step, num_steps=num_steps))
    assert read_plan(tmp_path) is None
    if num_steps != 1:
        ask_for_capture(tmp_path, CaptureRequest(id="0", num_steps=num_steps))
        assert read_request(tmp_path) is None


def test_an_order_that_all_may_write_or_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    ask_for_capture(tmp_path, new_request(1))
    (tmp_path / REQUEST).chmod(0o646)
    assert read_request(tmp_path) is None
    (tmp_path / REQUEST).rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o644)
    (tmp_path / REQUEST).symlink_to(tmp_path / "elsewhere")
    assert read_request(tmp_path) is None


def test_an_order_of_another_user_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "order"
    path.write_bytes(b"x")
    assert read_order(path, 10) == b"x"
    status = os.stat(path)
    fields = list(status)
    fields[4] = 4_000_000  # the user
    monkeypatch.setattr("aorta.files.os.fstat", lambda _: os.stat_result(fields))
    with pytest.raises(PermissionError, match="another user"):
        read_order(path, 10)


def test_a_writer_follows_no_link_out_of_the_folder(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    link = tmp_path / state_name(0)
    link.symlink_to(target)
    StateFile(link, 0).write(STATE)
    with pytest.raises(OSError, match=r"."):
        regular_descriptor(link, os.O_RDWR | os.O_NOFOLLOW)
    assert target.read_bytes() == b"precious"
    assert open_regular(link).read() == b"precious"  # readers may: a folder of links is a usual thing
