"""What is rocprofiler-sdk's alone of its library of kernel records: registration, streams, RCCL, versions."""

import json

import pytest

from aorta.cli.doctor import _rocprofiler
from aorta.device.cuda import HipBackend
from aorta.device.kernel_records import TOOLS, KernelRecordsUnavailable, is_tool_named, name_tool
from aorta.device.native.build import NativeError, load_library
from tests.device.native.stand_ins import build_stand_in
from tests.dist.launch import run_python

PREAMBLE = """
import json, os, sys, time
from aorta.device.native.build import library_path
from tests.device.native.stand_ins import Rocm, GRAPH
source = Rocm(sys.argv[1])
library, vendor = source.library, source.vendor

def streams(*tokens):
    for token in tokens:
        source.done(token)
    return [int(row["stream"]) for row in source.take()[0]]
"""


@pytest.fixture(scope="module")
def sdk(tmp_path_factory):
    """Path of the stand-in."""
    try:
        return build_stand_in("rocm", tmp_path_factory.mktemp("sdk"))
    except NativeError as error:
        pytest.skip(str(error))


def run(sdk, body):
    # One cache for all: the library is compiled once.
    done = run_python("-c", f"{PREAMBLE}\n{body}", sdk, AORTA_CACHE_DIR=str(sdk.parent))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_tool_that_the_environment_names_is_registered_while_hip_initialises(sdk):
    result = run(
        sdk,
        """
os.environ["ROCP_TOOL_LIBRARIES"] = str(library_path("kernel_records_rocm"))
vendor.play_initialisation()
source.kernel(b"gemm")  # its code is loaded before anything is recorded
source.opened()
source.run(b"gemm")
print(json.dumps([source.name(source.take()[0]["name"][0]), source.is_recording()]))
""",
    )
    assert result == ["gemm", True]


def test_after_hip_has_initialised_it_is_refused_with_a_reason(sdk):
    result = run(
        sdk,
        """
vendor.play_initialisation()
print(json.dumps([source.open(), source.error()]))
""",
    )
    reason = "HIP has initialised, and rocprofiler-sdk takes no tool after that (error 16)"
    assert result == [1, reason]


def test_a_tool_that_cannot_set_itself_up_says_what_failed(sdk):
    result = run(
        sdk,
        """
vendor.play_refusal(10)
print(json.dumps([source.open(), source.error()]))
""",
    )
    assert result == [1, "rocprofiler_create_context (error 10)"]


def test_it_is_registered_once(sdk):
    again = run(
        sdk,
        """
source.opened()
library.rocprofiler_configure.restype = __import__("ctypes").c_void_p
print(json.dumps(library.rocprofiler_configure(10000, b"1.0", 0, None)))
""",
    )
    assert again is None


@pytest.mark.parametrize("within", [False, True], ids=["around", "within"])
def test_a_launch_has_its_stream_whether_it_is_told_around_or_within_the_call(sdk, within):
    result = run(
        sdk,
        f"""
{"vendor.play_within()" if within else ""}
source.opened()
a, b = source.launch(stream=5, queue=9), source.launch(stream=0, queue=9)  # two streams share a queue
print(json.dumps(streams(a, b, source.mark(1, stream=5))))
""",
    )
    assert result == [5, 0, 5]


def test_a_version_without_streams_and_with_other_numbers_has_queues_instead(sdk):
    result = run(
        sdk,
        """
vendor.play_old(); vendor.play_shift(3)
source.opened()
tokens = [source.launch(b"gemm", stream=5, queue=9), source.launch(b"gemm", stream=6, queue=4)]
version = library.aorta_kernels_version()
print(json.dumps([version, *streams(*tokens)]))
""",
    )
    assert result == [500, 0x80000009, 0x80000004]


def test_kernels_of_rccl_have_the_operation_of_their_call(sdk):
    names = run(
        sdk,
        """
source.opened()
RCCL = b"ncclDevKernel_Generic_1"
def within(*calls):
    for call in calls[:-1]:
        source.rccl(call)
    source.rccl(calls[-1], source.ENTER)
    source.run(RCCL); source.run(b"gemm")
    source.rccl(calls[-1], source.EXIT)
within("ncclAllReduce")
within("ncclGroupStart", "ncclSend", "ncclSend", "ncclGroupEnd")
within("ncclGroupStart", "ncclSend", "ncclAllReduce", "ncclGroupEnd")
source.run(RCCL)  # launched by nobody that is known
print(json.dumps([source.name(row["name"]) for row in source.take()[0]]))
""",
    )
    alone, compute = "ncclDevKernel_Generic_1", "gemm"
    assert names == [
        f"{alone} for ncclAllReduce", compute, f"{alone} for ncclSendRecv", compute, alone, compute, alone,
    ]  # fmt: skip


def test_a_launch_without_a_record_is_given_up_after_a_later_mark(sdk):
    result = run(
        sdk,
        """
source.opened()
captured = source.launch()
source.done(source.mark(1))
before = [library.aorta_kernels_num_lent(), source.take()[1].settled]
time.sleep(1.1)
print(json.dumps([before, [library.aorta_kernels_num_lent(), source.take()[1].settled]]))
""",
    )
    assert result == [[1, 1], [0, 3]]


def test_the_self_test_waits_for_records_that_come_late_and_in_any_order(sdk):
    proved = run(
        sdk,
        """
import threading, torch
from aorta.device.kernel_records import KernelRecords

source.open()
library.aorta_kernels_prepare_marks()
launched = []
def note(token):
    launched.append((token, time.monotonic_ns()))
torch.cuda._sleep = lambda cycles: note(source.launch(b"spin_kernel(long)", stream=0))
torch.cuda.synchronize = lambda device: None
torch.cuda.current_stream = lambda device: type("Stream", (), {"cuda_stream": 0})
records = KernelRecords(library, torch.device("cpu"))
records.start()
put = records.mark
def mark(stream):
    number = put(stream)
    note(source.marked(number, 0))
    return number
records.mark = mark
def deliver():
    while len(launched) < 4:  # the kernel that loads it, the mark, the known kernel, the mark
        time.sleep(0.001)
    time.sleep(0.05)
    for token, ns in reversed(launched):
        source.done(token, ns, ns + 1)
thread = threading.Thread(target=deliver)
thread.start()
records._prove()
thread.join()
print(json.dumps(records.is_on))
""",
    )
    assert proved


def test_all_kernels_of_a_graph_are_marked_as_such(sdk):
    result = run(
        sdk,
        """
source.opened()
graph = source.launch(b"node", GRAPH)
source.done(graph); source.done(graph)
print(json.dumps(source.take()[0]["in_graph"].tolist()))
""",
    )
    assert result == [1, 1]


def test_times_are_put_on_the_hosts_monotonic_clock(sdk):
    result = run(
        sdk,
        """
vendor.play_ahead(5_000_000_000)
source.opened()
now = time.monotonic_ns()
source.run(start=now + 5_000_000_000, end=now + 5_000_000_100)
row = source.take()[0][0]
print(json.dumps([int(row["start"]) - now, int(row["end"] - row["start"])]))
""",
    )
    assert abs(result[0]) < 1_000_000  # what the bracket of the two clocks may be off on a busy machine
    assert result[1] == 100


@pytest.mark.processes
def test_a_program_that_has_a_tool_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setenv("AORTA_CACHE_DIR", str(tmp_path))
    environ: dict[str, str] = {}
    name_tool(environ)
    assert is_tool_named(environ)
    name_tool(environ)  # under a launcher of ours again
    with pytest.raises(KernelRecordsUnavailable, match="names another tool, /opt/tool.so"):
        name_tool({TOOLS: "/opt/tool.so"})
    assert load_library("kernel_records_rocm").aorta_kernels_record_bytes() == 40


def test_kernel_records_are_read_where_hip_registered_their_tool_and_else_not(monkeypatch):
    monkeypatch.delenv(TOOLS, raising=False)
    assert "ask for them with --kernels on" in HipBackend().kernels_unasked
    monkeypatch.setenv(TOOLS, "/cache/native/kernel_records_rocm-0123.so")
    assert HipBackend().kernels_unasked is None


def test_doctor_names_the_version_of_rocprofiler(sdk, monkeypatch):
    monkeypatch.setattr("aorta.device.kernel_records.rocprofiler_path", lambda: str(sdk))
    found = _rocprofiler()
    assert (found.state, found.detail) == ("works", "version 1.0.0; aorta run --kernels on reads it")
    monkeypatch.setattr("aorta.device.kernel_records.rocprofiler_path", lambda: "/no/such.so")
    assert (_rocprofiler().state, _rocprofiler().name) == ("missing", "rocprofiler-sdk")
