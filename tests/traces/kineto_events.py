"""Events of Kineto's Chrome traces, in µs as in the file, and their parsing."""

import json

from aorta.traces.kineto import parse_kineto


def kernel(ts, dur, correlation=None, stream=7, name="gemm", cat="kernel", **args):
    args = {"device": 0, "stream": stream} | args
    if correlation is not None:
        args["correlation"] = correlation
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}


def launch(ts, correlation, tid=1, pid=100, name="cudaLaunchKernel", **args):
    event = {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": 1}
    return event | {"args": {"correlation": correlation} | args}


def mark(ts, dur, name, cat="user_annotation", tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 100, "tid": tid, "ts": ts, "dur": dur, "args": args}


def parse(*events, **options):
    header = options.pop("header", {"distributedInfo": {"rank": 0, "world_size": 2}})
    return parse_kineto(json.dumps(header | {"traceEvents": list(events)}).encode(), "t.json", **options)
