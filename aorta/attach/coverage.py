"""The lines that `aorta run` prints after the command: what was recorded, what was missed, where the rest is.

They are printed by the process of `aorta run`, which does not load torch.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from aorta.errors import AortaError
from aorta.files import open_regular
from aorta.records.endings import attempt_ending, ending_text
from aorta.records.files import RUN_FILES, STEPS_FILE, steps_name
from aorta.records.launches import read_notes
from aorta.records.reader import read_run
from aorta.records.run_identity import launch_of
from aorta.records.schema import Ending, RunRecord
from aorta.records.state import read_states, states_of
from aorta.records.writer import move_aside
from aorta.timeline.collective import POINT_TO_POINT


def coverage_lines(run: RunRecord, folder: Path, kernels_asked: bool = False) -> Iterator[str]:
    """Yield one line when all is covered; more where something is missing, with what to do.

    kernels_asked: say why there are no kernel records, where there are none.
    """
    coverage = run.coverage
    num_steps, num_recorded = _num_steps(folder)
    groups = coverage.get("groups") or {}
    place_text = f", steps at {coverage['steps_at']}" if "steps_at" in coverage else ""
    steps = f"{num_steps} step{'s' * (num_steps != 1)}"
    steps += " recorded" if num_recorded == num_steps else f", {num_recorded} of them recorded (--overhead)"
    yield f"aorta: rank 0: {steps}{place_text}; {_collectives(run)}"
    for name, group in groups.items():
        if group["backend"] > group["seen"]:
            yield (
                f"aorta: group {name}: {group['backend'] - group['seen']} collectives were called on the "
                "backend itself and not seen"
            )
    kernels = coverage.get("kernel_records") or {}
    if kernels_asked and kernels.get("reason"):
        yield f"aorta: --kernels on: events timed the steps: {kernels['reason']}"
    yield from _kernel_lines(kernels)
    ending = _ending(run, folder)
    if ending is not None and ending.kind != "finished":
        yield f"aorta: {ending_text(ending)}"
    if num_steps == 0 and run.finished_unix_ns is not None:
        yield (
            "aorta: no step was found: name the function whose calls are the steps with "
            "--step-at module:function"
        )


def _kernel_lines(kernels: dict[str, Any]) -> Iterator[str]:
    """Say which of the driver's records are missing from the steps' numbers."""
    matched = kernels.get("matched") or {}
    for name, text in (
        ("num_no_time", "came without times, and no step's numbers have them"),
        ("num_lost", "found no room, and their steps have no times"),
        ("num_dropped", "were dropped by the driver, and the steps since have no times"),
        ("num_late", "came after their step was written, which lacks them"),
    ):
        if matched.get(name):
            yield f"aorta: {matched[name]} records of kernels {text}"
    if matched.get("num_no_time"):
        yield from (f"aorta: known of this CUPTI: {fault}" for fault in kernels.get("known_faults") or ())


def own_folder(folder: Path, began_ns: int, notes: Path) -> Path | None:
    """Return where this command recorded: in a folder of its own where another command held this one, or
    where another one has moved it since.

    None where it recorded nothing. began_ns: when it began, in ns since the epoch. notes: its launch's file.
    """
    runs = (folder, *sorted(folder.glob("process_*")), *sorted(folder.glob("previous-*"), reverse=True))
    launches = {path: _launches_of(path) for path in runs if _is_written(path, began_ns)}
    own = (path for path, names in launches.items() if names is not None and notes.name in names)
    return next(own, folder if launches.get(folder, ()) is None else None)


def is_held(folder: Path, began_ns: int, notes: Path) -> bool:
    """Whether another command records in the folder, or has since. Arguments: as of own_folder."""
    launches = _launches_of(folder)
    if launches is None or notes.name in launches:
        return False
    return _is_written(folder, began_ns) or any(
        state.is_alive and state.process.ending is None for state in read_states(folder).values()
    )


def _is_written(folder: Path, began_ns: int) -> bool:
    run = folder / "run.json"
    return run.exists() and run.stat().st_mtime_ns >= began_ns


def _launches_of(folder: Path) -> set[str] | None:
    """The names of the launches' files, of all ranks' processes. None where none is known."""
    found = {name for state in read_states(folder).values() for name in state.process.launches}
    with suppress(AortaError):
        found |= set(filter(None, [read_run(folder).coverage.get("launch_notes")]))
    return found or None


def earlier_run(folder: Path, began_ns: int, notes: Path, goes_on: bool) -> Iterator[str]:
    """Move an earlier run aside after a command that recorded nothing, or it is read as that one's; yield a
    line on where it is. It stays where its processes live, and where this start or the next goes on with it:
    by --continue (goes_on), by the run's name, or in a requeue. began_ns and notes: as of other_runs.
    """
    if is_held(folder, began_ns, notes):
        return
    files = (path for pattern in RUN_FILES for path in folder.glob(pattern))
    names = tuple(path.name for path in files if path.lstat().st_mtime_ns < began_ns)
    launch = launch_of()
    goes_on = goes_on or launch.run_id is not None or launch.num_requeues > 0
    if not any(name == "run.json" or STEPS_FILE.fullmatch(name) for name in names):
        return
    with suppress(AortaError, OSError):
        if not (goes_on or any(state.is_alive for state in read_states(folder).values())):
            yield f"aorta: the earlier run of {folder} is now in {move_aside(folder, names)}"
            return
    yield f"aorta: the run in {folder} is an earlier one"


def other_runs(folder: Path, began_ns: int, notes: Path) -> Iterator[str]:
    """Yield lines about further runs that the same command recorded, and about one that it moved aside.

    began_ns: when the command began, in ns since the epoch. notes: its launch's file.
    """
    earlier = [
        path.parent
        for path in folder.glob("previous-*/run.json")
        if path.stat().st_mtime_ns < began_ns <= path.parent.stat().st_mtime_ns
    ]
    for moved in earlier:
        yield f"aorta: the earlier run of {folder} is now in {moved}"
    for pattern, text in (
        ("previous-*", "the command trained more than once; earlier runs are in"),
        ("process_*", "more processes trained, each alone; their records are in"),
    ):
        written = (path for path in sorted(folder.glob(pattern)) if _is_written(path, began_ns))
        runs = [path for path in written if notes.name in (_launches_of(path) or [notes.name])]
        if runs:
            yield f"aorta: {text} {', '.join(map(str, runs))}"


def _ending(run: RunRecord, folder: Path) -> Ending | None:
    """How the run's last attempt ended: its command has, so no process of it is alive."""
    if run.run_id is None or not run.attempts:
        return None
    last = run.attempts[-1]
    states = states_of(folder, run.run_id, last.attempt)
    return attempt_ending(states, last.world_size, is_over=True, notes=read_notes(folder))


class _Line(msgspec.Struct):
    """The part of a line that is counted: a step may have lines of several sources."""

    global_step: int
    recorded: bool = True


def _num_steps(folder: Path) -> tuple[int, int]:
    """Steps of rank 0: all, and those that the overhead did not leave out."""
    decoder = msgspec.json.Decoder(_Line)
    with open_regular(folder / steps_name(0)) as lines:
        decoded = [decoder.decode(line) for line in lines]
    return (
        len({line.global_step for line in decoded}),
        len({line.global_step for line in decoded if line.recorded}),
    )


def _collectives(run: RunRecord) -> str:
    """Say how many of the collectives were seen, or why that is not known."""
    groups = run.coverage.get("groups") or {}
    if groups:
        counted = sum(group["backend"] for group in groups.values())
        num_seen = sum(group["seen"] for group in groups.values())
        outside = sum((run.coverage.get("outside_step") or {}).values())
        overhead = run.overhead
        left_out = overhead is not None and overhead.num_recorded < overhead.num_steps
        where = " while recording" if left_out else ""
        learned = sum((run.coverage.get("learned") or {}).values())
        more = f"; {learned} more in steps that were like those" if learned else ""
        passed = sum((run.coverage.get("seen") or {}).get(op, 0) for op in POINT_TO_POINT)
        calls = "collectives and send/recv" if passed and num_seen <= counted else "collectives"
        passed = passed if num_seen > counted else 0  # NCCL counts none of them
        told = [f"{num_seen - passed} of {counted} {calls}"] if counted or not passed else []
        told += [f"{passed} send/recv"] if passed else []
        return f"{' and '.join(told)} seen{where}, {outside} of them outside of steps{more}"
    if run.finished_unix_ns is None:
        return (
            "the process left without closing its records (killed, or os._exit): the steps of its last half "
            "second may be missing, collectives were not counted"
        )
    return "no process group, so no collectives"
