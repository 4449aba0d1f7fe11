"""The library that takes the driver's records, beside a stand-in for the driver built from driver.c.

Each test runs in a process of its own: the library holds one ring per process.
"""

import json
import subprocess
from pathlib import Path

import pytest

from aorta.device.native.build import NativeError, build, find_compiler, load_library
from tests.dist.launch import run_python

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Path of the stand-in."""
    try:
        find_compiler()
    except NativeError as error:
        pytest.skip(str(error))
    path = tmp_path_factory.mktemp("driver") / "libdriver.so"
    source = (HERE / "driver.c").read_text()
    subprocess.run(
        [*find_compiler(), "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)],
        input=source.encode(),
        check=True,
    )
    return path


PREAMBLE = """
import ctypes, json, sys
import numpy as np
from aorta.device.native.build import load_library
from aorta.device.kernel_records import _Taken
from aorta.steps.raw import RECORD_DTYPE, What

class Planned(ctypes.Structure):
    words = ("kind", "value", "stream", "device", "correlation", "in_graph")
    _fields_ = [(n, ctypes.c_uint32) for n in words]
    _fields_ += [(n, ctypes.c_uint64) for n in ("start", "end", "bytes")] + [("name", ctypes.c_char_p)]

path = sys.argv[1].encode()
driver = ctypes.CDLL(sys.argv[1])
driver.play_now.restype = ctypes.c_uint64
library = load_library("kernel_records")
library.aorta_kernels_name.restype = ctypes.c_char_p
library.aorta_kernels_error.restype = ctypes.c_char_p

def opened(capacity=100):
    assert library.aorta_kernels_open(path, path, ctypes.c_uint64(capacity), ctypes.c_size_t(8192)) == 0
    assert library.aorta_kernels_prepare_marks() == 0
    assert library.aorta_kernels_claim() == 0
    assert library.aorta_kernels_start() == 0

def kernel(start, end, name=b"gemm", **more):
    return Planned(kind=10, start=start, end=end, name=name, **more)

def play(*records):
    return driver.play_buffer((Planned * len(records))(*records), len(records))

def take(most=1000):
    rows, taken = np.zeros(most, RECORD_DTYPE), _Taken()
    library.aorta_kernels_take(ctypes.c_void_p(rows.ctypes.data), ctypes.c_uint64(most), ctypes.byref(taken))
    return rows[: taken.num_taken], taken

def name(index):
    return library.aorta_kernels_name(index).decode()
"""


def run(driver, body):
    # One cache for all: the library is compiled once.
    done = run_python("-c", f"{PREAMBLE}\n{body}", driver, AORTA_CACHE_DIR=str(driver.parent))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_copies_and_marks_are_told_apart(driver):
    result = run(
        driver,
        """
opened()
copy = Planned(kind=1, value=1, start=30, end=40, bytes=64, stream=9, correlation=3)
fill = Planned(kind=2, value=0, start=41, end=42, bytes=64, stream=9, correlation=4)
mark = Planned(kind=2, value=0xA0000007, start=43, end=44, bytes=4, stream=7, correlation=5)
driver.play_return(play(kernel(10, 20, stream=7, correlation=2, device=1, in_graph=1), copy, fill, mark))
rows, _ = take()
fields = ("what", "start", "end", "stream", "correlation", "name")
shown = [[int(r[f]) for f in fields] for r in rows]
print(json.dumps([*shown, [int(rows[0]["device"]), int(rows[0]["in_graph"])]]))
""",
    )
    kernel, copy, fill, mark, more = result
    assert kernel[:5] == [0, 10, 20, 7, 2]
    assert copy[:5] == [1, 30, 40, 9, 3]
    assert fill[:5] == [2, 41, 42, 9, 4]
    assert mark == [3, 43, 44, 7, 5, 7]
    assert more == [1, 1]


def test_equal_names_have_one_index_wherever_they_lie_and_are_demangled(driver):
    result = run(
        driver,
        """
opened()
texts = [ctypes.create_string_buffer(b"_ZN2at4gemmEi") for _ in range(2)]
a, b = (ctypes.cast(text, ctypes.c_char_p) for text in texts)
driver.play_return(play(kernel(1, 2, a), kernel(3, 4, b), kernel(5, 6, b"other")))
rows, taken = take()
print(json.dumps([[int(r["name"]) for r in rows], taken.num_names, [name(i) for i in range(3)]]))
""",
    )
    assert result == [[1, 1, 2], 3, ["", "at::gemm(int)", "other"]]


def test_a_full_ring_loses_records_and_says_of_which_time(driver):
    result = run(
        driver,
        """
opened(4)
driver.play_return(play(*[kernel(10 * i + 10, 10 * i + 15) for i in range(6)]))
rows, taken = take()
driver.play_return(play(kernel(100, 101)))
again, _ = take()
lost = [taken.num_lost, taken.lost_start, taken.lost_end]
print(json.dumps([rows["start"].tolist(), *lost, again["start"].tolist()]))
""",
    )
    assert result == [[10, 20, 30, 40], 2, 50, 65, [100]]


def test_a_buffer_is_settled_when_all_before_it_have_come(driver):
    result = run(
        driver,
        """
opened()
first, second, third = (play(kernel(i, i + 1)) for i in (1, 3, 5))
settled = []
for buffer in (second, first, third):
    driver.play_return(buffer)
    rows, taken = take()
    settled.append([taken.settled, rows["buffer"].tolist(), library.aorta_kernels_num_lent()])
print(json.dumps(settled))
""",
    )
    assert result == [[0, [1], 2], [2, [0], 1], [3, [2], 0]]


def test_buffers_of_another_client_are_left_alone(driver):
    result = run(
        driver,
        """
opened()
foreign = (ctypes.c_uint8 * 216)()
driver.play_foreign(foreign, 216)
rows, _ = take()
print(json.dumps(len(rows)))
""",
    )
    assert result == 0


def test_records_without_times_are_counted_and_left_out(driver):
    result = run(
        driver,
        """
opened()
driver.play_return(play(kernel(0, 0), kernel(5, 4), kernel(6, 7)))
rows, taken = take()
print(json.dumps([rows["start"].tolist(), taken.num_no_time]))
""",
    )
    assert result == [[6], 2]


def test_marks_tell_the_host_how_far_the_device_is(driver):
    result = run(
        driver,
        """
opened()
before = library.aorta_kernels_passed()
library.aorta_kernels_mark(ctypes.c_void_p(0), 41)
print(json.dumps([before, library.aorta_kernels_passed()]))
""",
    )
    assert result == [0, 41]


def test_records_have_the_hosts_monotonic_clock(driver):
    result = run(
        driver,
        """
import time
opened()
low = time.monotonic_ns(); now = driver.play_now(); high = time.monotonic_ns()
print(json.dumps(low <= now <= high))
""",
    )
    assert result is True


def test_a_driver_that_refuses_and_one_that_is_not_there_have_a_reason(driver):
    result = run(
        driver,
        """
driver.play_refusal(39)
assert library.aorta_kernels_open(path, path, ctypes.c_uint64(10), ctypes.c_size_t(4096)) == 0
refused = library.aorta_kernels_claim(), library.aorta_kernels_error().decode()
print(json.dumps(refused))
""",
    )
    assert result == [1, "cuptiActivityRegisterCallbacks (error 39)"]


@pytest.mark.processes
def test_it_is_built_once_into_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AORTA_CACHE_DIR", str(tmp_path))
    load_library("kernel_records")
    (built,) = (tmp_path / "native").glob("kernel_records-*.so")
    before = built.stat().st_mtime_ns
    load_library("kernel_records")
    assert built.stat().st_mtime_ns == before
    assert not list((tmp_path / "native").glob(".build-*"))


@pytest.mark.processes
def test_without_a_folder_to_write_it_is_built_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("AORTA_CACHE_DIR", str(tmp_path / "file"))
    assert load_library("kernel_records").aorta_kernels_record_bytes() == 40


@pytest.mark.processes
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        pytest.param("no-such-compiler", "no C compiler: CC=no-such-compiler is not on PATH", id="none"),
        pytest.param("false", "false failed: it printed nothing", id="fails"),
    ],
)
def test_a_compiler_that_is_not_there_or_fails_is_one_line(tmp_path, monkeypatch, compiler, reason):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(NativeError, match=reason):
        build("int f(void) { return 1; }", tmp_path / "f.so")
    assert not (tmp_path / "f.so").exists()
