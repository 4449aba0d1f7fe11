"""Damaged files give records or one clear error: no traceback, no hang."""

import gzip
import json
import random

import msgspec
import pytest

from aorta.account.judge.judged import dataset, judge
from aorta.account.load.open import load_run
from aorta.page.table import dataset_table
from aorta.page.write import write_report
from aorta.records.reader import read_run, read_steps
from aorta.traces.kineto import read_kineto
from tests.records.run_folders import run_record, step_record, step_timeline
from tests.traces.mutations import mutated_bytes, outcome

LINES = b"".join(msgspec.json.encode(step_record(step_timeline(step=i))) + b"\n" for i in range(3))
RUN = msgspec.json.encode(run_record())


@pytest.mark.heavy
def test_mutated_records(tmp_path):
    rng = random.Random(0)
    path = tmp_path / "rank_0_metrics.jsonl"
    for _ in range(1500):
        path.write_bytes(mutated_bytes(LINES, rng))
        outcome(lambda: list(read_steps(path, [])))
        outcome(lambda: dataset_table(dataset("x", [judge(load_run(tmp_path, "x"))])))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("global_step", 10**30),
        ("global_step", -1),
        ("num_collectives", 10**30),
        ("world_size", 10**30),
        ("world_size", -3),
        ("rank", 10**30),
        ("start_unix_ns", 10**30),
        ("step_ms", -1.0),
        ("step_ms", 1e308),
        ("step_ms", 0.0),
    ],
)
def test_impossible_numbers(tmp_path, field, value):
    record = msgspec.to_builtins(step_record(step_timeline(), 1)) | {field: value}
    (tmp_path / "rank_0_metrics.jsonl").write_text(json.dumps(record) + "\n")
    outcome(lambda: write_report([tmp_path], ["x"], tmp_path / "out"))


@pytest.mark.heavy
def test_mutated_run(tmp_path):
    rng = random.Random(1)
    path = tmp_path / "run.json"
    for _ in range(500):
        path.write_bytes(mutated_bytes(RUN, rng))
        outcome(lambda: read_run(path))


def event(cat, name, pid, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": 1, "ts": ts, "dur": dur, "args": args}


@pytest.mark.heavy
def test_mutated_traces(tmp_path):
    rng = random.Random(2)
    where = {"device": 0, "stream": 7, "correlation": 1}
    events = [
        event("user_annotation", "ProfilerStep#1", 1, 0, 9),
        event("cuda_runtime", "cudaLaunchKernel", 1, 1, 1, correlation=1),
        event("kernel", "ncclKernel", 0, 2.5, 3, **where),
        event("kernel", "gemm", 0, 6, 3, **where),
    ]
    info = {"rank": 0, "world_size": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}
    header = {"baseTimeNanoseconds": 5, "deviceProperties": [{"id": 0, "name": "x"}], "distributedInfo": info}
    data = json.dumps(header | {"traceEvents": events}).encode()
    path = tmp_path / "trace.json"
    for packed in (False, True):
        for _ in range(800):
            path.write_bytes(mutated_bytes(gzip.compress(data), rng) if packed else mutated_bytes(data, rng))
            outcome(lambda: read_kineto(path))
