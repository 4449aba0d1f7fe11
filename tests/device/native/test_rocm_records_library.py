"""The library that takes ROCm's kernel records, beside a stand-in for roctracer built from rocm_tracer.c.

Each test runs in a process of its own: the library holds one ring per process.
"""

import json
import subprocess
from pathlib import Path

import pytest

from aorta.device.native.build import NativeError, find_compiler
from tests.dist.launch import run_python

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def tracer(tmp_path_factory):
    """Path of the stand-in."""
    try:
        command = find_compiler()
    except NativeError as error:
        pytest.skip(str(error))
    path = tmp_path_factory.mktemp("tracer") / "libroctracer64.so"
    subprocess.run([*command, "-shared", "-fPIC", str(HERE / "rocm_tracer.c"), "-o", str(path)], check=True)
    return path


PREAMBLE = """
import ctypes, json, sys, time
import numpy as np
from aorta.device.native.build import load_library
from aorta.steps.raw import RECORD_DTYPE, What

class Taken(ctypes.Structure):
    _fields_ = [("num_taken", ctypes.c_uint64), ("num_lost", ctypes.c_uint64), ("lost_start", ctypes.c_int64)]
    _fields_ += [("lost_end", ctypes.c_int64), ("num_dropped", ctypes.c_uint64), ("settled", ctypes.c_uint32)]
    _fields_ += [("num_names", ctypes.c_uint32), ("num_no_time", ctypes.c_uint64)]

class Planned(ctypes.Structure):
    _fields_ = [("op", ctypes.c_uint32), ("correlation", ctypes.c_uint64), ("begin", ctypes.c_uint64)]
    _fields_ += [("end", ctypes.c_uint64), ("device", ctypes.c_int), ("queue", ctypes.c_uint64)]
    _fields_ += [("name", ctypes.c_char_p)]

path = sys.argv[1].encode()
tracer = ctypes.CDLL(sys.argv[1])
tracer.play_call.restype = tracer.play_last.restype = ctypes.c_uint64
tracer.play_ahead.argtypes = (ctypes.c_int64,)
library = load_library("kernel_records_rocm")
library.aorta_kernels_name.restype = ctypes.c_char_p
library.aorta_kernels_error.restype = ctypes.c_char_p
assert library.aorta_kernels_taken_bytes() == ctypes.sizeof(Taken)
LAUNCH, COPY, SET, GRAPH = range(4)

def opened(capacity=100):
    assert library.aorta_kernels_open(path, path, ctypes.c_uint64(capacity), ctypes.c_size_t(8192)) == 0
    assert library.aorta_kernels_prepare_marks() == 0
    assert library.aorta_kernels_claim() == 0
    assert library.aorta_kernels_start() == 0

def mark(number):
    assert library.aorta_kernels_mark(ctypes.c_void_p(0), number) == 0
    return tracer.play_last()

def done(correlation, begin=1000, end=2000, name=b"gemm", op=0, queue=3):
    planned = Planned(op=op, correlation=correlation, begin=begin, end=end, name=name, queue=queue, device=1)
    tracer.play_records(ctypes.byref(planned), 1)

def take(most=1000):
    rows, taken = np.zeros(most, RECORD_DTYPE), Taken()
    library.aorta_kernels_take(ctypes.c_void_p(rows.ctypes.data), ctypes.c_uint64(most), ctypes.byref(taken))
    return rows[: taken.num_taken], taken

def name(index):
    return library.aorta_kernels_name(index).decode()
"""


def run(tracer, body):
    # One cache for all: the library is compiled once.
    done = run_python("-c", f"{PREAMBLE}\n{body}", tracer, AORTA_CACHE_DIR=str(tracer.parent))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_copies_and_marks_are_told_apart(tracer):
    result = run(
        tracer,
        """
opened()
first, kernel, copy = mark(7), tracer.play_call(LAUNCH), tracer.play_call(COPY)
done(first, name=b"__amd_rocclr_fillBufferAligned")
done(kernel, name=b"_ZN2at4gemmEi")
done(copy, name=None, op=1)
rows, taken = take()
shown = [[int(r[f]) for f in ("what", "correlation", "stream", "device")] for r in rows]
names = [int(rows[0]["name"]), name(int(rows[1]["name"])), library.aorta_kernels_passed()]
print(json.dumps([shown, names]))
""",
    )
    (first, kernel, copy), names = result
    assert (first, kernel, copy) == ([3, 1, 3, 1], [0, 2, 3, 1], [1, 3, 3, 1])
    assert names == [7, "at::gemm(int)", 7]


def test_a_fill_of_the_program_is_no_mark(tracer):
    result = run(
        tracer,
        """
opened()
done(tracer.play_call(SET), name=b"fill")
rows, _ = take()
print(json.dumps(int(rows[0]["what"])))
""",
    )
    assert result == 0


def test_a_launch_is_settled_when_all_before_it_have_records(tracer):
    result = run(
        tracer,
        """
opened()
first, second, third = (tracer.play_call(LAUNCH) for _ in range(3))
settled = []
for launch in (second, first, third):
    done(launch)
    rows, taken = take()
    settled.append([taken.settled, rows["buffer"].tolist(), library.aorta_kernels_num_lent()])
print(json.dumps(settled))
""",
    )
    assert result == [[1, [2], 1], [3, [1], 1], [4, [3], 0]]


def test_a_launch_without_a_record_is_given_up_after_a_later_mark(tracer):
    result = run(
        tracer,
        """
opened()
captured = tracer.play_call(LAUNCH)
done(mark(1))
before = [library.aorta_kernels_num_lent(), take()[1].settled]
time.sleep(1.1)
after = [library.aorta_kernels_num_lent(), take()[1].settled]
print(json.dumps([before, after]))
""",
    )
    assert result == [[1, 1], [0, 3]]


def test_kernels_of_a_graph_are_marked_as_such(tracer):
    result = run(
        tracer,
        """
opened()
graph = tracer.play_call(GRAPH)
done(graph); done(graph)
rows, _ = take()
print(json.dumps(rows["in_graph"].tolist()))
""",
    )
    assert result == [1, 1]


def test_times_are_put_on_the_hosts_monotonic_clock(tracer):
    result = run(
        tracer,
        """
tracer.play_ahead(5_000_000_000)
opened()
now = time.monotonic_ns()
done(tracer.play_call(LAUNCH), begin=now + 5_000_000_000, end=now + 5_000_000_100)
rows, _ = take()
print(json.dumps([int(rows[0]["start"]) - now, int(rows[0]["end"] - rows[0]["start"])]))
""",
    )
    assert abs(result[0]) < 1_000_000  # what the bracket of the two clocks may be off on a busy machine
    assert result[1] == 100


def test_a_full_ring_loses_records_and_says_so(tracer):
    result = run(
        tracer,
        """
opened(2)
for i in range(4):
    done(tracer.play_call(LAUNCH))
rows, taken = take()
print(json.dumps([len(rows), taken.num_lost]))
""",
    )
    assert result == [2, 2]


def test_what_is_stopped_is_not_traced(tracer):
    result = run(
        tracer,
        """
opened()
on = tracer.play_enabled()
library.aorta_kernels_stop()
print(json.dumps([on, tracer.play_enabled(), tracer.play_call(LAUNCH)]))
""",
    )
    assert result == [3, 0, 0]


def test_a_tracer_that_refuses_and_one_that_is_not_there_have_a_reason(tracer):
    result = run(
        tracer,
        """
absent = library.aorta_kernels_open(b"/no/tracer.so", path, ctypes.c_uint64(10), ctypes.c_size_t(4096))
reasons = [library.aorta_kernels_error().decode()]
tracer.play_refusal(-6)
assert library.aorta_kernels_open(path, path, ctypes.c_uint64(10), ctypes.c_size_t(4096)) == 0
refused = library.aorta_kernels_claim()
print(json.dumps([absent, refused, *reasons, library.aorta_kernels_error().decode()]))
""",
    )
    assert result[:2] == [1, 1]
    assert "/no/tracer.so" in result[2]
    assert result[3] == "roctracer_open_pool_expl (error -6)"
