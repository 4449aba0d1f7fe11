"""Damaged files of every kind that aorta reads: each a number, a warning or one line, never a traceback.

    python benchmarks/reliability/fuzz.py --number 21525 --limit-s 3600 --output fuzz.csv
    python benchmarks/reliability/fuzz.py --only traces --first 812 --number 1 --keep DIR     # one again

Subjects (records, run.json, states, checkpoints, traces, configurations, ...) come in turn. Mutation n of a
subject depends on --seed, its name and n alone. Each is read by a forked process that has 1 GB and 5 s of
CPU time (limited.py). Ends after --limit-s. Exit status 1 where one failed; its first five stay in --keep.
"""

import argparse
import io
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a forked process has none of the threads of this one
os.environ.setdefault("NO_COLOR", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402, F401  # once, for all that is forked
from harness import arguments, write  # noqa: E402
from reliability.fuzz_subjects import SUBJECTS, Subject  # noqa: E402
from reliability.limited import Ended, ended  # noqa: E402

from aorta.errors import AortaError  # noqa: E402

MOST_FAILURES = 5
"""Failures of one kind that are listed and kept."""


@dataclass
class Outcome:
    """Counts and maxima of one subject."""

    counts: Counter[str] = field(default_factory=Counter)
    most_cpu_s: float = 0.0
    most_mb: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--number", type=int, default=21_525, help="mutations, of all subjects together")
    parser.add_argument("--first", type=int, default=0, help="number of a subject's first mutation")
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="names of subjects")
    parser.add_argument("--keep", type=Path, help="folder for what failed")
    options = parser.parse_args()
    subjects = [subject for subject in SUBJECTS if options.only is None or subject.name in options.only]
    began_s, outcomes = time.monotonic(), {subject.name: Outcome() for subject in subjects}
    with tempfile.TemporaryDirectory(prefix="fuzz") as name:
        for number, subject in enumerate(subjects):
            prepare(subject, Path(name) / f"good{number}")
        for number in range(options.number):
            if time.monotonic() - began_s > options.limit_s:
                break
            subject = subjects[number % len(subjects)]
            mutation = options.first + number // len(subjects)
            one(subject, mutation, Path(name) / "bad", outcomes[subject.name], options)
    return told(outcomes, time.monotonic() - began_s, options)


def prepare(subject: Subject, folder: Path) -> None:
    """Good files, read once in a fork, and once here: what was imported then is there for all forks."""
    folder.mkdir()
    subject.make(folder)
    subject.folder = folder
    trial = folder.with_name("trial")
    shutil.copytree(folder, trial)
    if not subject.is_asked_whole:
        subject.damage(trial, random.Random(0))
    end = read(subject, trial, random.Random(0))
    if subject.is_asked_whole and end.verdict not in ("number", "warning"):
        raise SystemExit(f"{subject.name}: good files are refused: {end.errors}")
    if not subject.name.startswith("checkpoints"):  # those start a process group, and with it threads
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), suppress(SystemExit, AortaError):
            subject.ask(trial, random.Random(0))()
    shutil.rmtree(trial)


def one(subject: Subject, mutation: int, bad: Path, outcome: Outcome, options: argparse.Namespace) -> None:
    """Damages a copy and reads it."""
    rng = random.Random(f"{options.seed} {subject.name} {mutation}")
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(subject.folder, bad)
    subject.damage(bad, rng)
    end = read(subject, bad, rng)
    verdict = end.verdict
    outcome.counts[verdict] += 1
    outcome.most_cpu_s = max(outcome.most_cpu_s, end.cpu_s)
    outcome.most_mb = max(outcome.most_mb, end.peak_mb)
    if verdict == "FAILED":
        words = (end.error_lines or [""])[-1].replace(str(bad), "PLACE")[:300]
        row = {"mutation": mutation, "status": end.status, "cpu_s": end.cpu_s, "words": words}
        outcome.failures.append(row)
        print(f"{subject.name} {row}", flush=True)
        if options.keep is not None and len(outcome.failures) <= MOST_FAILURES:
            shutil.copytree(bad, options.keep / f"{subject.name} {mutation}", dirs_exist_ok=True)


def read(subject: Subject, folder: Path, rng: random.Random) -> Ended:
    call = subject.ask(folder, rng)

    def command() -> None:
        """Functions of the library raise what commands print."""
        try:
            call()
        except AortaError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)

    return ended(command)


def told(outcomes: dict[str, Outcome], seconds: float, options: argparse.Namespace) -> int:
    kinds = ("number", "warning", "one line", "FAILED")
    print("| read | mutations | number | number and warning | one line | failed | most CPU s | most MB |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, outcome in outcomes.items():
        cells = [str(outcome.counts[kind]) for kind in kinds]
        most = f"{outcome.most_cpu_s:.1f} | {outcome.most_mb:.0f}"
        print(f"| {name} | {outcome.counts.total()} | {' | '.join(cells)} | {most} |")
    total = sum((outcome.counts for outcome in outcomes.values()), Counter[str]())
    print(f"{total.total()} mutations in {seconds:.0f} s, {total['FAILED']} failed")
    rows: list[dict[str, Any]] = [
        {
            "read": name,
            **{kind: outcome.counts[kind] for kind in kinds},
            "most_cpu_s": outcome.most_cpu_s,
            "most_mb": round(outcome.most_mb),
        }
        for name, outcome in outcomes.items()
    ]
    with suppress(OSError):
        write(options.output, rows)
    return 1 if total["FAILED"] or not total else 0


if __name__ == "__main__":
    sys.exit(main())
