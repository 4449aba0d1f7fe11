"""Good folders that fuzz.py damages, one for each kind of file that aorta reads, and who reads them."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import yaml
from reliability.limited import QUICK, ended
from reliability.spoilt_inputs import made
from torch._C._distributed_c10d import HashStore

from aorta.account.results.schema import write_document
from aorta.cli import main as aorta_command
from aorta.config.load import load_config
from aorta.hang.last_calls import LastCalls
from aorta.hang.report import FOLDER, report_name
from aorta.record.calls import CollectiveCall, Group, RecordedStep
from aorta.records.files import last_calls_name, state_name, steps_name
from aorta.records.schema import Ending
from aorta.records.seal import sealed
from aorta.records.state import LinesState, ProcessState, StateFile
from aorta.records.writer import write_json
from aorta.training.checkpoint import Checkpoints
from aorta.training.setup import LossScale
from tests.hang.reports_by_hand import report as hang_report
from tests.queues.documents import document, point
from tests.traces import mutations
from tests.traces.trace_writers import kineto

ROOT = Path(__file__).resolve().parents[2]

PACKAGE = ROOT / "aorta"
Call = Callable[[], object]
Damage = Callable[[Path, random.Random], None]
"""Changes one file of a folder."""
Ask = Callable[[Path, random.Random], Call]
"""Reads the folder."""
VALUES_OF_TEXT = (
    "2001-13-45", "9" * 5000, "[" * 300, "!!timestamp 99", "&a [*a]", "\ud800", "\0", "~", "{}", "[]", ".nan",
    "-.inf", "1e999", "0x7fffffffffffffff1", "!!python/name:os.system", "? a", "- - -", "x: y: z", "'", "",
    "-1", "0", "1.5", "true", "null", "../../x", "/dev/zero", "a" * 300, "\x1b[31m",
)  # fmt: skip


@dataclass
class Subject:
    name: str
    make: Callable[[Path], None]
    """Fills a folder with good files."""
    damage: Damage
    ask: Ask
    folder: Path = field(default=Path())
    """Folder of the good files, once made."""
    is_asked_whole: bool = True
    """Check that the undamaged folder is read without an error."""


def aorta(*arguments: str | Path) -> Call:
    return partial(aorta_command.main, [str(argument) for argument in arguments], prog_name="aorta")


# ---- damages -----------------------------------------------------------------------------------


def bytes_of(*patterns: str) -> Damage:
    def damage(folder: Path, rng: random.Random) -> None:
        path = chosen(folder, patterns, rng)
        path.write_bytes(mutations.mutated_bytes(path.read_bytes(), rng))

    return damage


def values_of(*patterns: str) -> Damage:
    """Mutate JSON: values are replaced, removed or doubled; each third time bytes are."""

    def damage(folder: Path, rng: random.Random) -> None:
        path = chosen(folder, patterns, rng)
        mutate = mutations.mutated_bytes if rng.random() < 1 / 3 else mutations.mutated_json
        path.write_bytes(mutate(path.read_bytes(), rng))

    return damage


def texts_of(*patterns: str) -> Damage:
    """Mutate YAML and programs: bytes, values behind a colon or an equals sign, or whole documents."""

    def damage(folder: Path, rng: random.Random) -> None:
        path = chosen(folder, patterns, rng)
        data = path.read_bytes()
        match rng.randrange(3):
            case 0:
                data = mutations.mutated_bytes(data, rng)
            case 1:
                data = with_another_value(data.decode(), rng).encode("utf-8", "surrogatepass")
            case 2 if path.suffix in (".yaml", ".yml"):
                plain = json.dumps(yaml.safe_load(data), default=str).encode()
                data = mutations.mutated_json(plain, rng)
            case _:
                data = with_another_number(data.decode(), rng).encode()
        path.write_bytes(data)

    return damage


def with_another_value(text: str, rng: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    places = [number for number, line in enumerate(lines) if ":" in line or "=" in line]
    number = rng.choice(places)
    sign = ":" if ":" in lines[number] else "="
    lines[number] = f"{lines[number].split(sign)[0]}{sign} {rng.choice(VALUES_OF_TEXT)}\n"
    return "".join(lines)


def with_another_number(text: str, rng: random.Random) -> str:
    places = [place for place, letter in enumerate(text) if letter.isdigit()]
    if not places:
        return text
    place = rng.choice(places)
    number = rng.choice(("0", "-1", "1000000", str(10**40), "1e308", "nan", "", "1.5", "True"))
    return text[:place] + number + text[place + 1 :]


def chosen(folder: Path, patterns: tuple[str, ...], rng: random.Random) -> Path:
    paths = sorted({path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()})
    return rng.choice([path for path in paths if path.stat().st_size])


def line_sealed_again(folder: Path, rng: random.Random) -> None:
    """Values of some lines, with numbers and checksums that fit: what a checksum cannot notice."""
    path = chosen(folder, ("rank_*_metrics.jsonl",), rng)
    lines = path.read_bytes().splitlines()
    for number in rng.sample(range(len(lines)), rng.randint(1, 3)):
        body = json.loads(lines[number])
        del body["line"], body["crc32"]
        changed = mutations.mutated_json(json.dumps(body).encode(), rng)
        compact = json.dumps(json.loads(changed), separators=(",", ":")).encode("utf-8", "surrogatepass")
        lines[number] = sealed(compact, number).rstrip(b"\n") if compact != b"{}" else b"{}"
    path.write_bytes(b"\n".join(lines) + b"\n")


# ---- good folders ------------------------------------------------------------------------------


def recorded(folder: Path) -> None:
    made(folder / "run", "fuzzed")
    for rank in range(2):
        path = folder / "run" / steps_name(rank)
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:12]))
        own = ProcessState(
            run_id="fuzzed", attempt=0, rank=rank, world_size=2, host="elsewhere", pid=1, process_start=1.0,
            started_unix_ns=1, written_unix_ns=2, first_step=0, begun_step=12,
            ending=Ending(kind="finished", unix_ns=3),
        )  # fmt: skip
        StateFile(folder / "run" / state_name(rank), 0).write(own)
        lines = LinesState(attempt=0, last_step=11, num_steps=12, closed_unix_ns=4)
        StateFile(folder / "run" / state_name(rank), 1).write(lines)


KILLED = """
import os, signal, sys, torch, torch.distributed as dist, aorta
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with aorta.instrument(sys.argv[1]) as recorder:
    for number in range(9):
        with recorder.step():
            dist.all_reduce(torch.ones(4))
    os.kill(os.getpid(), 9)
"""


def killed(folder: Path) -> None:
    """Make a run that SIGKILL ended: steps without lines, no end in run.json."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, str(folder / "run")]
    end = subprocess.run(command, env=environment, capture_output=True)
    if end.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the run to be killed ended with {end.returncode}: {end.stderr.decode()}")
    time.sleep(1.0)  # for the process that writes


def hung(folder: Path) -> None:
    recorded(folder)
    group = {"key": "0", "name": "default", "ranks": [0, 1, 2], "backend": "gloo", "num_seen": 3}
    calls = [
        {"seq": seq, "op": "all_reduce", "bytes": 64, "dtype": "float32", "step": seq, "peer": None,
         "started": True, "finished": seq < 2, "age_s": 3.0}
        for seq in range(3)
    ]  # fmt: skip
    for rank in range(2):
        told = msgspec.to_builtins(hang_report(rank, world_size=3)) | {"groups": [group | {"calls": calls}]}
        (folder / "run" / FOLDER).mkdir(exist_ok=True)
        write_json(folder / "run" / FOLDER / report_name(rank), told)
    last_calls = LastCalls(folder / "run" / last_calls_name(2))
    noted_group = Group("0", "default", [0, 1, 2], "gloo")
    for seq in range(2):
        call = CollectiveCall(noted_group, "all_reduce", 64, "float32", False)
        call.seq = seq
        last_calls.note(RecordedStep(seq, seq, 0, None), call)


def reported(folder: Path) -> None:
    recorded(folder)
    ended(aorta("report", folder / "run", "-o", folder / "out", *QUICK))


def copied(source: Path, name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        shutil.copy(source, folder / name)

    return make


def budgeted(folder: Path) -> None:
    recorded(folder)
    budget = "runs: 1\nexposed_ms: {max: 12.0}\nstep_ms: {min: 1, max: 400}\n"
    (folder / "budget.yaml").write_text(budget + "overlap_ratio: {min: 0.1}\n")


def swept(folder: Path) -> None:
    for name, seed in (("a.json", 0), ("b.json", 1)):
        write_document(folder / name, document(*[point(streams=n, seed=seed) for n in (1, 2)]))


def traced(folder: Path) -> None:
    mutations.Mutations(folder, 0)


def projected(folder: Path) -> None:
    shutil.copy(PACKAGE / "projection" / "models" / "llama2-7b.yaml", folder / "model.yaml")
    shutil.copy(PACKAGE / "hardware" / "parts" / "h200.yaml", folder / "part.yaml")


def programmed(folder: Path) -> None:
    text = """program("ag_gemm", ranks=2, order="both_hoisted", tile_order="depth", tiles=4, streams=4)
main = current_stream()
A = input(4)
W = input()
G = allocate(4)
C = output(4)
for i in range(4):
    set_stream(worker[i % 4])
    forked[i] = record(main)
    wait(forked[i])
for i in range(4):
    set_stream(worker[i % 4])
    gathered[i] = all_gather(A[i], out=G[i], lane=comm)
    wait_work(gathered[i])
    gemm(G[i], W, out=C[i])
for i in range(4):
    set_stream(main)
    joined[i] = record(worker[i % 4])
    wait(joined[i])
"""
    (folder / "program.txt").write_text(text)


def ruled(folder: Path) -> None:
    recorded(folder)
    (folder / "rules.yaml").write_text(
        "communication:\n- {pattern: gather, op: all_gather}\n- {pattern: my_comm}\n"
    )
    (folder / "rank0.json").write_bytes(kineto(0, 2))


def nothing(folder: Path) -> None:
    (folder / "here").touch()


# ---- what is asked -----------------------------------------------------------------------------


def of_run(folder: Path, rng: random.Random) -> Call:
    run = folder / "run"
    asked: tuple[Call, ...] = (
        aorta("report", run, "-o", folder / "out", *QUICK),
        aorta("report", run, "-o", folder / "out", *QUICK),
        aorta("why", run),
        aorta("top", run, "--once"),
        aorta("merge", run),
        aorta("compare", ROOT / "docs" / "example" / "ddp", run, "-o", folder / "out", *QUICK),
    )
    return rng.choice(asked)


def of_trace(folder: Path, rng: random.Random) -> Call:
    return partial(mutations.load, folder / "trace")


def override(folder: Path, rng: random.Random) -> Call:
    keys = ("training.max_steps", "training.output_dir", "model.dim", "profiling.enabled",
            "hang.timeout_s", "a.b", "training", "model.layers.3", "", "..", "data.seed")  # fmt: skip
    text = f"{rng.choice(keys)}{rng.choice(('=', '', ':', '=='))}{rng.choice(VALUES_OF_TEXT)}"
    if rng.random() < 0.3:
        text = mutations.mutated_bytes(text.encode("utf-8", "surrogatepass"), rng).decode("utf-8", "replace")
    return partial(load_config, "default", [text])


def config(folder: Path, rng: random.Random) -> Call:
    return partial(load_config, folder / "config.yaml", [])


def project(folder: Path, rng: random.Random) -> Call:
    model, part = folder / "model.yaml", folder / "part.yaml"
    kind = rng.choice((["memory"], ["performance"]))
    return aorta("project", *kind, "--model", model, "--gpu-arch", part)


def program(folder: Path, rng: random.Random) -> Call:
    kind = rng.choice((["lint"], ["simulate", "--comm-us", "100", "--gemm-us", "80"]))
    return aorta("program", *kind, folder / "program.txt")


def damaged_trace(folder: Path, rng: random.Random) -> None:
    """One of the formats, as tests/traces/mutations.py makes them; the others are left out."""
    supply = mutations.Mutations.__new__(mutations.Mutations)
    supply._rng, supply._folder = rng, folder
    supply._good = {path.name: path for path in sorted((folder / "good").iterdir())}
    _, bad = supply.make(rng.randrange(len(supply._good)))
    bad.rename(folder / "trace")


# ---- checkpoints -------------------------------------------------------------------------------


def checkpointed(folder: Path) -> None:
    """Make it in another process, since this one forks."""
    script = "import sys; from pathlib import Path; from reliability.fuzz_subjects import save_checkpoint\n"
    search = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))
    environment = {**os.environ, "PYTHONPATH": search}
    command = [sys.executable, "-c", script + "save_checkpoint(Path(sys.argv[1]))", str(folder)]
    subprocess.run(command, env=environment, check=True, capture_output=True)


def checkpoints_of(folder: Path) -> Any:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    settings = load_config("default", [f"training.checkpoint_dir={folder}"])
    return Checkpoints(settings, 0, model, optimizer, LossScale(enabled=False))


def save_checkpoint(folder: Path) -> None:
    checkpoints_of(folder).save(3)


def resume(folder: Path, rng: random.Random) -> Call:
    path = next(iter(sorted(folder.glob("step_*"))))
    return lambda: checkpoints_of(folder).resume(str(path))


def files_with_fitting_checksums(folder: Path, rng: random.Random) -> None:
    """Remove the checksums, so that damage reaches the readers of tensors and pickles."""
    path = next(iter(sorted(folder.glob("step_*"))))
    bytes_of(".metadata", "*.distcp", "*.pt")(folder, rng)
    meta = json.loads((path / "aorta.json").read_bytes())
    (path / "aorta.json").write_text(json.dumps(meta | {"files": {}}))


RECORDS = ("rank_*_metrics.jsonl",)
SUBJECTS = (
    Subject("records", recorded, bytes_of(*RECORDS), of_run),
    Subject("records, checksums that fit", recorded, line_sealed_again, of_run),
    Subject("run.json", recorded, values_of("run.json"), of_run),
    Subject("states", recorded, bytes_of("rank_*_state.jsonl"), of_run),
    Subject("a killed run", killed, bytes_of("rank_*", ".rank_*", "run.json"), of_run),
    Subject("hang reports", hung, values_of("hang/rank*.json"), lambda f, _: aorta("hang", f / "run")),
    Subject("last calls", hung, bytes_of(".rank_*_calls"), lambda f, _: aorta("hang", f / "run")),
    Subject("summary.json", reported, values_of("summary.json"),
            lambda f, _: aorta("report", f / "run", "-o", f / "out", *QUICK)),
    Subject("budgets", budgeted, texts_of("budget.yaml"),
            lambda f, _: aorta("report", f / "run", "-o", f / "out", "--budget", f / "budget.yaml", *QUICK)),
    Subject("rules of kernels", ruled, texts_of("rules.yaml"),
            lambda f, _: aorta("report", f / "rank0.json", "-o", f / "out", "--comm-rules", f / "rules.yaml",
                               *QUICK)),
    Subject("traces", traced, damaged_trace, of_trace, is_asked_whole=False),
    Subject("--override", nothing, lambda *_: None, override, is_asked_whole=False),
    Subject("configurations", copied(PACKAGE / "config" / "files" / "default.yaml", "config.yaml"),
            texts_of("config.yaml"), config),
    Subject("sweeps", copied(PACKAGE / "sweep" / "files" / "fsdp_prefetch.yaml", "sweep.yaml"),
            texts_of("sweep.yaml"),
            lambda f, _: aorta("sweep", "--recipe", f / "sweep.yaml", "--list", "--", "true")),
    Subject("results of queues", swept, values_of("a.json", "b.json"),
            lambda f, _: aorta("queues", "compare", "-b", f / "a.json", "-t", f / "b.json")),
    Subject("models, parts", projected, texts_of("*.yaml"), project),
    Subject("host programs", programmed, texts_of("program.txt"), program),
    Subject("checkpoints", checkpointed, bytes_of("*.distcp", ".metadata", "*.pt", "aorta.json"), resume),
    Subject("checkpoints, no checksums", checkpointed, files_with_fitting_checksums, resume),
)  # fmt: skip
