"""Is the first cause of `aorta why` the loss that was planted in a program, and does it have the right size?

    python benchmarks/plants/judge.py OUT                       all plants on the CPU (gloo), about 40 minutes
    python benchmarks/plants/judge.py OUT --cores 4             so many at a time as the machine has cores
    python benchmarks/plants/judge.py OUT --only fraud_parsing,clean_fraud
    python benchmarks/plants/judge.py OUT --gpus 2              the plants of gpu.py (NCCL), 8 minutes
    python benchmarks/plants/judge.py OUT --gpus 1              those of them that one GPU can have
    python benchmarks/plants/judge.py OUT --again               judge what OUT holds; runs nothing

The programs are written as users write them and know nothing of aorta; table.yaml lists them, what each
should be called, and whether the account's cells can know it. A plant runs once under `aorta run`, and
without aorta in turn with its mended program (--repeats times): the difference of their steps is the truth.
A plant is right where the first cause has an expected kind and rank; its size is right where the cause's
interval meets the truth's repeats. A plant that costs less than a hundredth of the step in one repeat
is not judged: there is nothing to name. A clean program is right where nothing is named. OUT keeps the
records and truth.json; judged.json is what came out. Programs whose library is not there are left out.
"""

import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from statistics import mean
from threading import Lock, local
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import yaml  # noqa: E402
from harness import arguments, machine, write  # noqa: E402

LIBRARIES = {
    "photos_accelerate": "accelerate",
    "sensors_lightning": "lightning",
    "words_trainer": "transformers",
}
COSTS = 0.01
"""Of the step, below which a plant costs nothing."""
ENOUGH = 0.85
"""Share of the plants that cells can tell whose kind, and whose size, has to be right."""


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--only", default="", metavar="NAME,…")
    parser.add_argument("--gpus", type=int, choices=[1, 2], default=0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cores", type=int, default=0, help="a plant's own; 0: one at a time, on all")
    parser.add_argument("--again", action="store_true")
    given = parser.parse_args()

    table = yaml.safe_load((HERE / "table.yaml").read_text())
    plants: dict[str, dict[str, Any]] = table["gpu" if given.gpus else "cpu"]
    chosen = given.only.split(",") if given.only else list(plants)
    for name in chosen:
        if name not in plants:
            parser.error(f"no plant {name!r}; there are {', '.join(plants)}")
    if given.gpus:
        chosen = [name for name in chosen if plants[name].get("ranks", 1) <= given.gpus]
    else:
        chosen = [name for name in chosen if has_library(plants[name]["script"])]
    given.out.mkdir(parents=True, exist_ok=True)
    if not given.again and given.gpus:
        record_on_gpus(chosen, given.out, given.gpus)
    elif not given.again:
        beside_each_other(
            chosen,
            given.cores,
            lambda name: record(name, plants[name], table["scripts"], given.out, given.repeats),
        )

    truths = known_truths(given.out)
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 4)) as pool:
        said = dict(zip(chosen, pool.map(lambda name: why(given.out / name), chosen), strict=True))
    rows = [row(name, plants[name], truths.get(name), said[name]) for name in chosen]
    for one in rows:
        script = HERE / ("gpu.py" if given.gpus else f"scripts/{plants[one['plant']]['script']}.py")
        one |= line_row(script, table["lines"].get(one["plant"]), said[one["plant"]])
    (given.out / "judged.json").write_text(
        json.dumps({"rows": rows, "said": said, "machine": machine()}, indent=1)
    )
    write(given.output, rows)
    return show(rows)


def has_library(script: str) -> bool:
    library = LIBRARIES.get(script)
    found = library is None or importlib.util.find_spec(library) is not None
    if not found:
        print(f"{script}.py is left out: no {library}", file=sys.stderr)
    return found


# Running

LINES_APART = 3
KEEPING = Lock()
PLACE = local()
"""cores: those of the plant that this thread runs."""


def beside_each_other(names: list[str], cores_each: int, work: Callable[[str], None]) -> None:
    """Work on every plant, on cores of its own."""
    cores = sorted(os.sched_getaffinity(0))
    each = min(cores_each or len(cores), len(cores))
    free: SimpleQueue[list[int]] = SimpleQueue()
    places = [cores[at : at + each] for at in range(0, len(cores) - each + 1, each)]
    for place in places:
        free.put(place)

    def on_free_cores(name: str) -> None:
        PLACE.cores = free.get()
        try:
            work(name)
        finally:
            free.put(PLACE.cores)

    with ThreadPoolExecutor(max(1, len(places))) as pool:
        list(pool.map(on_free_cores, names))


def record(
    name: str,
    plant: dict[str, Any],
    scripts: dict[str, dict[str, Any]],
    out: Path,
    repeats: int,
) -> None:
    """Run a plant under aorta and beside its mended program, but for what OUT holds."""
    script = scripts[plant["script"]]

    def program(variant: str) -> list[str]:
        path = HERE / "scripts" / f"{plant['script']}.py"
        words = [str(path), *shlex.split(script["args"]), *shlex.split(plant[variant])]
        return launched(script["ranks"], words)

    clean = "planted" not in plant
    if not (out / name / "run.json").exists():
        run(recorded(out / name, program("mended" if clean else "planted")), name)
    if not clean and name not in known_truths(out):
        pairs = [[run(program(variant), name) for variant in ("planted", "mended")] for _ in range(repeats)]
        truth = {"planted_ms": [pair[0] for pair in pairs], "mended_ms": [pair[1] for pair in pairs]}
        keep_truths(out, {name: truth})


def record_on_gpus(names: list[str], out: Path, ranks: int) -> None:
    """Run each plant of gpu.py in turn with what mends it, all in one program, then each under aorta."""
    script = str(HERE / "gpu.py")
    truths = known_truths(out)
    missing = [name for name in names if not name.startswith("clean") and name not in truths]
    if missing:
        printed = output(launched(ranks, [script, "--truth", *missing]), "truth").splitlines()
        found = [json.loads(line) for line in printed if line.startswith("{")]
        keep_truths(out, {one["name"]: one for one in found})
    for name in names:
        if not (out / name / "run.json").exists():
            run(recorded(out / name, launched(ranks, [script, name])), name)


def known_truths(out: Path) -> dict[str, Any]:
    """By plant, milliseconds a step with it and mended, as often as they were run."""
    path = out / "truth.json"
    truths: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return truths


def keep_truths(out: Path, more: dict[str, Any]) -> None:
    with KEEPING:
        (out / "truth.json.new").write_text(json.dumps(known_truths(out) | more, indent=1))
        (out / "truth.json.new").replace(out / "truth.json")


def launched(ranks: int, words: list[str]) -> list[str]:
    if ranks == 1 and words[0] != str(HERE / "gpu.py"):
        return [sys.executable, *words]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", port]
    return [sys.executable, *launcher, *words]


def recorded(folder: Path, command: list[str]) -> list[str]:
    return [sys.executable, "-m", "aorta", "run", "--no-report", "-o", str(folder), "--", *command]


def run(command: list[str], name: str) -> float | None:
    """Milliseconds a step as the program prints them; None where it failed twice."""
    for _ in range(2):
        found = re.search(r"([\d.]+) ms a step", output(command, name))
        if found:
            return float(found[1])
    return None


def output(command: list[str], name: str) -> str:
    # One thread a process is what torchrun sets for several ranks anyway.
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    cores = getattr(PLACE, "cores", None)
    if cores is not None and len(cores) < len(os.sched_getaffinity(0)):
        command = ["taskset", "-c", ",".join(map(str, cores)), *command]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"{name}: took over 300 s", file=sys.stderr)
        return ""
    if ended.returncode:
        errors = re.findall(r"^.*\b\w*(?:Error|Exception)\b.*$", ended.stderr, re.MULTILINE)
        text = "; ".join(dict.fromkeys(errors)) or ended.stderr[-300:]
        print(f"{name}: exit status {ended.returncode}: {text[:600]}", file=sys.stderr)
    return ended.stdout


def why(folder: Path) -> dict[str, Any]:
    """What `aorta why` says of a run."""
    command = [sys.executable, "-m", "aorta", "why", str(folder), "--json"]
    try:
        found: dict[str, Any] = json.loads(output(command, folder.name))
    except ValueError:
        return {"causes": [], "failed": True}
    return found


# Judging


def row(
    name: str, plant: dict[str, Any], truth: dict[str, Any] | None, said: dict[str, Any]
) -> dict[str, Any]:
    expected = plant.get("expected", [])
    first = next(iter(said["causes"]), None)
    low, high = (first["interval_ms"] or [None, None]) if first else (None, None)
    differences = lost(truth)
    found: dict[str, Any] = {
        "plant": name,
        "expected": " or ".join(expected) or "nothing",
        "tells": plant.get("tells", True),
        "named": called(first) if first else ("failed" if said.get("failed") else "nothing"),
        "step_ms": said.get("step_ms"),
        "truth_ms": mean(differences) if differences else None,
        "truth_least_ms": min(differences, default=None),
        "truth_most_ms": max(differences, default=None),
        "planted_ms": mean(ms for ms in truth["planted_ms"] if ms) if differences and truth else None,
        "named_ms": first["ms"] if first else None,
        "low_ms": low,
        "high_ms": high,
        "all_named": [called(cause) for cause in said["causes"]],
    }
    found["right"] = (
        bool({called(first), first["kind"]} & set(expected))
        if first
        else not expected and "failed" not in said
    )
    found["sized"] = within(found) if expected else None
    return found


def line_row(script: Path, planted: str | None, said: dict[str, Any]) -> dict[str, Any]:
    """The line of the plant, the line that is named, and whether they are within LINES_APART."""
    first = next(iter(said["causes"]), None)
    line = (first or {}).get("line")
    found: dict[str, Any] = {
        "line": None,
        "named_line": f"{Path(line['file']).name}:{line['line']}" if line else None,
        "right_line": None,
        "change": (first or {}).get("change"),
    }
    if planted is not None:
        text = script.read_text()
        assert text.count(planted) == 1, (script.name, planted)
        number = text[: text.index(planted)].count("\n") + 1
        is_near = line is not None and abs(line["line"] - number) <= LINES_APART
        found["line"] = f"{script.name}:{number}"
        found["right_line"] = line is not None and is_near and Path(line["file"]).name == script.name
    return found


def called(cause: dict[str, Any]) -> str:
    rank = cause.get("rank")
    return str(cause["kind"] if rank is None else f"{cause['kind']}@{rank}")


def lost(truth: dict[str, Any] | None) -> list[float]:
    """What the plant costs a step, once for each repeat."""
    if truth is None:
        return []
    pairs = zip(truth["planted_ms"], truth["mended_ms"], strict=True)
    return [planted - mended for planted, mended in pairs if planted is not None and mended is not None]


def within(found: dict[str, Any]) -> bool:
    """Does the cause's interval meet the truth's repeats?"""
    low, high = found["low_ms"], found["high_ms"]
    if low is None or high is None or found["truth_ms"] is None:
        return False
    return bool(found["right"] and low <= found["truth_most_ms"] and found["truth_least_ms"] <= high)


def costs(found: dict[str, Any]) -> bool:
    """The plant takes time worth a name in each of the truth's repeats, as far as these are there."""
    return found["truth_least_ms"] is None or bool(found["truth_least_ms"] > COSTS * found["planted_ms"])


def show(rows: list[dict[str, Any]]) -> int:
    """Print a line a plant and what the shares are; 1 where one is too small."""
    wide = max(len(one["plant"]) for one in rows)
    head = f"{'plant':{wide}}  {'step':>6}  {'truth ms':>21}  {'named ms [interval]':>24}"
    print(f"{head}  kind size  first cause (expected)")
    for one in rows:
        truth = named = ""
        if one["truth_ms"] is not None:
            spread = f"{one['truth_least_ms']:.1f}…{one['truth_most_ms']:.1f}"
            truth = f"{one['truth_ms']:.1f} ({spread})"
        if one["named_ms"] is not None:
            span = "none" if one["low_ms"] is None else f"{one['low_ms']:.1f}, {one['high_ms']:.1f}"
            named = f"{one['named_ms']:.1f} [{span}]"
        marks = ["ok" if one["right"] else "NO", {True: "ok", False: "NO", None: ""}[one["sized"]]]
        step = f"{one['step_ms']:.1f}" if one["step_ms"] else ""
        where = (
            "" if one["right_line"] in (None, True) else f"; line {one['named_line']}, planted {one['line']}"
        )
        untold = where if one["tells"] else "; cells cannot tell"
        untold += "; costs nothing" if one["expected"] != "nothing" and not costs(one) else ""
        print(
            f"{one['plant']:{wide}}  {step:>6}  {truth:>21}  {named:>24}  {marks[0]:4} {marks[1]:4}"
            f"  {one['named']} ({one['expected']}{untold})"
        )
    clean = [one["right"] for one in rows if one["expected"] == "nothing"]
    told = [one for one in rows if one["tells"] and one["expected"] != "nothing" and costs(one)]
    measured = [one for one in told if one["truth_ms"] is not None]
    right, sized = sum(one["right"] for one in told), sum(one["sized"] for one in measured)
    lines = [one["right_line"] for one in rows if one["right_line"] is not None]
    print(f"line right in {sum(lines)} of {len(lines)} that have one")
    print(f"first cause right in {right} of {len(told)}, its size in {sized} of {len(measured)}")
    print(f"clean programs of which nothing is said: {sum(clean)} of {len(clean)}")
    is_enough = right >= ENOUGH * len(told) and sized >= ENOUGH * len(measured)
    return 0 if all(clean) and is_enough else 1


if __name__ == "__main__":
    raise SystemExit(main())
