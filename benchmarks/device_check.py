"""Checks on the GPUs at hand what aorta promises of them, and writes one file: scripts/amd_check.sh runs it.

    bash scripts/amd_check.sh [FILE] [--quick] [--parts records truth ...]
    bash scripts/amd_check.sh FILE --grade

Takes 10 min at most, 5 with --quick (fewer pairs of blocks, no queues). Each part runs commands of aorta as
users give them, reads the records that they leave, and keeps a few numbers. The file names no person,
machine, folder or value of the environment, so that it can be sent. Without a GPU the parts that need none
run (a rehearsal), and the others say so.
"""

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
import torch
from device_grade import SCHEMA, DeviceCheck, Fact, Part, exit_code, grade_lines, read_check
from harness import ROOT

from aorta._version import __version__
from aorta.errors import BAD_INPUT, FINE, ConfigError
from aorta.records.files import steps_name
from aorta.records.reader import read_run, read_steps
from aorta.records.schema import KernelCoverage, StepRecord
from aorta.timeline.overlap import total
from aorta.traces.sources import open_source

LOOP = Path(__file__).with_name("device_check_loop.py")
PYTHON = sys.executable
STEADY = slice(10, 40)
"""Steps of the loop that are warm and before the profiler."""
PLACES = re.compile(r"(/[\w.@+-]+)+/([\w.@+-]*)")
LIMIT_S = 150.0


class NotRun(Exception):
    """Why a part cannot run here."""


class Machine:
    def __init__(self, folder: Path, quick: bool) -> None:
        self.folder = folder
        self.quick = quick
        self.num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self.platform = "rocm" if torch.version.hip else "cuda"
        self.num_ranks = min(self.num_gpus, 2) or 2
        self.environment = os.environ | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
            "AORTA_CACHE_DIR": os.environ.get("AORTA_CACHE_DIR", str(folder / "cache")),
        }

    def run(self, *command: object, limit_s: float = LIMIT_S, **variables: str) -> tuple[int, str]:
        """Exit status, and what the command printed; 124 where it took longer than limit_s."""
        words = [str(word) for word in command]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                words, env=self.environment | variables, stdout=output, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, cwd=ROOT, start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                status = 124
            output.seek(0)
            text = output.read()
        if status != 0:
            sys.stderr.write(text[-2000:])
        return status, text

    def ranks(self, *words: object) -> list[object]:
        launcher = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", self.num_ranks]
        return [*launcher, *words]

    def needs_gpu(self) -> None:
        if not self.num_gpus:
            raise NotRun("there is no GPU")


def steps_of(run: Path, rank: int = 0) -> list[StepRecord]:
    """The recorded steps of a rank, without the last, whose window has no end."""
    path = run / steps_name(rank)
    return [step for step in read_steps(path) if step.is_recorded][:-1] if path.exists() else []


def share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


# -- parts ------------------------------------------------------------------------------------------------


def doctor(machine: Machine) -> dict[str, Fact]:
    _, text = machine.run(PYTHON, "-m", "aorta", "doctor", "--json")
    checks = json.loads(text[text.index("[") :])
    failed = [c["name"] for c in checks if c["required"] and c["state"] not in ("works", "not needed")]
    tracer = [c for c in checks if c["name"] in ("CUPTI", "rocprofiler-sdk")]
    has_tracer = any(c["state"] == "works" for c in tracer) if machine.num_gpus else None
    return {
        "num_failed": len(failed),
        "failed": ", ".join(failed),
        "has_tracer": has_tracer,
        "tracer": without_places("; ".join(f"{c['name']} {c['detail']}" for c in tracer)),
    }


def recorded(machine: Machine, name: str, *options: str, trace: bool = False) -> tuple[int, Path]:
    run = machine.folder / name
    traces = machine.folder / f"{name}-traces"
    traces.mkdir()
    words = machine.ranks(LOOP, *(["--trace", traces] if trace else []))
    command = [
        PYTHON,
        "-m",
        "aorta",
        "run",
        "--no-report",
        "--overhead",
        "off",
        "-o",
        run,
        *options,
        "--",
        *words,
    ]
    status, _ = machine.run(*command)
    return status, run


def records(machine: Machine) -> dict[str, Fact]:
    machine.needs_gpu()
    status, run = recorded(machine, "records", "--kernels", "on")
    steps = steps_of(run)
    coverage = read_run(run).coverage
    kernels = coverage["kernel_records"]
    matched = kernels["matched"] or {}
    counts = [name for name in KernelCoverage.__struct_fields__ if name.startswith("num_")]
    groups = (coverage.get("groups") or {}).values()
    return {
        "exit_status": status,
        "num_steps": len(steps),
        "share_of_kernels": share(sum(step.source == "kernels" for step in steps), len(steps)),
        "share_seen": share(sum(g["seen"] for g in groups), sum(g["backend"] for g in groups)),
        "tracer_version": kernels.get("tracer_version"),
        "reason": without_places(kernels.get("reason")),
        **{count: matched.get(count) for count in counts},
    }


def events(machine: Machine) -> dict[str, Fact]:
    status, run = recorded(machine, "events", "--kernels", "off")
    steps = steps_of(run)
    expected = "events" if machine.num_gpus else "host"
    return {
        "exit_status": status,
        "num_steps": len(steps),
        "share_of_events": share(sum(step.source == expected for step in steps), len(steps)),
    }


def truth(machine: Machine) -> dict[str, Fact]:
    """Records of steps before a profiler beside the profiler's own kernels of later ones."""
    machine.needs_gpu()
    _, run = recorded(machine, "truth", "--kernels", "on", trace=True)
    steps = [step for step in steps_of(run)[STEADY] if step.source == "kernels" and step.kernels is not None]
    traces = sorted((machine.folder / "truth-traces").glob("*.json"))
    if not steps or not traces:
        raise NotRun(f"{len(steps)} steps of kernel records, {len(traces)} traces of torch.profiler")
    from device_check_loop import ACTIVE

    whole = total(open_source(traces[0]).read(0).timeline)
    assert whole.num_kernels is not None
    kernels = median(step.kernels.num_kernels for step in steps if step.kernels is not None)
    compute_ms = median(step.overlap.compute_ms or 0.0 for step in steps)
    theirs_ms = whole.compute_ms / ACTIVE
    return {
        "num_kernels": kernels,
        "num_kernels_profiler": whole.num_kernels / ACTIVE,
        "kernels_beyond": abs(kernels - whole.num_kernels / ACTIVE),
        "compute_ms": compute_ms,
        "compute_ms_profiler": theirs_ms,
        "compute_error": abs(compute_ms - theirs_ms) / theirs_ms,
    }


def harmless(machine: Machine) -> dict[str, Fact]:
    table = machine.folder / "harmless.csv"
    cases = ["ddp"] if machine.quick or not machine.num_gpus else ["ddp", "fsdp"]
    machine.run(*machine.ranks(ROOT / "benchmarks" / "harmless.py", "--cases", *cases, "--output", table))
    if not table.exists():
        raise NotRun("the trial ended early")
    rows = list(csv.DictReader(table.open(newline="")))
    variants = {name.rpartition(".")[2]: name for name in rows[0] if name != "case"}
    return {name: all(row[column] == "True" for row in rows) for name, column in variants.items()}


def cost(machine: Machine) -> dict[str, Fact]:
    machine.needs_gpu()
    table = machine.folder / "cost.csv"
    words = ["--pin", "--together", "--cases", "ddp", "--variants", "native", "--output", table]
    words += ["--pairs", 8 if machine.quick else 24]
    machine.run(*machine.ranks(ROOT / "benchmarks" / "cost.py", *words))
    if not table.exists():
        raise NotRun("the trial ended early")
    rows = {row["variant"]: row for row in csv.DictReader(table.open(newline=""))}
    return ratios(rows["native"]) | {f"nothing_{k}": v for k, v in ratios(rows["without again"]).items()}


def ratios(row: dict[str, str]) -> dict[str, Fact]:
    """A line of cost.py: step time with over without, and its interval."""
    low, high = row["step_ratio_to_without.interval"].split("; ")
    return {"ratio": float(row["step_ratio_to_without.median"]), "low": float(low), "high": float(high)}


def queues(machine: Machine) -> dict[str, Fact]:
    machine.needs_gpu()
    if machine.quick:
        raise NotRun("left out by --quick")
    cuda = machine.platform == "cuda"
    variable = "CUDA_DEVICE_MAX_CONNECTIONS" if cuda else "GPU_MAX_HW_QUEUES"
    found = {value: queues_under(machine, variable, value) for value in (1, 2, 8 if cuda else 4)}
    return {
        "variable": variable,
        "num_unlike": sum(queues not in (None, value) for value, queues in found.items()),
        "num_unclear": sum(queues is None for queues in found.values()),
        "found": ", ".join(f"{value}: {queues}" for value, queues in found.items()),
    }


def queues_under(machine: Machine, variable: str, value: int) -> int | None:
    """Queues of a fresh process with the variable at that value; None where starts and times disagree."""
    words = ["queues", "probe", "--part", "queues", "--streams", "16", "--json"]
    _, text = machine.run("env", f"{variable}={value}", PYTHON, "-m", "aorta", *words)
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise NotRun("the probe ended early")
    count = json.loads(lines[-1])["queues"]
    is_sure = count is not None and count["agrees"] and count["even"] and count["primed"]
    return count["queues"] if is_sure else None


SMALL = ("training.max_steps=12", "model.num_layers=2", "logging.tensorboard=false", "recording.overhead=off")


def launcher(machine: Machine) -> dict[str, Fact]:
    machine.needs_gpu()
    run = machine.folder / "launched"
    script = ROOT / "scripts" / f"launch_{machine.platform}.sh"
    words = ["bash", script, "config/ddp.yaml", "--override", f"training.output_dir={run}", *SMALL]
    status, _ = machine.run(*words, PYTHON=PYTHON, NPROC=str(machine.num_ranks))
    whole = sum(len(steps_of(run, rank)) >= 10 for rank in range(machine.num_ranks))
    return {"exit_status": status, "share_of_ranks": share(whole, machine.num_ranks)}


def capture(machine: Machine) -> dict[str, Fact]:
    """rocprofv3 or Nsight Systems around a run, and its kernels merged into the records."""
    machine.needs_gpu()
    tool, script, output = {
        "rocm": ("rocprofv3", "rocprof_capture.sh", "ROCPROF_OUTPUT_DIR"),
        "cuda": ("nsys", "nsys_capture.sh", "NSYS_OUTPUT_DIR"),
    }[machine.platform]
    if shutil.which(tool) is None:
        raise NotRun(f"{tool} is not on PATH")
    folder = machine.folder / "captured"
    words = ["bash", ROOT / "scripts" / script, "config/ddp.yaml", "--override", *SMALL]
    machine.environment[output] = str(folder)
    status, _ = machine.run(*words, PYTHON=PYTHON, NPROC=str(machine.num_ranks), CAPTURE_RUN="run")
    source = "rocprofv3" if tool == "rocprofv3" else "nsys"
    path = next(iter(folder.rglob(steps_name(0))), None)
    steps = list(read_steps(path)) if path else []
    merged = sum(step.source == source for step in steps)
    return {"exit_status": status, "share_merged": share(merged, len(steps) - merged)}


PARTS: dict[str, Callable[[Machine], dict[str, Fact]]] = {
    part.__name__: part
    for part in (doctor, records, events, truth, harmless, cost, queues, launcher, capture)
}


# -- the file ---------------------------------------------------------------------------------------------


def without_places(text: object) -> str | None:
    """A text without folders: a path's last name stands for it."""
    return None if text is None else PLACES.sub(r"\2", str(text))[:300]


def run_part(machine: Machine, name: str) -> Part:
    began = time.monotonic()
    facts: dict[str, Fact] = {}
    reason = None
    try:
        facts = PARTS[name](machine)
        reason = facts.pop("reason", None)
    except NotRun as error:
        reason = str(error)
    except Exception as error:  # a part that breaks says so, and the others run
        reason = without_places(f"{type(error).__name__}: {error}")
    return Part(
        seconds=round(time.monotonic() - began, 1), facts=facts, reason=str(reason) if reason else None
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=Path("device_check.json"))
    parser.add_argument("--quick", action="store_true", help="5 min: fewer pairs of blocks, no queues")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--grade", action="store_true", help="say of FILE, line by line, what holds")
    options = parser.parse_args()
    if options.grade:
        check = read_check(options.file)
        print("\n".join(grade_lines(check)))
        return exit_code(check)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="device_check-") as folder:
        machine = Machine(Path(folder), options.quick)
        parts: dict[str, Part] = {}
        for name in options.parts:
            parts[name] = run_part(machine, name)
            told = parts[name].reason or ", ".join(f"{k} {v}" for k, v in parts[name].facts.items())
            print(f"{name:9} {parts[name].seconds:6.1f} s  {told}", flush=True)
    runtime = f"hip {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"
    check = DeviceCheck(
        device_check=SCHEMA,
        aorta=__version__,
        torch=str(torch.__version__),
        runtime=runtime if torch.version.hip or torch.version.cuda else "none",
        devices=[torch.cuda.get_device_name(index) for index in range(machine.num_gpus)],
        num_ranks=machine.num_ranks,
        seconds=round(time.monotonic() - began, 1),
        parts=parts,
    )
    options.file.write_bytes(msgspec.json.format(msgspec.json.encode(check), indent=1) + b"\n")
    print("\n".join(["", *grade_lines(check), "", f"wrote {options.file}"]))
    return FINE


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
