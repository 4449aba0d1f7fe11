"""What both sources of kernel records promise, beside stand-ins for the vendors' libraries (stand_ins.py).

Each test runs in a process of its own: a library holds one ring per process.
"""

import gzip
import json

import pytest

from aorta.device.native.build import NativeError
from tests.device.native.stand_ins import FILES, build_stand_in
from tests.dist.launch import run_python
from tests.larger_data import TRACES, needs_data

PREAMBLE = """
import json, sys, time
from tests.device.native.stand_ins import SOURCES, KERNEL, COPY, FILL, GRAPH
source = SOURCES[sys.argv[1]](sys.argv[2])
library, vendor = source.library, source.vendor
"""


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """Path of each vendor's stand-in."""
    folder = tmp_path_factory.mktemp("stand_ins")
    try:
        return {vendor: build_stand_in(vendor, folder) for vendor in FILES}
    except NativeError as error:
        pytest.skip(str(error))


def run(stand_ins, vendor, body, *arguments, **environment):
    # One cache for all: each library is compiled once.
    path = stand_ins[vendor]
    environment = {"AORTA_CACHE_DIR": str(path.parent)} | environment
    done = run_python("-c", f"{PREAMBLE}\n{body}", vendor, path, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


both = pytest.mark.parametrize("vendor", list(FILES))


@both
def test_kernels_copies_graphs_and_marks_are_told_apart(stand_ins, vendor):
    rows, named = run(
        stand_ins,
        vendor,
        """
source.opened()
marked = source.mark(7)
tokens = [source.launch(b"_ZN2at4gemmEi"), source.launch(None, COPY, 8), source.launch(b"node", GRAPH)]
for place, token in enumerate([marked, *tokens]):
    source.done(token, 10**6 + 10 * place, 10**6 + 10 * place + 5)
rows, _ = source.take()
starts, ends = rows["start"], rows["end"]
times = (starts - starts[0]).tolist(), (ends - starts).tolist()
shown = [[int(row[f]) for f in ("what", "stream", "in_graph")] for row in rows]
named = [int(rows[0]["name"]), source.name(rows[1]["name"]), source.name(rows[3]["name"])]
print(json.dumps([[shown, times, rows["correlation"].tolist()], named]))
""",
    )
    shown, times, correlations = rows
    assert shown == [[3, 3, 0], [0, 3, 0], [1, 8, 0], [0, 3, 1]]
    assert times == [[0, 10, 20, 30], [5, 5, 5, 5]]
    assert correlations == sorted(set(correlations))
    assert named == [7, "at::gemm(int)", "node"]


@both
def test_a_fill_of_the_program_is_no_mark(stand_ins, vendor):
    kind = run(
        stand_ins,
        vendor,
        """
source.opened()
source.run(b"fill", what=FILL)
print(json.dumps(int(source.take()[0][0]["what"])))
""",
    )
    assert kind != 3


@both
def test_equal_names_have_one_index(stand_ins, vendor):
    result = run(
        stand_ins,
        vendor,
        """
source.opened()
for name in (b"gemm", b"other", b"gemm"):
    source.run(name)
rows, taken = source.take()
print(json.dumps([rows["name"].tolist(), taken.num_names, source.name(0)]))
""",
    )
    assert result == [[1, 2, 1], 3, ""]


@both
def test_a_full_ring_loses_records_and_says_of_which_time(stand_ins, vendor):
    result = run(
        stand_ins,
        vendor,
        """
source.opened(4)
for i in range(6):
    source.run(start=10**6 + 10 * i + 10, end=10**6 + 10 * i + 15)
rows, taken = source.take()
first = int(rows["start"][0]) - 10
source.run(start=10**6 + 100, end=10**6 + 101)
again, _ = source.take()
lost = [taken.num_lost, taken.lost_start - first, taken.lost_end - first]
print(json.dumps([(rows["start"] - first).tolist(), lost, (again["start"] - first).tolist()]))
""",
    )
    assert result == [[10, 20, 30, 40], [2, 50, 65], [100]]


@both
def test_what_came_is_settled_when_all_before_it_came(stand_ins, vendor):
    seen = run(
        stand_ins,
        vendor,
        """
source.opened()
tokens = [source.launch() for _ in range(3)]
seen = []
for place in (1, 0, 2):
    source.done(tokens[place])
    rows, taken = source.take()
    seen.append([int(rows["buffer"][0]) < taken.settled, bool(library.aorta_kernels_num_lent())])
print(json.dumps(seen))
""",
    )
    assert seen == [[False, True], [True, True], [True, False]]


@both
def test_what_is_not_taken_at_once_settles_nothing(stand_ins, vendor):
    result = run(
        stand_ins,
        vendor,
        """
source.opened()
for _ in range(3):
    source.run()
parts = [source.take(2) for _ in range(2)]
print(json.dumps([[len(rows), taken.settled > 0] for rows, taken in parts]))
""",
    )
    assert result == [[2, False], [1, True]]


@both
def test_records_without_times_are_counted_and_left_out(stand_ins, vendor):
    result = run(
        stand_ins,
        vendor,
        """
source.opened()
for start, end in ((0, 0), (10**6, 10**6 - 1), (10**6, 10**6 + 1)):
    source.run(start=start, end=end)
rows, taken = source.take()
print(json.dumps([len(rows), taken.num_no_time]))
""",
    )
    assert result == [1, 2]


@both
def test_records_that_the_vendor_dropped_are_counted(stand_ins, vendor):
    num_dropped = run(
        stand_ins,
        vendor,
        """
source.opened()
vendor.play_dropped(5)
source.run()
print(json.dumps(source.take()[1].num_dropped))
""",
    )
    assert num_dropped == 5


@both
def test_marks_tell_the_host_how_far_the_device_is(stand_ins, vendor):
    result = run(
        stand_ins,
        vendor,
        """
source.opened()
before = library.aorta_kernels_passed()
source.mark(41)
print(json.dumps([before, library.aorta_kernels_passed()]))
""",
    )
    assert result == [0, 41]


@both
def test_what_is_stopped_records_nothing_until_it_is_started_again(stand_ins, vendor):
    result = run(
        stand_ins,
        vendor,
        """
source.opened()
on = [source.is_recording()]
token = source.launch()
library.aorta_kernels_stop()
on.append(source.is_recording())
source.done(token)  # launched before: still comes
num_left = len(source.take()[0])
source.restart()
print(json.dumps([*on, num_left, source.is_recording()]))
""",
    )
    assert result == [True, False, 1, True]


@both
def test_records_are_given_up_for_a_profiler_and_taken_back(stand_ins, vendor):
    seen = run(
        stand_ins,
        vendor,
        """
import torch
from aorta.device.kernel_records import KernelRecords

class OnStandIn(KernelRecords):
    def synchronize(self):
        pass

source.open()
library.aorta_kernels_prepare_marks()
records = OnStandIn(library, torch.device("cpu"))
records.start()
seen = [source.is_recording()]
number = records.mark(3)
source.done(source.marked(number))
seen += [records.has_passed(number), records.has_every_mark()]
records.yield_buffers()
seen += [source.is_recording(), len(records.take().records) > 0, records.has_every_mark()]
records.start()
seen.append(source.is_recording())
records.stop()
print(json.dumps([*seen, source.is_recording()]))
""",
    )
    assert seen == [True, True, False, False, True, True, True, False]


@both
def test_after_a_forced_flush_nothing_is_waited_for(stand_ins, vendor):
    result = run(
        stand_ins,
        vendor,
        """
source.opened()
source.run()
library.aorta_kernels_flush(1)
print(json.dumps([library.aorta_kernels_num_lent(), len(source.take()[0])]))
""",
    )
    assert result == [0, 1]


@both
def test_a_forked_child_leaves_the_parents_records_alone(stand_ins, vendor):
    num = run(
        stand_ins,
        vendor,
        """
import os
source.opened()
token = source.launch()
if os.fork() == 0:
    source.done(token)
    source.take()
    os._exit(0)
os.wait()
source.done(token)
print(json.dumps(len(source.take()[0])))
""",
    )
    assert num == 1


@both
def test_a_runtime_that_is_not_there_is_named(stand_ins, vendor):
    failed, reason = run(
        stand_ins,
        vendor,
        """
source.runtime = b"/no/such.so"
print(json.dumps([source.open(), source.error()]))
""",
    )
    assert failed == 1
    assert "/no/such.so" in reason


# -- captures that were recorded ----------------------------------------------------------------------


def _rocprofv3(path):
    """Kernels of a rocprofv3 file: name, stream, start, end."""
    tool = json.loads(gzip.decompress(path.read_bytes()))["rocprofiler-sdk-tool"][0]
    names = {symbol["kernel_id"]: symbol["formatted_kernel_name"] for symbol in tool["kernel_symbols"]}
    for record in tool["buffer_records"]["kernel_dispatch"]:
        info = record["dispatch_info"]
        times = record["start_timestamp"], record["end_timestamp"]
        yield names[info["kernel_id"]], info["queue_id"]["handle"], *times


def _kineto(path):
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    for event in events:
        if event.get("cat") == "kernel":
            start = round(event["ts"] * 1000)
            yield event["name"], event["args"]["stream"], start, start + round(event["dur"] * 1000)


def _union_ms(spans):
    """ms that at least one span covers, instant by instant."""
    total, end = 0, -1
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0)
        end = max(end, stop)
    return total / 1e6


CAPTURES = {
    # Of the table of independent sums beside the data.
    "mi350x_fsdp_rocprofv3.json.gz": (_rocprofv3, 43_915, 4158.76, 281.68, 207.33),
    "h200_fsdp4_rank0.json.gz": (_kineto, 860, 74.969, 161.805, 41.756),
}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "capture", [pytest.param(name, marks=needs_data(TRACES / name)) for name in CAPTURES]
)
def test_a_recorded_capture_keeps_its_sums_through_both(stand_ins, capture, tmp_path):
    read, num_kernels, comm_ms, compute_ms, hidden_ms = CAPTURES[capture]
    path = TRACES / capture
    kernels = sorted(read(path), key=lambda kernel: kernel[2])
    first = kernels[0][2] - 1_000_000
    played = tmp_path / "kernels.json"
    played.write_text(json.dumps([(name, stream, a - first, b - first) for name, stream, a, b in kernels]))
    for vendor in FILES:
        rows = run(
            stand_ins,
            vendor,
            """
source.opened(100_000)
kernels = json.load(open(sys.argv[3]))
source.capture([(name.encode(), stream, start, end) for name, stream, start, end in kernels])
rows, taken = source.take(100_000)
assert taken.num_lost == taken.num_no_time == 0 and not library.aorta_kernels_num_lent()
names = [source.name(index) for index in range(taken.num_names)]
json.dump([[names[r["name"]], int(r["start"]), int(r["end"])] for r in rows], open(sys.argv[3] + ".out", "w"))
print(json.dumps(len(rows)))
""",
            played,
        )
        assert rows == num_kernels
        came = json.loads((tmp_path / "kernels.json.out").read_text())
        comm = [(start, end) for name, start, end in came if "nccl" in name.lower()]
        compute = [(start, end) for name, start, end in came if "nccl" not in name.lower()]
        either = _union_ms(comm + compute)
        sums = _union_ms(comm), _union_ms(compute), _union_ms(comm) + _union_ms(compute) - either
        assert sums == pytest.approx((comm_ms, compute_ms, hidden_ms), abs=0.01)
