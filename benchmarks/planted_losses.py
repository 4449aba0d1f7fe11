"""Is the first cause that `aorta why` names the loss that was planted?

    python benchmarks/planted_losses.py                                     all sets, gloo, 2 ranks
    python benchmarks/planted_losses.py --set third --repeats 3
    python benchmarks/planted_losses.py --set fourth --device cuda        NCCL, on 2 GPUs
    python benchmarks/planted_losses.py made --runs 40                      made records, no process

Each case of planted/cases.yaml trains a small model for 40 steps on two ranks with one known loss, or with
none. Three losses are planted in the records afterwards (clock, allocator, memory), since no program can make
them. The rules of aorta.why.causes know nothing of these files. Takes about 10 s a case on two cores.

Exit status 1 where a case could not be judged.
"""

import argparse
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from harness import arguments, choose, write
from planted.job import Rank

import aorta
from aorta.command_line import module_environment
from aorta.records.seal import sealed

HERE = Path(__file__).resolve().parent


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of planted/cases.yaml."""

    planted: str
    """Kind of the cause that must come first; none: no cause at all."""
    file: str
    rank: int | None = None
    """Rank that the first cause must name."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    program: str = ""
    """The function that trains; by default the one that has the case's name."""
    edited: bool = False
    """Its records are changed afterwards."""


SETS = msgspec.yaml.decode((HERE / "planted" / "cases.yaml").read_bytes(), type=dict[str, dict[str, Case]])
CASES = {name: case for cases in SETS.values() for name, case in cases.items()}


def planted() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--set", nargs="+", choices=list(SETS), default=list(SETS), metavar="SET")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), metavar="CASE", help="of any set")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for the cases of one repeat")
    parser.add_argument("--jobs", type=int, default=1, help="answers that are asked for at a time")
    parser.add_argument("--keep", type=Path, help="folder for the records")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.folder, options.steps, options.device)
        return 0
    options.cases = options.cases or [name for chosen in options.set for name in SETS[chosen]]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in trials(options, options.keep or Path(folder)):
            rows.append(row)
            verdict = row.get("error") or ("right" if row["right"] else "WRONG")
            share = f"{100 * row['share']:.0f} %" if row.get("share") else ""
            step = f"{row['step_ms']:8.1f} ms" if "step_ms" in row else ""
            said = f"{row.get('named', '')}: {row.get('subject', '')} {share}"
            print(f"{row['case']:22s} {verdict:6s} {step}  {said}", flush=True)
            write(options.output, rows)
    judged = [row for row in rows if "right" in row]
    losses = [row["right"] for row in judged if row["planted"] != "none"]
    clean = [row["right"] for row in judged if row["planted"] == "none"]
    print(f"planted first: {sum(losses)} of {len(losses)}; no cause: {sum(clean)} of {len(clean)} clean")
    return 0 if len(judged) == len(rows) else 1


def trials(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    names = [name for name in options.cases if options.device in CASES[name].devices]
    for repeat in range(options.repeats):
        place = folder / f"repeat_{repeat}"
        failure = run_cases(names, place, options)
        with ThreadPoolExecutor(options.jobs) as pool:
            yield from pool.map(
                lambda name, repeat=repeat, place=place, failure=failure: trial(name, repeat, place, failure),
                names,
            )


def run_cases(names: list[str], folder: Path, options: argparse.Namespace) -> str:
    """Run them in one job of two ranks; what went wrong, '' where nothing did."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", __file__,
        "--worker", *names, "--folder", str(folder), "--steps", str(options.steps),
        "--device", options.device,
    ]  # fmt: skip
    environment = module_environment() | {"OMP_NUM_THREADS": "1"}
    folder.mkdir(parents=True, exist_ok=True)
    limit_s = options.timeout_s
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=limit_s, text=True)
    except subprocess.TimeoutExpired:
        return f"not done within {limit_s:.0f} s"
    return "" if done.returncode == 0 else done.stderr.strip()[-600:]


def work(names: list[str], folder: Path, num_steps: int, device: str) -> None:
    """Train one case after the other on this rank; each has a recorder and a folder of its own."""
    torch.set_num_threads(1)
    local = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    where = torch.device("cuda", local) if device == "cuda" else torch.device("cpu")
    for name in names:
        case = CASES[name]
        train = getattr(importlib.import_module(f"planted.{case.file}"), case.program or name)
        rank = Rank(dist.get_rank(), where, width=4096 if device == "cuda" else 384, batch=16, depth=4)
        gc.collect()
        gc.freeze()  # a full collection at a random step is a cause that nobody planted
        dist.barrier()
        with aorta.instrument(folder / name) as recorder:
            train(rank, recorder, num_steps)
    dist.destroy_process_group()


def trial(name: str, repeat: int, place: Path, failure: str) -> dict[str, Any]:
    """Ask `aorta why` about a run that has been made, and judge the answer."""
    case = CASES[name]
    row: dict[str, Any] = {"case": name, "repeat": repeat, "planted": case.planted}
    try:
        if case.edited:
            edit(name, place / name)
        answer = why(place / name)
    except (RuntimeError, subprocess.TimeoutExpired, ValueError, OSError) as error:
        return row | {"error": failure or str(error)}
    causes = answer["causes"]
    first = causes[0] if causes else {"kind": "none", "subject": "", "ms": None, "share": None}
    return row | {
        "right": is_right(case, causes),
        "step_ms": answer["step_ms"],
        "source": answer["source"],
        "named": first["kind"],
        **{key: first[key] for key in ("subject", "ms", "share")},
    }


def why(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "aorta", "why", str(folder), "--json"],
        env=module_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-600:])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def is_right(case: Case, causes: list[dict[str, Any]]) -> bool:
    if case.planted == "none":
        return not causes
    if not causes or causes[0]["kind"] != case.planted:
        return False
    return case.rank is None or f"rank {case.rank}" in causes[0]["subject"]


# ---- losses that are planted in records ----------------------------------------------------------


def edit(name: str, folder: Path) -> None:
    """Change the records of a clean run as the loss would have."""
    for path in sorted(folder.glob("rank_*_metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        rank = lines[0]["rank"]
        for number, line in enumerate(lines):
            edit_line(name, rank, number, line)
            for key in ("line", "crc32"):
                line.pop(key, None)
        path.write_bytes(
            b"".join(sealed(msgspec.json.encode(line), number) for number, line in enumerate(lines))
        )
    path = folder / "run.json"
    run = json.loads(path.read_text())
    for row in run["devices"]:
        row |= {"kind": "cuda", "memory_bytes": 80 << 30, "name": "Invented GPU"}
    path.write_text(json.dumps(run))


def edit_line(name: str, rank: int, number: int, line: dict[str, Any]) -> None:
    sample: dict[str, Any] = {"sample_unix_ns": line["start_unix_ns"], "sm_clock_mhz": 1980.0}
    memory = dict.fromkeys(("allocated_bytes", "reserved_bytes", "peak_allocated_bytes"), 40 << 30)
    memory["num_alloc_retries"] = 0
    if name == "throttled_clock" and rank == 1 and number > 10:
        sample |= {"sm_clock_mhz": 900.0, "throttling": ["hw_thermal_slowdown"]}
    if name == "allocation_retries":
        memory["num_alloc_retries"] = number // 3
    if name == "memory_limit":
        memory |= {"reserved_bytes": int(78.9 * 2**30), "device_used_bytes": int(79.4 * 2**30)}
    line["device"], line["memory"] = sample, memory


def made() -> None:
    from planted import made as of_records  # it needs the tests' own records on the path

    of_records.main()


if __name__ == "__main__":
    sys.exit(choose(__doc__, {"planted": planted, "made": made}))
