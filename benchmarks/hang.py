"""Planted hangs: who is named, how long after the hang, and what is left of the records.

    python benchmarks/hang.py --ranks 2 --output hang.json

On GPUs over NCCL, else on the CPU over gloo. Each case is a run of its own that trains nothing but does what
a step does (matrix products, an all-reduce, an all-gather, a reduce-scatter); in step 6 rank 1 skips the
all-reduce, or sleeps. hang.action is abort: every rank has to end itself.

The ranks of the second case load their modules while the first one runs, and use their devices once it is
over. A case is judged, printed and written when its ranks have reported and ended, or their time is up; those
that have not ended then are killed.

Exit status 1 where a rank or a collective was named wrongly, too late, a rank did not end by itself, or
records of finished steps are lost.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402

CASES = ("sleeps", "skips")
HANGS_IN_STEP = 6
LATE_RANK = 1
PER_STEP = 3
"""Collectives."""
NUM_STEPS = 100_000
ALLOWED_S = 5.0
"""Beyond the time limit."""
START_LIMIT_S = 30.0
"""From the gate's opening to the hang."""
END_LIMIT_S = 10.0
"""From the last report to the end of the last rank."""
RECORDS_S = 3.0
"""The records of a rank on a GPU are written by a process that outlives it by a moment."""
ABORT_STATUS = 124
GATE, PLANTED, ABOUT = "gate", "planted_unix_ns", "about.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=3.0, help="hang.timeout_s")
    parser.add_argument("--output", type=Path, default=Path("hang.json"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker, options.folder, options.timeout)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the ranks are ended
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        runs = [Run(case, Path(folder) / case, options) for case in options.cases]
        try:
            for run in runs:
                results.append(judged(run, options))
                show(results[-1])
                write(options, run, results)
        finally:
            for run in runs:
                run.kill()
    return 0 if all(result["right"] for result in results) else 1


def write(options: argparse.Namespace, run: "Run", results: list[dict[str, Any]]) -> None:
    about = {}
    with suppress(OSError, msgspec.DecodeError):
        about = msgspec.json.decode((run.folder / ABOUT).read_bytes())
    document = {**about, "num_ranks": options.ranks, "timeout_s": options.timeout, "results": results}
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))


# ---- the ranks ---------------------------------------------------------------------------------


def work(case: str, folder: Path, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    import aorta
    from aorta.config import HangConfig
    from aorta.device.environment import collect_devices, collect_versions
    from aorta.hang.watchdog import Watchdog

    while not (folder / GATE).exists():
        time.sleep(0.05)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= world_size
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    if rank == 0:
        about = {"versions": collect_versions(), "devices": collect_devices()}
        (folder / ABOUT).write_bytes(msgspec.json.encode(about))
    store = PrefixStore("hang-benchmark", dist.distributed_c10d._get_default_store())
    # A small all-reduce and a large gather use buffers of different NCCL protocols: a rank that gathers
    # while the other reduces gets nothing from it. Alike, they could go on with each other's data.
    side, reduced, numel = (2048, 1 << 10, 1 << 24) if on_gpu else (64, 1 << 12, 1 << 12)
    a = torch.randn(side, side, device=device)
    gradient = torch.ones(reduced, device=device)
    shard, gathered = torch.ones(numel // world_size, device=device), torch.empty(numel, device=device)

    def step_body(skips: bool) -> None:
        b = a @ a
        if not skips:
            dist.all_reduce(gradient)
        dist.all_gather_into_tensor(gathered, shard)
        b @= a
        dist.reduce_scatter_tensor(shard, gathered)

    step_body(skips=False)  # what the first one loads and sets up takes longer than the time limit
    if on_gpu:
        torch.cuda.synchronize()
    dist.barrier()
    hang = HangConfig(timeout_s=timeout_s, action="abort")
    with (
        aorta.instrument(folder, placement="dedicated", device=device) as recorder,
        Watchdog(hang, folder, rank, world_size, recorder=recorder, store=store, device=device) as watchdog,
    ):
        for step in range(NUM_STEPS):
            watchdog.beat(step)
            planted = rank == LATE_RANK and step == HANGS_IN_STEP
            if planted:
                (folder / PLANTED).write_text(str(time.time_ns()))
            with recorder.step(global_step=step):
                if planted and case == "sleeps":
                    time.sleep(10 * START_LIMIT_S)
                step_body(skips=planted)
            if step < HANGS_IN_STEP and on_gpu:
                torch.cuda.synchronize()  # so that the steps before are over when it begins


class Run:
    """The ranks of a case, started at once; they wait for open_gate before they use a device."""

    def __init__(self, case: str, folder: Path, options: argparse.Namespace) -> None:
        self.case, self.folder = case, folder
        folder.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, __file__, "--worker", case, "--folder", str(folder)]
        command += ["--timeout", str(options.timeout)]
        self.processes = []
        for rank in range(options.ranks):
            environment = {
                "OMP_NUM_THREADS": "1", **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(options.ranks), "LOCAL_WORLD_SIZE": str(options.ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            # To a file: a pipe ends with the last process that holds it, and the ranks have children.
            with open(self._log(rank), "wb") as log:
                self.processes.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
                )

    def open_gate(self) -> None:
        (self.folder / GATE).touch()

    def planted_ns(self) -> int | None:
        with suppress(OSError, ValueError):
            return int((self.folder / PLANTED).read_text())
        return None

    def statuses(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):  # stuck in a driver
                process.wait(5)

    def output(self) -> list[str]:
        logs = [self._log(rank) for rank in range(len(self.processes))]
        return [path.read_text(errors="replace")[-3000:] for path in logs if path.exists()]

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"


# ---- what came of it ---------------------------------------------------------------------------


def judged(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """The case's result: its ranks have ended, by themselves or killed."""
    run.open_gate()
    opened_s = time.monotonic()
    wait_until(lambda: run.planted_ns() is not None or None not in run.statuses(), START_LIMIT_S)
    result: dict[str, Any] = {"case": run.case, "started_after_s": time.monotonic() - opened_s}
    planted_ns = run.planted_ns()
    if planted_ns is None:
        result |= {"right": False, "fault": f"rank {LATE_RANK} did not come to step {HANGS_IN_STEP}"}
    else:
        limit_s = options.timeout + ALLOWED_S
        wait_until(lambda: num_reports(run.folder) == options.ranks, limit_s)
        reported_s = time.monotonic()
        wait_until(lambda: None not in run.statuses(), END_LIMIT_S)
        statuses = run.statuses()
        result |= {
            "ended_by_themselves": None not in statuses,
            "ended_after_reports_s": None if None in statuses else time.monotonic() - reported_s,
            "exit_statuses": statuses,
        }
        run.kill()
        result |= judge(run, planted_ns, limit_s, options)
    if not result["right"]:
        run.kill()
        result["output"] = run.output()
    return result


def wait_until(condition: Any, limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.05)


def num_reports(folder: Path) -> int:
    return len(list((folder / "hang").glob("rank*.json")))


def judge(run: Run, planted_ns: int, limit_s: float, options: argparse.Namespace) -> dict[str, Any]:
    from aorta.errors import AortaError
    from aorta.hang.find import find, sentence
    from aorta.hang.schema import flight_recorder_name, read_reports

    try:
        reports = read_reports(run.folder)
        found = find(reports)
    except AortaError as error:
        return {"right": False, "fault": str(error)}
    seq = PER_STEP * HANGS_IN_STEP
    wanted = list(range(HANGS_IN_STEP))
    wait_until(lambda: all(rows[:HANGS_IN_STEP] == wanted for rows in steps_of(run, options)), RECORDS_S)
    steps = steps_of(run, options)
    said = [line for text in run.output() for line in text.splitlines() if line.startswith("hang: ")]
    flight = [run.folder / "hang" / flight_recorder_name(report.rank) for report in reports]
    result: dict[str, Any] = {
        "kind": found.kind,
        "named_ranks": found.ranks,
        "seq": None if found.block is None else found.block.seq,
        "expected_seq": seq,
        "sentence": sentence(found),
        "said_in_the_log": said[:1],
        "reported_after_s": (max(r.written_unix_ns for r in reports) - planted_ns) / 1e9,
        "limit_s": limit_s,
        "num_reports": len(reports),
        "whole_steps_recorded": [len(rows) for rows in steps],
        "flight_recorder_bytes": [path.stat().st_size if path.exists() else None for path in flight],
        "device": None if reports[0].device is None else msgspec.to_builtins(reports[0].device),
        "not_measured": reports[0].not_measured,
        "main_threads": [report.main_thread[:3] for report in reports],
    }
    result["right"] = (
        found.ranks == [LATE_RANK]
        and result["seq"] == seq
        and "all_reduce" in result["sentence"]
        and result["reported_after_s"] < limit_s
        and len(reports) == options.ranks
        and all(status == ABORT_STATUS for status in run.statuses())
        and all(rows[:HANGS_IN_STEP] == wanted for rows in steps)
    )
    if not result["right"]:
        result["reports"] = [shortened(msgspec.to_builtins(report)) for report in reports]
    return result


def shortened(report: dict[str, Any]) -> dict[str, Any]:
    """Without the calls far from the first ones that are not finished."""
    for group in report["groups"] or []:
        group["calls"] = [call for call in group["calls"] if abs(call["step"] - HANGS_IN_STEP) <= 2]
    return report


def steps_of(run: Run, options: argparse.Namespace) -> list[list[int]]:
    from aorta.errors import AortaError
    from aorta.records.reader import read_steps

    steps = []
    for rank in range(options.ranks):
        rows: list[int] = []
        with suppress(AortaError):  # nothing of this rank
            rows += [r.global_step for r in read_steps(run.folder / f"rank_{rank}_metrics.jsonl", [])]
        steps.append(rows)
    return steps


def show(result: dict[str, Any]) -> None:
    if "sentence" not in result:
        print(f"{result['case']:8s} NO: {result['fault']}", *result["output"], sep="\n", flush=True)
        return
    named = ",".join(map(str, result["named_ranks"])) or "-"
    kept = "/".join(map(str, result["whole_steps_recorded"]))
    ended_s = result["ended_after_reports_s"]
    ended = "killed" if ended_s is None else f"ended {ended_s:.1f} s later"
    verdict = "right" if result["right"] else "WRONG"
    print(
        f"{result['case']:8s} {verdict}: names rank {named} at #{result['seq']} "
        f"after {result['reported_after_s']:.1f} s (limit {result['limit_s']:.1f} s), {ended} with "
        f"{result['exit_statuses']}, steps kept {kept}\n         {result['sentence']}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
