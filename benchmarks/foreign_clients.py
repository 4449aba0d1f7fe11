"""Does `aorta run` record published training programs, and leave them as they were?

    python benchmarks/foreign_clients.py --sources FOLDER --keep FOLDER [PROGRAM...] --output published.csv

FOLDER of --sources holds checkouts named OWNER+REPOSITORY. Each program runs without and with `aorta run`, as
published, tiny, over gloo on CPUs; about a minute each. Beside it, in both runs, foreign/witness writes what
each process did: losses, a hash of the parameters after each call of an optimizer, how many collectives the
process groups and PyTorch's Flight Recorder counted. A program is right where all that is bit by bit the same
in both runs, every rank that trains has as many steps as its arguments say, as many collectives were seen as
were counted, and steps from the fourth on have as many as were counted between the optimizer's calls.

Exit status 1 where a program is not right.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreign.programs import PROGRAMS, Program, prepare
from harness import ROOT, arguments, write

LEARNED_STEPS = 3


@dataclass
class Result:
    """One row."""

    program: str
    right: bool = False
    wrong: list[str] = field(default_factory=list)
    identical: bool | None = None
    losses: int | None = None
    calls: int | None = None
    """Calls of optimizers on rank 0 that the witness counted."""
    steps: int | None = None
    expected: int | None = None
    seen: int | None = None
    counted: int | None = None
    """Collectives that the process groups counted, as the witness read them."""
    before: int | None = None
    """Counted before the process had a group and an optimizer, or a backward pass, when recording starts."""
    traced: int | None = None
    """Entries of PyTorch's Flight Recorder, which starts before training and has no sends and receives."""
    per_step: list[int] = field(default_factory=list)
    steps_at: str | None = None
    messages: list[str] = field(default_factory=list)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("program", nargs="*", metavar="PROGRAM", help="all where none")
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable, help="that has the libraries")
    parser.add_argument("--limit-s", type=float, default=300.0, help="for one launch")
    parser.add_argument("--keep", type=Path, required=True, help="folder for logs, data and records")
    options = parser.parse_args()
    rows: list[Result] = []
    prepare(options.keep, options.python)
    for name in options.program or PROGRAMS:
        row = judged(name, options.keep / name, options)
        rows.append(row)
        print(
            f"{name:28} {'right' if row.right else 'WRONG'}  {row.steps} steps of {row.expected}, "
            f"{row.seen} collectives of {row.counted}; {'; '.join(row.wrong)}",
            flush=True,
        )
        write(options.output, [vars(row) for row in rows])
    return 0 if all(row.right for row in rows) else 1


def judged(name: str, folder: Path, options: argparse.Namespace) -> Result:
    program, result = PROGRAMS[name], Result(name, expected=PROGRAMS[name].steps)
    source = options.sources / program.source
    if not source.exists():
        result.wrong.append(f"{source} is not there")
        return result
    shutil.rmtree(folder, ignore_errors=True)
    for mode in ("without", "with"):
        (folder / mode).mkdir(parents=True)
        status = launch(program, source, folder, mode, options)
        if status != 0:
            result.wrong.append(f"{mode} aorta: exit status {status}")
            return result
    lines = (folder / "with.log").read_text(errors="replace").splitlines()
    result.messages = [
        line for line in lines if line.startswith("aorta") and " recorded, steps at" not in line
    ]
    if result.messages:
        result.wrong.append("messages")
    check(program, folder, result)
    result.right = not result.wrong
    return result


def launch(program: Program, source: Path, folder: Path, mode: str, options: argparse.Namespace) -> int:
    """Exit status of the command; 124 where it did not end in time."""
    place = folder / f"source_{mode}"
    shutil.copytree(source / program.folder, place)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [
                str(ROOT / "benchmarks" / "foreign" / "witness"),
                str(ROOT),
                str(options.keep / "data" / "modules"),
            ]
        ),
        "WITNESS_OUT": str(folder / mode),
        "WITNESS_SEED": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HOME": str(options.keep / "hf"),
        "TORCH_FR_BUFFER_SIZE": "100000",
        "PATH": f"{Path(options.python).parent}{os.pathsep}{os.environ['PATH']}",
    }
    environment |= {"WITNESS_DEVICES": str(program.ranks)} if program.devices else {}
    environment |= program.variables
    words = program.words(options.keep / "data")
    command = [options.python, *words]
    if program.torchrun:
        agent = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(program.ranks)]
        command = [options.python, *agent, *words]
    if mode == "with":
        run = [options.python, "-m", "aorta", "run", "-o", str(folder / "run"), "--no-report"]
        command = [*run, *program.options, "--", *command]
    for name, target in program.links.items():
        shutil.rmtree(place / name, ignore_errors=True)
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).symlink_to(options.keep / "data" / target)
    with open(folder / f"{mode}.log", "w") as log:
        process = subprocess.Popen(
            command, cwd=place, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            return process.wait(options.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return 124


def witnessed(folder: Path) -> list[dict[str, Any]]:
    """Documents of all processes; those of one rank and program are in the order of their losses."""
    documents = [json.loads(path.read_text()) for path in folder.glob("rank*.json")]
    return sorted(
        documents, key=lambda document: (document["rank"], -len(document["digests"]), document["argv"])
    )


def check(program: Program, folder: Path, result: Result) -> None:
    """Fill in the row."""
    names = ("rank", "losses", "digests", "counts", "before", "groups", "traced")
    first, second = (
        [{name: document[name] for name in names} for document in witnessed(folder / mode)]
        for mode in ("without", "with")
    )
    result.identical = first == second
    if not result.identical:
        result.wrong.append("losses, parameters or counts differ")
    if not (folder / "run" / "run.json").exists():
        result.wrong.append("no records")
        return
    coverage = json.loads((folder / "run" / "run.json").read_text())["coverage"]
    groups = coverage.get("groups") or {}
    result.steps_at = coverage.get("steps_at")
    result.seen = sum(group["seen"] for group in groups.values())
    ranks = [document for document in second if document["rank"] >= 0 or program.ranks == 1]
    if not any(document["rank"] <= 0 for document in ranks):
        result.wrong.append("the witness saw no rank 0")
        return
    zero = next(document for document in ranks if document["rank"] <= 0)
    result.losses, result.calls = len(zero["losses"]), len(zero["digests"])
    result.counted = sum(zero["groups"].values()) - zero["before"]
    result.before = zero["before"]
    result.traced = sum(zero["traced"].values())
    if result.seen != result.counted:
        result.wrong.append(f"{result.seen} collectives seen of {result.counted}")
    for rank in range(program.ranks):
        check_steps(program, folder, rank, ranks, result)


def check_steps(
    program: Program, folder: Path, rank: int, ranks: list[dict[str, Any]], result: Result
) -> None:
    """Number of steps, and of collectives in those from the fourth on."""
    path = folder / "run" / f"rank_{rank}_metrics.jsonl"
    expected = program.steps
    if not path.exists():
        result.wrong.append(f"rank {rank}: no records")
        return
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    per_step = [step["num_collectives"] for step in steps if step["source"] in ("host", "events", "kernels")]
    if rank == 0:
        result.steps, result.per_step = len(per_step), per_step[-4:]
    if len(per_step) != expected:
        result.wrong.append(f"rank {rank}: {len(per_step)} steps of {expected}")
    counts: list[int] = next((document["counts"] for document in ranks if document["rank"] == rank), [])
    if program.outside or len(counts) != expected:
        return
    counted = [later - earlier for earlier, later in zip(counts, counts[1:], strict=False)]
    num = min(len(per_step), len(counted)) - LEARNED_STEPS
    # A window may end behind what follows the optimizer: the sums agree, not each.
    if num > 0 and sum(per_step[-num:]) != sum(counted[-num:]) and per_step[-num:-1] != counted[-num:-1]:
        result.wrong.append(f"rank {rank}: {per_step[-num:]} collectives a step, {counted[-num:]} counted")


if __name__ == "__main__":
    sys.exit(main())
