"""Planted hangs, and pauses that are none: who is named, which call, after how long.

    python benchmarks/reliability/hangs.py --output hangs_gloo.csv
    python benchmarks/reliability/hangs.py --backend nccl --output hangs_nccl.csv      # 12 cases, 2 GPUs

The cases are those of hang_cases.py. hang.action is abort: every rank has to end itself. A case is right
where the finding names the rank that was tampered with (only that one) and the collective that the others
stand in, with its group and step, within the limit plus --allowed-s; where reports cannot tell who it was, it
is right if no other rank is blamed. A pause is right where no rank reports, and all ranks finish their steps.

Ranks are forked from this process, which has torch loaded and uses no device. Exit status 1 where a case is
not right.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from harness import arguments  # noqa: E402
from harness import write as write_table  # noqa: E402
from reliability import hang_cases  # noqa: E402
from reliability.hang_cases import CASES, PAUSES, Case, Pause, Program  # noqa: E402
from torch._C._distributed_c10d import PrefixStore, TCPStore  # noqa: E402

import aorta  # noqa: E402
from aorta.config.structs import HangConfig  # noqa: E402
from aorta.errors import AortaError  # noqa: E402
from aorta.hang.find import find, sentence  # noqa: E402
from aorta.hang.last_calls import with_last_calls  # noqa: E402
from aorta.hang.report import read_reports  # noqa: E402
from aorta.hang.watchdog import Watchdog  # noqa: E402
from aorta.records.reader import read_steps  # noqa: E402

NUM_STEPS = 12
START_LIMIT_S = 90.0
"""Time that the ranks of a case have to reach its fault or the end of a pause's run."""
END_LIMIT_S = 20.0
"""Time from the last report to the end of the last rank."""
PLANTED, STARTED = "planted_unix_ns", "started"
_fork = multiprocessing.get_context("fork")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--timeout", type=float, default=3.0, help="hang.timeout_s")
    parser.add_argument("--allowed-s", type=float, default=5.0, help="beyond the timeout, for the reports")
    parser.add_argument("--jobs", type=int, default=2, help="cases at the same time")
    parser.add_argument("--total-s", type=float, default=3600.0, help="no case begins after that")
    parser.add_argument("--two-ranks", action="store_true", help="the twelve cases for NCCL, on any backend")
    parser.add_argument("--only", nargs="+", help="names of cases and pauses")
    parser.add_argument("--left-out", action="store_true", help="record no step but the first two")
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: none is kept")
    options = parser.parse_args()
    on_nccl = options.two_ranks = options.two_ranks or options.backend == "nccl"
    chosen: list[Case | Pause] = [case for case in CASES if case.on_nccl or not on_nccl]
    chosen += [] if on_nccl else PAUSES
    if options.only:
        every: list[Case | Pause] = [*CASES, *PAUSES]
        chosen = [case for case in every if case.name in options.only]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        results = run_all(chosen, options.keep or Path(name), options)
    right = [sum(r["right"] for r in results if r["kind"] == kind) for kind in ("hang", "pause")]
    num = [sum(r["kind"] == kind for r in results) for kind in ("hang", "pause")]
    print(f"hangs: {right[0]} of {num[0]} right; pauses without an alarm: {right[1]} of {num[1]}")
    return 0 if right == num and len(results) == len(chosen) else 1


def run_all(cases: list[Case | Pause], folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each in a process of its own, --jobs at a time."""
    results: list[dict[str, Any]] = []
    waiting, running = list(cases), dict[str, tuple[Any, Connection]]()
    end_s = time.monotonic() + options.total_s
    while waiting or running:
        while waiting and len(running) < options.jobs and time.monotonic() < end_s:
            case = waiting.pop(0)
            receiving, sending = _fork.Pipe(duplex=False)
            process = _fork.Process(target=run_case, args=(case, folder / case.name, options, sending))
            process.start()
            sending.close()
            running[case.name] = (process, receiving)
        if time.monotonic() > end_s:
            waiting.clear()
        for name, (process, receiving) in list(running.items()):
            if receiving.poll(0.05):
                try:
                    results.append(receiving.recv())
                except EOFError:
                    results.append({"case": name, "kind": "hang", "right": False, "fault": "no result"})
                show(results[-1])
                write_table(options.output, results)
                process.join()
                del running[name]
    return results


# ---- one case ----------------------------------------------------------------------------------


def run_case(case: Case | Pause, folder: Path, options: argparse.Namespace, sending: Connection) -> None:
    try:
        folder.mkdir(parents=True)
        sending.send(watched(case, folder, options))
    except Exception:
        kind = "hang" if isinstance(case, Case) else "pause"
        fault = traceback.format_exc()[-2000:]
        sending.send({"case": case.name, "kind": kind, "right": False, "fault": fault})


def watched(case: Case | Pause, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    num_ranks = 2 if isinstance(case, Pause) or options.two_ranks else case.ranks
    ranks = [
        _fork.Process(target=rank_main, args=(case, folder, rank, num_ranks, options))
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    beside = folder / "port.tmp"
    beside.write_text(str(store.port))
    beside.replace(folder / "port")
    try:
        if isinstance(case, Pause):
            return judged_pause(case, folder, ranks, options)
        return judged_hang(case, folder, ranks, options)
    finally:
        for rank in ranks:
            if rank.is_alive():
                os.kill(rank.pid or 0, signal.SIGKILL)
            rank.join(10)


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True


def judged_hang(case: Case, folder: Path, ranks: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"case": case.name, "kind": "hang", "ranks": len(ranks), "rank": case.rank}

    def have_ended() -> bool:
        return all(rank.exitcode is not None for rank in ranks)

    if not wait_until(lambda: (folder / PLANTED).exists() or have_ended(), START_LIMIT_S):
        return result | {"right": False, "fault": "the fault was not reached", "logs": logs(folder)}
    ended = wait_until(have_ended, options.timeout + options.allowed_s + END_LIMIT_S)
    result |= {"ended": ended, "exit_statuses": [rank.exitcode for rank in ranks]}
    try:
        reports = with_last_calls(folder, read_reports(folder))
        planted_ns = int((folder / PLANTED).read_text())
    except (AortaError, OSError) as error:
        return result | {"right": False, "fault": str(error), "logs": logs(folder)}
    finding = find(reports)
    stuck = finding.stuck
    seconds = (max(r.written_unix_ns for r in reports) - planted_ns) / 1e9
    ops = [] if stuck is None else sorted({call.op for call in stuck.waiting.values()})
    result |= {
        "finding": finding.kind,
        "named": finding.ranks,
        "ops": ops,
        "group": None if stuck is None else stuck.name,
        "step": None if stuck is None else stuck.call.step,
        "sentence": sentence(finding),
        "reported_after_s": round(seconds, 2),
        "num_reports": sum(not report.is_from_last_calls for report in reports),
        "stacks": {report.rank: [stack.frames[:4] for stack in report.stacks] for report in reports},
        "steps_kept": steps_kept(folder, len(ranks)),
    }
    named_right = finding.ranks == [case.rank] or (
        not case.is_decidable and set(finding.ranks) <= {case.rank}
    )
    call_right = (
        stuck is not None
        and (case.op in ops)
        and stuck.name == case.group
        and stuck.call.step == (case.step if case.step_of_call is None else case.step_of_call)
    )
    result |= {
        "named_right": named_right,
        "call_right": call_right,
        "in_time": seconds < options.timeout + options.allowed_s,
    }
    result["right"] = named_right and call_right and result["in_time"] and ended
    return result if result["right"] else result | {"logs": logs(folder)}


def judged_pause(case: Pause, folder: Path, ranks: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"case": case.name, "kind": "pause", "ranks": len(ranks)}
    if case.suspends:
        wait_until(lambda: len(list(folder.glob(f"{STARTED}*"))) == len(ranks), START_LIMIT_S)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, number)
            if number == signal.SIGSTOP:
                time.sleep(2 * options.timeout + 1)
    ended = wait_until(lambda: all(rank.exitcode is not None for rank in ranks), START_LIMIT_S)
    reports = sorted(path.name for path in folder.glob("hang/rank*.json"))
    statuses = [rank.exitcode for rank in ranks]
    result |= {
        "ended": ended,
        "exit_statuses": statuses,
        "reports": reports,
        "steps_kept": steps_kept(folder, len(ranks)),
        "right": ended and statuses == [0] * len(ranks) and not reports,
    }
    return result if result["right"] else result | {"logs": logs(folder)}


def steps_kept(folder: Path, num_ranks: int) -> list[int]:
    nums = []
    for rank in range(num_ranks):
        try:
            nums.append(len(list(read_steps(folder / f"rank_{rank}_metrics.jsonl", []))))
        except AortaError:
            nums.append(0)
    return nums


def logs(folder: Path) -> list[str]:
    return [path.read_text(errors="replace")[-1500:] for path in sorted(folder.glob("rank*.log"))]


def show(result: dict[str, Any]) -> None:
    verdict = "right" if result["right"] else "WRONG"
    if result["kind"] == "pause" or "sentence" not in result:
        shown = {k: v for k, v in result.items() if k in ("fault", "exit_statuses", "reports", "steps_kept")}
        print(f"{verdict} {result['case']}: {shown}", flush=True)
        return
    print(
        f"{verdict} {result['case']}: rank {result['rank']}, named {result['named']} after"
        f" {result['reported_after_s']:.1f} s, {result['num_reports']} reports, exits"
        f" {result['exit_statuses']}, steps {result['steps_kept']}\n      {result['sentence']}",
        flush=True,
    )


# ---- a rank ------------------------------------------------------------------------------------


def rank_main(case: Case | Pause, folder: Path, rank: int, num_ranks: int, options: Any) -> None:
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    os.environ.update(LOCAL_WORLD_SIZE=str(num_ranks))
    wait_until((folder / "port").exists, START_LIMIT_S)
    store = TCPStore("127.0.0.1", int((folder / "port").read_text()), wait_for_workers=False)
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend, store=PrefixStore("job", store), rank=rank, world_size=num_ranks)
    kind = Program if isinstance(case, Pause) else case.program
    program = kind(rank, num_ranks, device)
    program.folder, program.limit_s = str(folder), options.timeout
    for _, act in program.actions(0):
        act()  # what the first use of a device and a communicator takes is longer than the limit
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    hang = HangConfig(**{"timeout_s": options.timeout, "action": "abort", **case.hang})
    with (
        aorta.instrument(folder) as recorder,
        Watchdog(
            hang, folder, rank, num_ranks, recorder=recorder, store=PrefixStore("hang", store),
            device=device if device.type == "cuda" else None,
        ) as watchdog,
    ):  # fmt: skip
        program.recorder = recorder
        if options.left_out:
            recorder._sampling.begin = lambda global_step: global_step < 2  # type: ignore[method-assign]
            recorder._sampling.comes_next = lambda: False  # type: ignore[method-assign]
        with suppress(hang_cases.Left):
            loop(case, program, watchdog, folder)
    dist.barrier()
    dist.destroy_process_group()


def loop(case: Case | Pause, program: Program, watchdog: Watchdog, folder: Path) -> None:
    for step in range(NUM_STEPS):
        watchdog.beat(step)
        with suppress(hang_cases.SwallowedError), program.recorder.step(global_step=step):
            for _, act in changed(case, program, step, folder):
                act()
        if program.device.type == "cuda":
            # So that a fault strikes where the device is, not a queue ahead of it.
            torch.cuda.synchronize()
        if step == 2:
            (folder / f"{STARTED}{program.rank}").touch()
        if isinstance(case, Pause) and case.suspends:
            time.sleep(0.3)


def changed(case: Case | Pause, program: Program, step: int, folder: Path) -> list[hang_cases.Action]:
    """The step's actions, with what is planted."""
    actions = program.actions(step)
    if isinstance(case, Pause):
        if program.rank in case.on and step in case.steps:
            return [("pause", lambda: case.act(program.limit_s)(program)), *actions]
        return actions
    if program.rank != case.rank or step != case.step:
        return actions
    (folder / PLANTED).write_text(str(time.time_ns()))
    return case.fault(program, actions)


if __name__ == "__main__":
    sys.exit(main())
