"""How far one value travels through files: python scripts/walks.py [--json] [--route] [TREE, default: here]

Four small runs are followed (a sweep's trial, a run's records, a projection, a Kineto trace to a report): the
functions of aorta in the order of their first call, each once. A stay is a row of such functions in one file;
a return is a stay in a file that was left before. Compare two states by running it on both trees.

Counted twice more: without reading data (properties and the special methods of classes, such as __len__ of a
container), and like for like, without the files of LATER, which do what the tree of 4f2da13 did not.
"""

import argparse
import importlib
import inspect
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

LATER = {
    "records/columns/blocks.py": "records are read in blocks of columns",
    "records/columns/step_block.py": "records are read in blocks of columns",
    "records/columns/reader.py": "numbers are kept as columns beside the lines",
    "records/columns/number_block.py": "numbers are kept as columns beside the lines",
    "report/load/arrays.py": "arrays of large runs are in a file",
    "report/load/rank/host.py": "lines tell what the host did",
    "report/rows.py": "statistics of large runs are made of blocks of rows",
    "timeline/unseen_drift.py": "a drift that a run is too short to show is allowed for",
    "report/load/rank/cache.py": "columns of large runs are stored",
}
EXAMPLE = Path(__file__).resolve().parents[1] / "docs" / "example" / "fsdp"
SWEEP = """
name: walk
config: train.yaml
objective: step_ms
parameters: {model.num_heads: [2]}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--route", action="store_true", help="list the stays of every walk")
    options = parser.parse_args()
    tree = options.tree.resolve()
    sys.path.insert(0, str(tree))
    with tempfile.TemporaryDirectory() as name:
        routes = {walk.__name__: route(prepared, tree / "aorta") for walk, prepared in walks(Path(name))}
    if options.json:
        print(json.dumps({walk: all_counts(calls) for walk, calls in routes.items()}, indent=1))
        return
    for walk, calls in routes.items():
        for kind, numbers in all_counts(calls).items():
            print(f"{walk:18}{kind:14}", *(f"{count:4} {what}" for what, count in numbers.items()))
        if options.route:
            print(*(f"    {stay}" for stay in stays_of(calls)), sep="\n")


def walks(folder: Path) -> list[tuple[Callable[[Path], Callable[[], object]], Callable[[], object]]]:
    return [(walk, walk(folder)) for walk in (run_trial, load_run, project, kineto_to_report)]


class Call(NamedTuple):
    """The first call of a function."""

    file: str
    reads_data: bool


def all_counts(calls: list[Call]) -> dict[str, dict[str, int]]:
    return {
        "all": counts(stays_of(calls)),
        "without data": counts(stays_of([call for call in calls if not call.reads_data])),
        "like for like": counts(stays_of([call for call in calls if call.file not in LATER])),
    }


def stays_of(calls: list[Call]) -> list[str]:
    return [file for file, _ in groupby(call.file for call in calls)]


def counts(stays: list[str]) -> dict[str, int]:
    return {
        "stays": len(stays),
        "files": len(set(stays)),
        "folders": len({stay.rpartition("/")[0] for stay in stays}),
        "returns": len(stays) - len(set(stays)),
    }


def route(call: Callable[[], object], package: Path) -> list[Call]:
    """Functions in the order in which they are called for the first time."""
    call()  # what is imported or kept at the first call is no part of the way
    order: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{package}/"):
            order.setdefault(frame.f_code)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    named = [code for code in order if not code.co_name.startswith("<")]  # a comprehension is no place to go
    return [Call(code.co_filename.removeprefix(f"{package}/"), _reads_data(code, package)) for code in named]


def _reads_data(code: CodeType, package: Path) -> bool:
    """True for a property, and for a special method such as __len__."""
    if code.co_name.startswith("__"):
        return True
    path = Path(code.co_filename).relative_to(package.parent).with_suffix("")
    *owners, name = code.co_qualname.split(".")
    owner: Any = sys.modules.get(".".join(path.parts).removesuffix(".__init__"))
    for part in owners:
        owner = getattr(owner, part, None)
    return bool(owners) and isinstance(inspect.getattr_static(owner, name, None), property | cached_property)


def first(*names: str) -> Any:
    """The first of these that the tree has, as module:attribute; later states have it elsewhere."""
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError):
            continue
    raise SystemExit(f"walks: this tree has none of {', '.join(names)}")


def run_trial(folder: Path) -> Callable[[], object]:
    """From the folder of a trial to its point; the training itself is another process."""
    trial = importlib.import_module("aorta.sweep.trial")

    def trained(_spec: object, _configuration: object, output: Path) -> None:
        shutil.copytree(EXAMPLE, output, dirs_exist_ok=True)

    trial._train = trained  # type: ignore[attr-defined]
    (folder / "train.yaml").write_text("training: {max_steps: 12}\n")
    (folder / "sweep.yaml").write_text(SWEEP)
    spec = first("aorta.sweep.spec:load_spec")(folder / "sweep.yaml")
    return lambda: trial.run_trial(spec, {}, folder / "trial")


def load_run(_folder: Path) -> Callable[[], object]:
    """From a folder of records to the run that a report judges."""
    load = first("aorta.report.load.open:load_run", "aorta.report.load:load_run")
    return lambda: load(EXAMPLE, "example")


def project(_folder: Path) -> Callable[[], object]:
    """From a model and a plan to the projected step."""
    step = first("aorta.projection.step:project")
    model = first("aorta.projection.job.model:load_model", "aorta.projection.model:load_model")(
        "mixtral-8x7b"
    )
    hardware = first("aorta.hardware:load_hardware", "aorta.projection.hardware:load_hardware")("h200")
    plan_of = first("aorta.projection.job.plan:Plan", "aorta.projection.plan:Plan")
    pricer = first("aorta.projection.pricing:Pricer")

    def run() -> object:
        plan = plan_of(nodes=2, dp=2, tp=2, pp=4, ep=2, global_batch_size=64, seq_len=4096)
        return step(model, plan, pricer(hardware, plan))

    return run


def kineto_to_report(folder: Path) -> Callable[[], object]:
    """From the trace of two steps of one rank to the report's text."""
    make_report = first("aorta.report.write:make_report")
    events: list[dict[str, object]] = []
    for step in range(2):
        start = 1000 * step
        note = {"ph": "X", "pid": 1, "tid": 1, "ts": start, "dur": 900}
        events.append(note | {"cat": "user_annotation", "name": f"ProfilerStep#{step}"})
        kernels = [("ampere_gemm", 7, 100, 400), ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 9, 300, 500)]
        for index, (name, stream, offset, duration) in enumerate(kernels):
            correlation = 2 * step + index + 1
            call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1}
            events.append(call | {"ts": start + 5 + index, "dur": 1, "args": {"correlation": correlation}})
            kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream}
            args = {"stream": stream, "device": 0, "correlation": correlation}
            events.append(kernel | {"ts": start + offset, "dur": duration, "args": args})
    path = folder / "rank0.json"
    info = {"rank": 0, "world_size": 1}
    path.write_text(json.dumps({"traceEvents": events, "schemaVersion": 1, "distributedInfo": info}))
    return lambda: make_report([path], ["x"])


if __name__ == "__main__":
    main()
