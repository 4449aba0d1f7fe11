"""Does a job recover under `torchrun --max-restarts`, and is it one run afterwards?

    python benchmarks/reliability/restarts.py --trials 40 --output restarts_gloo.csv
    python benchmarks/reliability/restarts.py --trials 10 --backend nccl --output restarts_nccl.csv
    python benchmarks/reliability/restarts.py own --trials 40 --output restarts_own.csv
    python benchmarks/reliability/restarts.py kills --trials 20 --output kills.csv

In each trial one or two faults (exception, SIGKILL, out of memory, hang with hang.action=abort) strike
random ranks at random steps of train.py, which resumes from its latest checkpoint. A trial is right where the
job ends with status 0, every loss of every step is bit by bit that of a run without a fault, run.json has one
run id and an attempt for each start with the right kind of ending and the right rank, and the report reads it
as one run.

`own` does so with own_training.py, which knows nothing of aorta: each trial runs it bare and under `aorta
run`, either of them first in turn. What is lost bare is torch's own.

`kills` sends SIGKILL at a random moment of a recorded loop. The loop says on its standard output which step
it has begun; every step before that one was closed, and the report has to have it.

Exit status 1 where a trial is not right.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import arguments, choose, write  # noqa: E402

from aorta.account.load.open import load_run  # noqa: E402
from aorta.errors import AortaError  # noqa: E402
from aorta.records.reader import read_run, read_steps  # noqa: E402

KINDS = ("exception", "sigkill", "oom", "hang")
ENDINGS = {"exception": "crashed", "sigkill": "killed", "oom": "crashed", "hang": "hung"}
NUM_STEPS, CHECKPOINT_EVERY = 20, 5
MODEL = {"hidden": 16, "ffn": 24, "num_layers": 1, "vocab_size": 32}


def restarts() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial, which seeds it")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--mode", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--hang-s", type=float, default=4.0, help="hang.timeout_s; more on a busy machine")
    parser.add_argument("--limit-s", type=float, default=240.0, help="for one trial")
    parser.add_argument("--jobs", type=int, default=1, help="trials at the same time")
    parser.add_argument("--total-s", type=float, default=float("inf"), help="no trial begins after that")
    options = parser.parse_args()
    until_s = time.monotonic() + options.total_s
    results: list[dict[str, Any]] = []
    numbers = range(options.first, options.first + options.trials)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        folder = Path(name)
        status, _, said = launch(folder / "undisturbed", [], options)
        assert status == 0, f"the run without faults fails: {said}"
        expected = losses(folder / "undisturbed", options.ranks)

        def trial(number: int) -> dict[str, Any] | None:
            if time.monotonic() > until_s:
                return None
            faults = faults_of(number, options.ranks)
            return judged(folder / str(number), number, faults, expected, options)

        for result in pool.map(trial, numbers):
            if result is None:
                continue
            results.append(result)
            print(json.dumps(result), flush=True)
            write(options.output, results)
    num_right = sum(result["right"] for result in results)
    print(f"{num_right} of {len(results)} recovered and are one run; {len(numbers)} were asked for")
    return 0 if num_right == len(numbers) else 1


def faults_of(number: int, num_ranks: int) -> list[dict[str, Any]]:
    """One fault in each of the first one or two attempts; the kinds take turns."""
    chance = random.Random(number)
    return [
        {
            "attempt": attempt,
            "rank": chance.randrange(num_ranks),
            # Later than the steps that the first attempt's fault left, or it would not be come to.
            "step": chance.randrange(1 + 8 * attempt, 11 + 8 * attempt),
            "kind": KINDS[(number + attempt * (1 + number // 4)) % 4],
        }
        for attempt in range(chance.choice((1, 1, 2)))
    ]


def launch(
    folder: Path, faults: list[dict[str, Any]], options: argparse.Namespace
) -> tuple[int | None, float, str]:
    """Exit status (None: it did not end in time), seconds, the end of what it wrote."""
    overrides = [
        f"training.output_dir={folder}", f"training.max_steps={NUM_STEPS}", "training.deterministic=true",
        f"training.checkpoint_every={CHECKPOINT_EVERY}", "training.resume=latest", "training.precision=fp32",
        "training.batch_size=1", "data.seq_len=8", f"distributed.backend={options.backend}",
        f"parallel.mode={options.mode}", f"hang.timeout_s={options.hang_s:g}", "hang.action=abort",
        "logging.tensorboard=false",
        *(f"model.{name}={value}" for name, value in MODEL.items()),
    ]  # fmt: skip
    if options.backend == "gloo":
        overrides.append("training.device=cpu")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3",
        "--nproc_per_node", str(options.ranks), str(HERE / "faulty_training.py"), "--override", *overrides,
    ]  # fmt: skip
    environment = {**os.environ, "FAULTS": json.dumps(faults), "OMP_NUM_THREADS": "1"}
    start_s = time.monotonic()
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=options.limit_s
        )
    except subprocess.TimeoutExpired as error:
        return None, time.monotonic() - start_s, (error.stderr or b"").decode(errors="replace")[-3000:]
    seconds = time.monotonic() - start_s
    return result.returncode, seconds, result.stderr[:6000] + result.stderr[-3000:]


def losses(folder: Path, num_ranks: int) -> list[dict[int, float | None]]:
    """Losses by rank and global step; a step that ran twice has the later one."""
    return [
        {
            record.global_step: record.loss
            for record in read_steps(folder / f"rank_{rank}_metrics.jsonl", [])
            if record.source in ("events", "host")
        }
        for rank in range(num_ranks)
    ]


def judged(
    folder: Path,
    number: int,
    faults: list[dict[str, Any]],
    expected: list[dict[int, float | None]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    status, seconds, said = launch(folder, faults, options)
    result: dict[str, Any] = {"trial": number, "faults": faults, "status": status, "s": round(seconds, 1)}
    wrong = []
    if status != 0:
        wrong.append(f"status {status}")
    try:
        if losses(folder, options.ranks) != expected:
            wrong.append("losses differ from those of the run without a fault")
        run = read_run(folder)
        result["attempts"] = [
            {
                "first_step": attempt.first_step,
                "last_steps": attempt.last_steps,
                "ending": None if attempt.ending is None else attempt.ending.kind,
                "ranks": [] if attempt.ending is None else attempt.ending.ranks,
                "why": None if attempt.ending is None else attempt.ending.why,
            }
            for attempt in run.attempts
        ]
        wrong += wrong_endings(result["attempts"], faults)
        report = load_run(folder, "joined")
        if report.global_step.tolist() != list(range(NUM_STEPS)):
            wrong.append("the report has other steps than the run")
        result["notes"] = report.notes
    except AortaError as error:
        wrong.append(str(error))
    if wrong and status != 0:
        result["stderr"] = said
    return result | {"wrong": wrong, "right": not wrong}


def wrong_endings(attempts: list[dict[str, Any]], faults: list[dict[str, Any]]) -> list[str]:
    wanted = [ENDINGS[fault["kind"]] for fault in faults] + ["finished"]
    kinds = [attempt["ending"] for attempt in attempts]
    if kinds != wanted:
        return [f"attempts ended {kinds}, not {wanted}"]
    return [
        f"attempt {number}: blames {attempt['ranks']}, not {fault['rank']}"
        for number, (attempt, fault) in enumerate(zip(attempts, faults, strict=False))
        if fault["kind"] != "hang"
        and attempt["ranks"] != [fault["rank"]]
        or fault["kind"] == "hang"
        and f"rank {fault['rank']} " not in (attempt["why"] or "")
    ]


# ---- a script of one's own, with and without -------------------------------------------------------


def own() -> int:
    parser = arguments("One own script over gloo, bare and under `aorta run` in turn: which of them recover?")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial, which seeds it")
    parser.add_argument("--limit-s", type=float, default=90.0, help="for one run")
    parser.add_argument("--total-s", type=float, default=float("inf"), help="no trial begins after that")
    options = parser.parse_args()
    until_s = time.monotonic() + options.total_s
    rows: list[dict[str, Any]] = []
    for number in range(options.first, options.first + options.trials):
        if time.monotonic() > until_s:
            break
        for attached in (bool(number % 2), not number % 2):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
                rows.append(own_trial(Path(name), number, attached, options.limit_s))
            print(json.dumps(rows[-1]), flush=True)
            write(options.output, rows)
    for attached in (False, True):
        right = [row["right"] for row in rows if row["attached"] is attached]
        print(f"{'under aorta run' if attached else 'bare'}: {sum(right)} of {len(right)} recovered")
    print(f"{options.trials} trials were asked for")
    return 0


def own_trial(folder: Path, number: int, attached: bool, limit_s: float) -> dict[str, Any]:
    chance = random.Random(number)
    kinds = ("_exit-7", "exception", "sigkill")
    faults = [
        {
            "attempt": attempt,
            "rank": chance.randrange(2),
            "step": chance.randrange(1 + 5 * attempt, 6 + 5 * attempt),
            "kind": kinds[(number + attempt) % 3],
        }
        for attempt in range(1 + number % 2)
    ]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3",
        "--nproc_per_node", "2", str(HERE / "own_training.py"), str(folder / "c.pt"), "12", "gloo",
    ]  # fmt: skip
    if attached:
        command = [
            sys.executable, "-m", "aorta", "run", "-o", str(folder / "run"), "--no-report", "--", *command
        ]  # fmt: skip
    environment = {
        **os.environ, "FAULTS": json.dumps(faults), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)
    }  # fmt: skip
    row: dict[str, Any] = {"trial": number, "attached": attached, "faults": faults}
    start_s = time.monotonic()
    with open(folder / "log", "w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True
        )
        try:
            row["status"] = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            row["status"] = None
            process.terminate()  # torchrun ends its ranks, which are in sessions of their own
            try:
                process.wait(45)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        said = log.read()
    row["s"] = round(time.monotonic() - start_s, 1)
    wrong = [] if row["status"] == 0 else [f"status {row['status']}"]
    if attached:
        try:
            run = read_run(folder / "run")
            row["attempts"] = [attempt.ending.kind if attempt.ending else None for attempt in run.attempts]
            steps = load_run(folder / "run", "own").global_step.tolist()
            if row["status"] == 0 and steps != list(range(12)):
                wrong.append(f"the report has steps {steps}")
        except AortaError as error:
            wrong.append(str(error))
    if wrong:
        row["said"] = said[-4000:]
    return row | {"wrong": wrong, "right": not wrong}


# ---- kills of a loop ------------------------------------------------------------------------------

LOOP = """
import os, sys, time, aorta
with aorta.instrument(sys.argv[1]) as recorder:
    for number in range(1_000_000):
        with recorder.step() as step:
            os.write(1, b"%d\\n" % number)
            step.log(loss=1.0)
            time.sleep(0.0005 * (number % 5))
"""


def kills() -> int:
    parser = arguments("SIGKILL at a random moment of a recorded run on a CPU: which closed steps are lost?")
    parser.add_argument("--trials", type=int, default=20)
    options = parser.parse_args()
    rows = [killed(number) for number in range(options.trials)]
    num_lost = sum(row["lost"] for row in rows)
    print(f"{len(rows)} trials, {num_lost} closed steps lost, "
          f"{sum('killed' in row['story'] for row in rows)} reports begin with the kill")  # fmt: skip
    write(options.output, rows)
    return 1 if num_lost else 0


def killed(number: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        process = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(folder)], stdout=subprocess.PIPE, cwd=ROOT
        )
        assert process.stdout is not None
        begun = int(process.stdout.readline())
        time.sleep(random.Random(number).uniform(0.02, 0.6))
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().splitlines()
        process.wait()
        begun = int(rest[-1]) if rest else begun
        run = load_run(folder, "killed")
        missing = set(range(begun)) - set(run.global_step.tolist())
        return {"trial": number, "begun": begun, "lost": len(missing), "story": " ".join(run.story)}


if __name__ == "__main__":
    sys.exit(choose(__doc__, {"restarts": restarts, "own": own, "kills": kills}))
