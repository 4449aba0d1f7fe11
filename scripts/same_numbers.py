"""Write the numbers of a fixed set of inputs: python scripts/same_numbers.py OUTPUT.json [--against FILE]

Runs `aorta report`, `why`, `compare`, `project`, `program` and the comparison of queue documents with the
code in the current folder. Writes what they decide as one JSON document: summary.json, page data, causes,
exit codes, verdicts, projections. Sentences are left out, so that two states of the code can be compared:

    git worktree add ../before COMMIT && cp scripts/same_numbers.py ../before/scripts/
    (cd ../before && python scripts/same_numbers.py /tmp/before.json --data "$OLDPWD/tests/data")
    python scripts/same_numbers.py /tmp/after.json --against /tmp/before.json

Inputs are the example runs, runs made from them here, and tests/data; --larger adds traces of $AORTA_DATA.
Exit code 1 where a value differs from that in --against.
"""

import argparse
import copy
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Json = Any
EXAMPLE = Path("docs/example")
OWN_DATA = Path("tests/data")
PROJECTIONS = (
    ("performance", "--model", "llama3-8b", "--gpu-arch", "h200"),
    (
        "performance",
        "--model",
        "llama3-70b",
        "--gpu-arch",
        "mi300x",
        "--nodes",
        "8",
        "--tp",
        "8",
        "--pp",
        "4",
    ),
    ("performance", "--model", "mixtral-8x7b", "--gpu-arch", "h100", "--nodes", "4", "--ep", "8"),
    ("memory", "--model", "llama3-70b", "--gpu-arch", "b200", "--nodes", "2", "--tp", "4"),
    ("compare", "--model", "llama3-8b", "--gpu-arch", "h200", "tp=2"),
)
BUDGET = """\
step_ms: {max: 120.0, max_ratio: 1.02}
exposed_ms: {max: 10.0, min: 0.001}
raw.exposed_ms: {max: 22.0}
overlap_ratio: {min: 0.5}
busbw_gb_s.all_gather: {min: 0.001}
wait_ms.all_reduce: {max: 0.5}
tokens_per_s_per_gpu: {min_ratio: 0.5, runs: 2}
"""
LIMIT_LINE = re.compile(r"^(met|violated|not judged): ([^:]+): ([^:]+): ([^(\n]*)", re.M)
SENTENCES = re.compile(
    "headline|scope|notes|reason|remarks|text|sentences|why|story|not_measured|answer|detail|advice|observed|findings|"
    "files|path|output|description|why_empty|words|peak|statement|evidence|subject|change|check|nothing|why_no_interval|"
    "comparison_notes|estimator"
)
"""Keys whose values are sentences or places, which may be worded anew."""
NUMBER = re.compile(r"\d+(?:\.\d+)?")
TABLE_LINE = re.compile(r"\S+( \S+)?  +.*\d")
TIMEOUT_S = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--against", type=Path, help="earlier output, compared to the digit")
    parser.add_argument("--data", type=Path, default=OWN_DATA, help="recorded runs and traces (%(default)s)")
    parser.add_argument("--larger", action="store_true", help="read the traces of $AORTA_DATA too")
    options = parser.parse_args()
    traces = Path(os.environ.get("AORTA_DATA", "")) / "traces" if options.larger else None
    if traces is not None and not (os.environ.get("AORTA_DATA") and traces.is_dir()):
        parser.error("--larger needs AORTA_DATA, a folder with traces/ in it")
    with tempfile.TemporaryDirectory() as name:
        os.environ["AORTA_CACHE_DIR"] = f"{name}/cache"  # so that no tree reads what another one kept
        found = dict(cases(Path(name), options.data.resolve(), traces))
        # Commands to type name the folder, which is another one in each run.
        numbers = json.loads(
            json.dumps(found).replace(name, "FOLDER").replace(str(options.data.resolve()), "DATA")
        )
    options.output.write_text(json.dumps(numbers, indent=1, sort_keys=True) + "\n")
    count = sum(1 for _ in leaves(numbers))
    print(f"{len(numbers)} inputs, {count} values: {options.output}")
    if options.against is not None:
        differences = list(compared(json.loads(options.against.read_text()), json.loads(json.dumps(numbers))))
        for line in differences[:40]:
            print(line)
        print(f"{len(differences)} differ from {options.against}")
        sys.exit(1 if differences else 0)


def cases(folder: Path, data: Path, larger: Path | None) -> Iterator[tuple[str, Json]]:
    runs = hand_made_runs(folder / "runs") | {path.name: path for path in sorted(data.glob("run_*"))}
    budget = folder / "budget.yaml"
    budget.write_text(BUDGET)
    for name, path in runs.items():
        yield f"report {name}", report(folder, "report", path, "--label", name)
        yield f"why {name}", why(path)
    two_runs_each = [runs[name] for name in ("delayed", "calibrated", "slower", "calibrated_slower")]
    labels = ("before", "before", "after", "after")
    yield "report of two labels", report(folder, "report", *two_runs_each, "--budget", budget, labels=labels)
    yield "report of all", report(folder, "report", *runs.values(), labels=tuple(runs))
    pairs = [("example", "delayed"), ("example", "slower"), ("calibrated", "calibrated_slower")]
    pairs += [("calibrated", "kernels"), ("kernels", "kernels_slower"), ("example", "more_tokens")]
    pairs += [("calibrated", "partly_calibrated"), ("ddp", "example"), ("timed_rarely", "example")]
    for reference, candidate in pairs:
        yield (
            f"compare {reference} {candidate}",
            report(folder, "compare", runs[reference], runs[candidate], "--budget", budget),
        )
    yield from trace_cases(folder, data)
    if larger is not None:
        yield from larger_trace_cases(folder, larger)
    for arguments in PROJECTIONS:
        yield " ".join(("projection", *arguments)), projection(arguments)
    for operation in ("ag_gemm", "gemm_rs", "gemm_ar"):
        yield f"program {operation}", simulation(folder, operation)
    yield "results queues queues_slow", results(*documents_of_queues(folder))


def trace_cases(folder: Path, data: Path) -> Iterator[tuple[str, Json]]:
    kineto = data / "traces_kineto"
    yield "report kineto", report(folder, "report", kineto, "--label", "traces")
    yield "why kineto", why(kineto)
    yield "why kineto, rank 1 on time", why(kineto, "--if", "rank 1 on time", "--if", "all_gather x0.5")
    yield "compare kineto of two ranks", report(folder, "compare", *sorted(kineto.iterdir()))
    for packed in sorted((data / "traces_vendors").iterdir()):
        path = folder / packed.stem
        path.write_bytes(gzip.decompress(packed.read_bytes()))
        yield f"report {path.name}", report(folder, "report", path, "--label", "traces")
    yield "report traces without a device", report(folder, "report", data / "traces_gloo_ddp")


def larger_trace_cases(folder: Path, traces: Path) -> Iterator[tuple[str, Json]]:
    ranks = folder / "h200_fsdp4"
    ranks.mkdir()
    for path in traces.glob("h200_fsdp4_rank*"):
        (ranks / path.name).symlink_to(path.resolve())
    dlrm = (traces / "v100_dlrm_8ranks_kineto.tar.gz").resolve()
    yield "report h200_fsdp4", report(folder, "report", ranks, "--label", "traces")
    yield "why h200_fsdp4", why(ranks)
    yield f"why {dlrm.name}", why(dlrm)
    for path in (
        dlrm,
        traces / "mi350x_fsdp_rocprofv3.json.gz",
        traces / "mi350x_single_nocomm_kineto.json",
    ):
        yield f"report {path.name}", report(folder, "report", path.resolve(), "--label", "traces")


# ---- commands ----------------------------------------------------------------------------------


def report(folder: Path, command: str, *arguments: Any, labels: tuple[str, ...] = ()) -> Json:
    """Exit code, summary.json, limits and the page's data."""
    output = Path(tempfile.mkdtemp(dir=folder))
    names = [part for label in labels for part in ("--label", label)]
    outputs = ("--no-perfetto", "--no-parquet", "--markdown", output / "gate.md")
    done = run("aorta", command, *arguments, *names, *outputs, "--output", output)
    summary = output / "summary.json"
    if not summary.exists():
        return {"exit": done.returncode}
    page = (output / "report.html").read_text()
    blocks = re.findall(r'<script type="application/json" id="([\w-]+)">(.*?)</script>', page, re.S)
    return {
        "exit": done.returncode,
        "summary": without_sentences(json.loads(summary.read_text())),
        "limits": [" ".join(line) for line in LIMIT_LINE.findall(done.stdout)],
        "table": [NUMBER.findall(line) for line in done.stdout.splitlines() if TABLE_LINE.match(line)],
        "page": {name: without_sentences(json.loads(text)) for name, text in blocks},
    }


def why(path: Path, *arguments: str) -> Json:
    """Causes with the numbers in their evidence, whose words may change."""
    done = run("aorta", "why", path, *arguments, "--json")
    answer = as_json(done)
    causes = answer.pop("causes", []) if isinstance(answer, dict) else []
    rest = without_sentences(answer) if isinstance(answer, dict) else answer
    told = [[NUMBER.findall(text) for text in [cause["subject"], *cause["evidence"]]] for cause in causes]
    return {"exit": done.returncode, "causes": without_sentences(causes), "told": told, "rest": rest}


def simulation(folder: Path, operation: str) -> Json:
    program = folder / f"{operation}.txt"
    emitted = run("aorta", "program", "emit", "--op", operation)
    program.write_text(emitted.stdout)
    costs = ("--comm-us", 40, "--gemm-us", 55, "--host-us", 3, "--comm-slowdown", 1.2)
    done = run("aorta", "program", "simulate", program, *costs, "--json")
    numbers = without_sentences(as_json(done))
    return {"exit": [emitted.returncode, done.returncode], "program": emitted.stdout, "numbers": numbers}


def projection(arguments: tuple[str, ...]) -> Json:
    done = run("aorta", "project", *arguments, "--json")
    return {"exit": done.returncode, "numbers": as_json(done)}


def results(baseline: Path, test: Path) -> Json:
    done = run("aorta.hw_queue_eval", "compare", "-b", baseline, "-t", test, "--json")
    return {"exit": done.returncode, "comparison": without_sentences(as_json(done))}


def as_json(done: "subprocess.CompletedProcess[str]") -> Json:
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError:
        return (done.stderr or done.stdout)[-300:]


def run(module: str, *arguments: Any) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "COLUMNS": "200"}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


# ---- inputs ------------------------------------------------------------------------------------


def hand_made_runs(folder: Path) -> dict[str, Path]:
    """The example, and runs made from it by changing its records."""
    example = read(EXAMPLE / "fsdp")
    changes: dict[str, Callable[[int, Json, Json], None]] = {
        "delayed": delayed,
        "slower": slower,
        "calibrated": calibrated,
        "calibrated_slower": lambda place, record, detail: (
            slower(place, record, detail),
            calibrated(place, record, detail),
        )[0],
        "partly_calibrated": lambda place, record, detail: (
            calibrated(place, record, detail) if place % 3 else None
        ),
        "kernels": kernels,
        "kernels_slower": lambda place, record, detail: (
            slower(place, record, detail),
            kernels(place, record, detail),
        )[0],
        "more_tokens": more_tokens,
        "timed_rarely": timed_rarely,
    }
    runs = {"example": EXAMPLE / "fsdp", "ddp": EXAMPLE / "ddp"}
    for name, change in changes.items():
        runs[name] = folder / name
        write(runs[name], example, change)
    return runs


def read(folder: Path) -> dict[str, list[Json]]:
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("rank_*_metrics.jsonl"))
    }


def write(folder: Path, files: dict[str, list[Json]], change: Callable[[int, Json, Json], None]) -> None:
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes((EXAMPLE / "fsdp" / "run.json").read_bytes())
    for name, records in files.items():
        detailed = [record for record in files["rank_0_metrics.jsonl"] if record.get("collectives")]
        lines = []
        for place, record in enumerate(records):
            record = copy.deepcopy(record)
            record.pop("line", None)
            record.pop("crc32", None)
            detail = copy.deepcopy(detailed[place % len(detailed)])
            change(place, record, detail)
            lines.append(json.dumps(record) + "\n")
        (folder / name).write_text("".join(lines))


def delayed(place: int, record: Json, detail: Json) -> None:
    """Both ranks have the details of a step of rank 0; clocks 3 ms apart; rank 1 waits longer."""
    for key in (
        "step_ms",
        "host_ms",
        "between_steps_ms",
        "streams",
        "overlap",
        "active_segments",
        "collectives",
    ):
        record[key] = detail[key]
    record["not_measured"] = detail.get("not_measured", {})
    record["source"] = "events"
    per_step = len(record["collectives"])
    for i, row in enumerate(record["collectives"]):
        row["seq"] = place * per_step + i
        if record["rank"] == 1:
            row["start_ms"] = max(0.0, row["start_ms"] - 0.05 * (place % 5))
    record["start_unix_ns"] = START_UNIX_NS + place * 400_000_000 + 3_000_000 * record["rank"]


def slower(place: int, record: Json, detail: Json) -> None:
    delayed(place, record, detail)
    added_ms = 40.0 + 0.1 * (place % 7)
    record["step_ms"] += added_ms
    record["overlap"]["compute_ms"] += added_ms
    record["streams"]["compute"]["busy_ms"] += added_ms


def calibrated(place: int, record: Json, detail: Json) -> None:
    if record["source"] != "events":
        delayed(place, record, detail)
    overlap = record["overlap"]
    hidden_ms = 0.3 * overlap["comm_ms"]
    exposed_ms = overlap["comm_ms"] - hidden_ms
    rest_ms = max(0.0, record["step_ms"] - overlap["compute_ms"] - exposed_ms)
    overlap["calibrated"] = {
        "comm_ms": overlap["comm_ms"],
        "compute_ms": overlap["compute_ms"],
        "hidden_ms": hidden_ms,
        "exposed_ms": exposed_ms,
        "idle_ms": rest_ms,
    }


def kernels(place: int, record: Json, detail: Json) -> None:
    if record["source"] != "events":
        delayed(place, record, detail)
    overlap = record["overlap"]
    record["source"] = "kernels"
    overlap["compute_stream"] = {
        name: overlap[name] for name in ("compute_ms", "hidden_ms", "exposed_ms", "idle_ms")
    }


def more_tokens(place: int, record: Json, detail: Json) -> None:
    slower(place, record, detail)
    record["tokens"] = 2 * record["tokens"]


def timed_rarely(place: int, record: Json, detail: Json) -> None:
    if place % 4:
        names = [name for name, value in record["overlap"].items() if value is not None]
        for name in names:
            record["overlap"][name] = {} if name.endswith("_by_op") else None
        record["not_measured"]["overlap"] = "left out (--overhead)"
        for key in ("active_segments", "collectives"):
            record[key] = None


def documents_of_queues(folder: Path) -> tuple[Path, Path]:
    """Results as `aorta queues` writes them, the second slower."""
    paths = (folder / "queues.json", folder / "queues_slow.json")
    for path, factor in zip(paths, (1.0, 1.4), strict=True):
        path.write_text(json.dumps(document(factor)))
    return paths


def document(factor: float) -> Json:
    def metric(value: float, unit: str = "ms", better: str = "lower") -> Json:
        interval = {"low": 0.99 * value, "high": 1.01 * value}
        error = {"interval": interval, "error": 0.005 * value, "freedom": 20.0, "num": 40}
        return {"value": value, "unit": unit, "better": better, **error}

    points = []
    for streams in (1, 25):
        configuration = {"workload": "tiny_kernels", "streams": streams, "sync_mode": "per_iteration"}
        metrics = {
            "latency_p50_ms": metric(2.0 * factor),
            "units_per_s": metric(900.0 / factor, "kernels/s", "higher"),
        }
        points.append(
            {"configuration": configuration, "status": "measured", "metrics": metrics, "source": "events"}
        )
    setting: Json = {
        "platform": "cuda",
        "devices": [{"name": "Invented GPU"}],
        "world_size": 2,
        "backend": "nccl",
    }
    setting |= {"versions": {}, "environment": {}, "queues": "8"}
    return {"schema": SCHEMA, "kind": "queues", "created_unix_ns": 1, "setting": setting, "points": points}


SCHEMA = 1
"""The version of documents of results."""
START_UNIX_NS = 1_795_186_425_000_000_000


# ---- comparison --------------------------------------------------------------------------------


def without_sentences(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: without_sentences(entry) for key, entry in value.items() if not SENTENCES.fullmatch(key)}
    return [without_sentences(entry) for entry in value] if isinstance(value, list) else value


def leaves(value: Json, place: str = "") -> Iterator[tuple[str, Json]]:
    if isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(entry, f"{place}/{key}")
    else:
        yield place, value


def compared(before: Json, after: Json) -> Iterator[str]:
    old, new = dict(leaves(before)), dict(leaves(after))
    for place in sorted(old.keys() | new.keys()):
        if old.get(place, "(absent)") != new.get(place, "(absent)"):
            yield f"{place}: {old.get(place, '(absent)')} -> {new.get(place, '(absent)')}"


if __name__ == "__main__":
    main()
