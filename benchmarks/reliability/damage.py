"""Damaged folders of a run x report, why, compare, top, merge and hang: what each command then says.

    python benchmarks/reliability/damage.py [-k WORD] [--seed 0] [--output damage.csv]

Two ranks record 1,100 steps on the CPU; reports of a hang and traces are put beside them. A copy is damaged
in one way, and a forked process with limited memory reads it. refused: one line, exit status 2. told: a note
or warning that the whole run does not have. unharmed: the same numbers as before. Wrong: a traceback, more
than 20 s, another number and not a word about it; of report also a mean step outside the whole run's 95 %
interval. Exit status 1 where one is wrong.
"""

import ctypes
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import numpy as np  # noqa: E402
from harness import ROOT, arguments, write  # noqa: E402
from reliability.limited import QUICK, Ended, ended  # noqa: E402
from reliability.spoilt_inputs import OF_LINES, damage_lines  # noqa: E402

from aorta.account.load.open import load_run  # noqa: E402
from aorta.cli import main as aorta_command  # noqa: E402
from aorta.hang.report import CallState, GroupState, HangReport  # noqa: E402
from aorta.records.files import steps_name  # noqa: E402
from aorta.records.reader import read_steps  # noqa: E402
from aorta.records.schema import KernelNames  # noqa: E402
from aorta.records.writer import LineWriter, write_json, write_sealed  # noqa: E402

LOOP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(1100):
    model(torch.randn(256, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "report": lambda run, whole: ["report", str(run), "--json", "-o", str(run.parent / "out"), *QUICK],
    "why": lambda run, whole: ["why", str(run), "--json"],
    "compare": lambda run, whole: [
        "compare", str(whole), str(run), "--json", "-o", str(run.parent / "out"), *QUICK,
    ],
    "top": lambda run, whole: ["top", str(run), "--once", "--json"],
    "merge": lambda run, whole: ["merge", str(run)],
    "hang": lambda run, whole: ["hang", str(run), "--json"],
}  # fmt: skip
MOST_S = 20.0
WORDS = ("notes", "story", "not_measured", "comparison_notes", "cannot_tell", "damage", "reason", "nothing")
"""Keys below which the commands put what is to be known about their numbers."""
FILES = {
    "steps": "rank_0_metrics.jsonl",
    "columns": "rank_0_columns.arrow",
    "run.json": "run.json",
    "state": "rank_0_state.jsonl",
    "stacks": "rank_0_stacks.jsonl",
    "sites": "rank_0_sites.json",
    "kernel names": "rank_0_kernels.json",
    "hang report": "hang/rank0.json",
    "trace": "torch_profiler/rank0/window.pt.trace.json",
}
Damage = Callable[[Path, Path, random.Random], None]


class Printed(NamedTuple):
    numbers: dict[str, float]
    words: set[str]
    """Without their digits."""
    step_ms: float | None


# ---- the whole run -------------------------------------------------------------------------------


def recorded(folder: Path, name: str) -> Path:
    """A run of two ranks with columns, reports of a hang, and traces."""
    run = folder / name
    if run.exists():
        return run
    (folder / "loop.py").write_text(LOOP)
    command = [sys.executable, "-m", "aorta", "run", "--overhead", "off", "--no-report", "-o", str(run), "--"]
    command += [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        str(folder / "loop.py"),
    ]
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, env=settings, timeout=120)
    (run / "hang").mkdir()
    for rank in range(2):
        path = run / steps_name(rank)
        records = list(read_steps(path, []))
        path.unlink()
        LineWriter.create(path).close()
        with LineWriter.append(path, with_columns=True) as writer:
            for record in records:
                writer.write(record)
        write_json(run / "hang" / f"rank{rank}.json", stuck(rank))
        write_sealed(run / f"rank_{rank}_kernels.json", KernelNames(names=["gemm"], run_id=records[0].run_id))
        traced(run / "torch_profiler" / f"rank{rank}" / "window.pt.trace.json", records[1000:1006], rank)
    return run


def stuck(rank: int) -> HangReport:
    """Rank 1 has not come to the eighth all_reduce."""
    calls = [
        CallState(seq=seq, op="all_reduce", bytes=64, dtype="float32", step=seq, started=True,
                  finished=seq < 7, age_s=3.0)
        for seq in range(8 - rank)
    ]  # fmt: skip
    group = GroupState(key="0", name="default", ranks=[0, 1], backend="gloo", num_seen=8 - rank, calls=calls)
    return HangReport(
        rank=rank, world_size=2, host="here", pid=100 + rank, written_unix_ns=0, reason="no step for 9 s",
        step=7, num_steps=8, since_s=9.0, limit_s=9.0, groups=[group], main_thread=["step (loop.py:7)"],
        device=None,
    )  # fmt: skip


def traced(path: Path, records: list[Any], rank: int) -> None:
    """Kineto: in each step a kernel and a collective that overlap."""
    events: list[dict[str, Any]] = []
    for record in records:
        start_us, step_us = record.start_unix_ns / 1e3, record.step_ms * 1e3
        name = f"aorta.step#{record.global_step}"
        events.append({"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": start_us,
                       "dur": step_us})  # fmt: skip
        for stream, kernel in ((7, "gemm"), (20, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL")):
            number = len(events)
            launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1}
            events.append(launch | {"ts": start_us + 10, "dur": 2, "args": {"correlation": number}})
            runs = {"ph": "X", "cat": "kernel", "name": kernel, "pid": 0, "tid": stream}
            runs |= {"ts": start_us + 20 * stream, "dur": step_us / 4}
            args = {"correlation": number, "stream": stream, "device": 0}
            events.append(runs | {"args": args})
    path.parent.mkdir(parents=True)
    document = {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}
    path.write_text(json.dumps(document))


# ---- damage --------------------------------------------------------------------------------------


def of_bytes(run: Path, other: Path, chance: random.Random, name: str, change: Any) -> None:
    path = run / name
    path.write_bytes(change(path.read_bytes(), chance))


def flipped(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


OF_BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "empty": lambda data, chance: b"",
    "torn": lambda data, chance: data[: chance.randrange(1, len(data))],
    "a bit flipped": flipped,
}


def gone(run: Path, other: Path, chance: random.Random, name: str) -> None:
    (run / name).unlink()


def foreign(run: Path, other: Path, chance: random.Random, name: str) -> None:
    shutil.copy(other / name, run / name)


def pipe(run: Path, other: Path, chance: random.Random, name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)


def loop(run: Path, other: Path, chance: random.Random, name: str) -> None:
    (run / name).unlink()
    (run / name).symlink_to(run / name)


def folder(run: Path, other: Path, chance: random.Random, name: str) -> None:
    (run / name).unlink()
    (run / name).mkdir()


def linked(run: Path, other: Path, chance: random.Random, name: str) -> None:
    """A link to the file: harmless."""
    (run / name).rename(run.parent / "moved")
    (run / name).symlink_to(run.parent / "moved")


def closed(run: Path, other: Path, chance: random.Random, name: str) -> None:
    """Nobody may read it."""
    os.chmod(run / name, 0)


OF_PLACES: dict[str, Callable[..., None]] = {
    "a pipe": pipe,
    "a link to itself": loop,
    "a folder": folder,
    "a link": linked,
    "no permission": closed,
}


def remove_rank(run: Path, other: Path, chance: random.Random, rank: int) -> None:
    for path in run.glob(f"rank_{rank}_*"):
        path.unlink()


def further_rank(run: Path, other: Path, chance: random.Random) -> None:
    shutil.copy(run / steps_name(0), run / steps_name(5))


def exchanged_ranks(run: Path, other: Path, chance: random.Random) -> None:
    (run / steps_name(0)).rename(run / "x")
    (run / steps_name(1)).rename(run / steps_name(0))
    (run / "x").rename(run / steps_name(1))


def all_empty(run: Path, other: Path, chance: random.Random) -> None:
    for path in run.glob("rank_*"):
        path.write_bytes(b"")


def nothing(run: Path, other: Path, chance: random.Random) -> None:
    shutil.rmtree(run)
    run.mkdir()


def last_steps_gone(run: Path, other: Path, chance: random.Random) -> None:
    damage_lines(run, other, lambda a, b: a[:900])


def number_in_newest(run: Path, other: Path, chance: random.Random) -> None:
    """A digit of a step time among the newest, which still reads as a number."""

    def change(lines: list[bytes], foreign_lines: list[bytes]) -> list[bytes]:
        line = re.sub(rb'"step_ms":\d', b'"step_ms":9', lines[-3], count=1)
        return [*lines[:-3], line, *lines[-2:]]

    damage_lines(run, other, change)


def newest_gone(run: Path, other: Path, chance: random.Random) -> None:
    damage_lines(run, other, lambda a, b: [*a[:-8], *a[-4:]])


def of_lines(run: Path, other: Path, chance: random.Random, change: Any) -> None:
    damage_lines(run, other, change)


def kinds() -> Iterator[tuple[str, Damage]]:
    for what, change in OF_LINES.items():
        if "tokens" not in what and what not in ("a number changed", "empty"):  # this loop tells no tokens
            yield f"lines: {what}", partial(of_lines, change=change)
    for file, name in FILES.items():
        for what, of_file in OF_BYTES.items():
            yield f"{file}: {what}", partial(of_bytes, name=name, change=of_file)
        yield f"{file}: gone", partial(gone, name=name)
        yield f"{file}: of another run", partial(foreign, name=name)
    for file in ("steps", "run.json", "hang report"):
        for what, place in OF_PLACES.items():
            yield f"{file}: {what}", partial(place, name=FILES[file])
    yield "ranks: 0 gone", partial(remove_rank, rank=0)
    yield "ranks: 1 gone", partial(remove_rank, rank=1)
    yield "ranks: one beyond the run's", further_rank
    yield "ranks: exchanged", exchanged_ranks
    yield "ranks: all empty", all_empty
    yield "ranks: empty folder", nothing
    yield "newest: 200 steps of a rank gone", last_steps_gone
    yield "newest: a digit of a time", number_in_newest
    yield "newest: four lines gone", newest_gone


# ---- verdicts ------------------------------------------------------------------------------------


def as_a_user() -> None:
    """Give up what lets root read a file that its mode closes (capset of linux/capability.h, version 3)."""
    if os.geteuid() == 0:
        header, nothing_left = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        ctypes.CDLL(None).capset(header, nothing_left)


def called(command: str, run: Path, whole: Path) -> Ended:
    def call() -> None:
        as_a_user()
        aorta_command.main(COMMANDS[command](run, whole), prog_name="aorta")

    return ended(call)


def printed(end: Ended, run: Path) -> Printed:
    numbers: dict[str, float] = {}
    words = {plain(line, run) for line in end.errors.splitlines() if line}

    def walk(value: Any, place: str, tells: bool) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{place}/{key}", tells or key in WORDS)
        elif isinstance(value, list):
            for number, item in enumerate(value):
                walk(item, f"{place}/{number}", tells)
        elif isinstance(value, str) and tells:
            words.add(plain(value, run))
        elif isinstance(value, int | float) and "unix_ns" not in place:
            numbers[place] = float(value)

    try:
        document = json.loads(end.text)
    except ValueError:
        document = {"text": [float(text) for text in re.findall(r"\d+\.?\d*", end.text)]}
    walk(document, "", False)
    step_ms = numbers.get("/datasets/run/account/step_ms")
    return Printed(numbers, words, step_ms)


def plain(text: str, run: Path) -> str:
    return re.sub(r"\d+", "#", text.replace(str(run.parent), ""))


def verdict(end: Ended, after: Printed, before: Printed, interval: tuple[float, float]) -> str:
    if end.verdict == "FAILED":
        return f"WRONG: {end.first_line[:200]}"
    if end.status == 2:
        return "refused"
    if after.step_ms is not None and not interval[0] <= after.step_ms <= interval[1]:
        return f"WRONG: mean step {after.step_ms:.4g} ms, whole {interval[0]:.4g} to {interval[1]:.4g}"
    if after.words - before.words:
        return "told"
    changed = [place for place in before.numbers if after.numbers.get(place) != before.numbers[place]]
    return f"WRONG: {len(changed)} numbers, {changed[0]}" if changed else "unharmed"


def interval_of(run: Path) -> tuple[float, float]:
    """95 % interval of the mean step, from the means of 20 stretches of steps."""
    from scipy.stats import t

    step_ms = load_run(run, "run").metrics["step_ms"].mean(axis=0)
    means = [part.mean() for part in np.array_split(step_ms, 20)]
    half = t.ppf(0.975, 19) * np.std(means, ddof=1) / 20**0.5
    return float(np.mean(means) - half), float(np.mean(means) + half)


def trial(number: int, command: str, seed: int, whole: Path, other: Path) -> tuple[Ended, Printed, float]:
    with tempfile.TemporaryDirectory(prefix="damage_") as name:
        run = Path(name) / "damaged" / "run"  # compare names both by the folders above
        shutil.copytree(whole, run)
        if number >= 0:
            list(kinds())[number][1](run, other, random.Random(1000 * seed + number))
        started_s = time.perf_counter()
        end = called(command, run, whole)
        return end, printed(end, run), time.perf_counter() - started_s


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("-k", dest="word", default="", help="only kinds with this word")
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--runs", type=Path, help="folder that keeps the whole runs for further trials")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--most-s", type=float, default=MOST_S, help="for one command; more on a busy machine"
    )
    options = parser.parse_args()
    started_s = time.perf_counter()
    rows: list[dict[str, Any]] = []
    names = [name for name, _ in kinds()]
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        runs = options.runs or Path(place)
        runs.mkdir(parents=True, exist_ok=True)
        whole, other = (recorded(runs, name) for name in ("run", "other"))
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(1, mp_context=context) as pool:  # its threads would be lost in forks
            interval = pool.submit(interval_of, whole).result()
        with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
            asked = partial(pool.submit, partial(trial, seed=options.seed, whole=whole, other=other))
            usual = {command: asked(-1, command) for command in options.commands}
            cases = [
                (i, command)
                for i, name in enumerate(names)
                if options.word in name
                for command in options.commands
            ]
            answers = [asked(i, command) for i, command in cases]
            for command, answer in usual.items():
                end = answer.result()[0]
                assert end.status == 0, (command, end)
            for (i, command), answer in zip(cases, answers, strict=True):
                end, after, wall_s = answer.result()
                said = verdict(end, after, usual[command].result()[1], interval)
                said = said if wall_s <= options.most_s else f"WRONG: {wall_s:.0f} s"
                row = {"kind": names[i], "command": command, "verdict": said}
                rows.append(row | {"wall_s": round(wall_s, 2), "text": end.first_line[:160]})
                if said.startswith("WRONG"):
                    print(names[i], command, said, sep="  ", flush=True)
    counts = Counter((row["command"], row["verdict"].partition(":")[0]) for row in rows)
    print("| command | kinds | refused | told | unharmed | wrong | longest s |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for command in options.commands:
        members = [row for row in rows if row["command"] == command]
        cells = [counts[command, word] for word in ("refused", "told", "unharmed", "WRONG")]
        longest_s = max(row["wall_s"] for row in members)
        print("|", " | ".join(map(str, (command, len(members), *cells, longest_s))), "|")
    num_wrong = sum(row["verdict"].startswith("WRONG") for row in rows)
    print(f"{len(rows)} trials, {num_wrong} wrong, {time.perf_counter() - started_s:.0f} s")
    write(options.output, rows)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
