"""Does a record say how a job ended: which rank, and by what?

    python benchmarks/reliability/endings.py --output endings.csv
    python benchmarks/reliability/endings.py --backend nccl --ranks 2 --only abort sleeps --output nccl.csv

Each kind of ending strikes each rank once, at a step of a script that knows nothing of aorta
(own_training.py), under `aorta run -- torchrun`. Right: the report's first lines name that rank (none where
the whole command was stopped) and that reason. Exit status 1 where one of them is wrong.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import arguments, write  # noqa: E402

from aorta.account.load.open import load_run  # noqa: E402
from aorta.errors import AortaError  # noqa: E402

NUM_STEPS, STEP = 12, 6
REASONS = {
    "exception": "crashed on rank {rank} .*: ValueError: planted by hand",
    "exit-3": "crashed on rank {rank} .*(SystemExit: 3|exit status 3)",
    "_exit-7": "crashed on rank {rank} .*exit status 7",
    "_exit-0": "crashed on rank {rank} .*exit status 0",
    "sigkill": "killed on rank {rank} .*SIGKILL",
    "sigterm": "killed on rank {rank} .*SIGTERM",
    "segv": "killed on rank {rank} .*SIGSEGV",
    "abort": "killed on rank {rank} .*SIGABRT",
    "terminate": "killed on rank {rank} .*SIGABRT: terminate called",
    "bus": "killed on rank {rank} .*SIGBUS",
    "sleeps": "hung on rank {rank} .*(waited in vain|timeout)",
    "out-of-memory": "crashed on rank {rank} .*MemoryError",
    "early": "a start ended before its first step: the process of rank {rank} with exit status 1",
    "late-exception": "crashed on rank {rank} .*: ValueError: planted by hand",
    "late-abort": "killed on rank {rank} .*SIGABRT",
    "ctrl-c": "stopped by SIGINT",
    "stop": "stopped by SIGTERM",
}
"""What the report's story has to say, by kind."""
STEPS = {"early": -1, "late-exception": NUM_STEPS, "late-abort": NUM_STEPS}
"""Where kinds strike that strike at no step: before torch is there, and when the process group is gone."""
TO_ALL = {"ctrl-c": signal.SIGINT, "stop": signal.SIGTERM}
"""Signals that the whole command gets: to every process of the terminal, or to `aorta run` alone."""


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--only", nargs="+", choices=REASONS, default=list(REASONS))
    parser.add_argument("--jobs", type=int, default=1, help="trials at the same time")
    parser.add_argument("--timeout-s", type=float, default=8.0, help="of the process group")
    parser.add_argument("--limit-s", type=float, default=180.0, help="for one trial")
    parser.add_argument("--total-s", type=float, default=float("inf"), help="no trial begins after that")
    options = parser.parse_args()
    until_s = time.monotonic() + options.total_s
    trials = [(kind, rank) for kind in options.only for rank in range(options.ranks)]
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        ThreadPoolExecutor(options.jobs) as pool,
    ):

        def one(trial: tuple[str, int]) -> dict[str, Any] | None:
            if time.monotonic() > until_s:
                return None
            return judged(Path(name) / f"{trial[0]}-{trial[1]}", *trial, options)

        for row in pool.map(one, trials):
            if row is None:
                continue
            rows.append(row)
            print(json.dumps(row), flush=True)
            write(options.output, rows)
    for kind in options.only:
        told = [row["right"] for row in rows if row["kind"] == kind]
        print(f"{kind:14} {sum(told)} of {len(told)}")
    num_right = sum(row["right"] for row in rows)
    print(f"{num_right} of {len(rows)} told the right rank and reason; {len(trials)} were asked for")
    return 0 if num_right == len(trials) else 1


def judged(folder: Path, kind: str, rank: int, options: Any) -> dict[str, Any]:
    folder.mkdir()
    status = launch(folder, kind, rank, options)
    try:
        story = load_run(folder / "run", "run").story
    except AortaError as error:
        story = [f"no report: {error}"]
    wanted = re.compile(REASONS[kind].format(rank=rank))
    right = any(wanted.search(line) for line in story[:4])
    return {"kind": kind, "rank": rank, "status": status, "right": right, "story": story[:4]}


def launch(folder: Path, kind: str, rank: int, options: Any) -> int | None:
    """Exit status; None: it did not end in time."""
    fault = {"attempt": 0, "rank": rank, "step": STEPS.get(kind, STEP), "kind": kind}
    environment = os.environ | {
        "FAULTS": json.dumps([] if kind in TO_ALL else [fault]),
        "TIMEOUT_S": str(options.timeout_s),
        "OMP_NUM_THREADS": "1",
        # Else NCCL's watchdog sleeps for a minute after a timeout, for its dump, before it ends the process.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
        "STEP_S": "0.5" if kind in TO_ALL else "0.02",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    command = [
        sys.executable, "-m", "aorta", "run", "-o", str(folder / "run"), "--no-report", "--",
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.ranks),
        "--max-restarts", "1" if kind == "early" else "0",
        str(HERE / "own_training.py"), str(folder / "checkpoint.pt"), str(NUM_STEPS), options.backend,
    ]  # fmt: skip
    with open(folder / "out", "wb") as out, open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command, stdout=out, stderr=log, env=environment, cwd=folder, start_new_session=True
        )
        try:
            if kind in TO_ALL:
                while b"step 4" not in (folder / "out").read_bytes() and process.poll() is None:
                    time.sleep(0.05)
                if kind == "ctrl-c":
                    os.killpg(process.pid, TO_ALL[kind])
                else:
                    process.send_signal(TO_ALL[kind])
            return process.wait(options.limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # so that torchrun ends the ranks, which are in sessions of their own
            with suppress(subprocess.TimeoutExpired):
                process.wait(40)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


if __name__ == "__main__":
    sys.exit(main())
