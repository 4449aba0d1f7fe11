"""The profiler plugin of NCCL and RCCL beside a stand-in for NCCL built from collective_library.c.

Each test runs in a process of its own: the plugin has one memory per process.
"""

import json
import subprocess
from pathlib import Path

import pytest

from aorta.device.collective_events import LibraryEventsUnavailable, configure
from aorta.device.native.build import NativeError, find_compiler, library_path
from tests.dist.launch import run_python

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def nccl(tmp_path_factory):
    """Path of the stand-in."""
    try:
        command = find_compiler()
    except NativeError as error:
        pytest.skip(str(error))
    path = tmp_path_factory.mktemp("nccl") / "libnccl.so"
    source = HERE / "collective_library.c"
    subprocess.run([*command, "-shared", "-fPIC", str(source), "-o", str(path), "-ldl"], check=True)
    return path


PREAMBLE = """
import ctypes, json, os, sys, time
import numpy as np
from aorta.device.collective_events import VARIABLE, open_events
from aorta.steps.raw import EVENT_DTYPE

events = open_events()
nccl = ctypes.CDLL(sys.argv[1])
for name in ("group", "collective", "send", "channel_start"):
    getattr(nccl, "play_" + name).restype = ctypes.c_void_p
P, U, S, I = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_int
nccl.play_communicator.argtypes = (I, U, I)
nccl.play_collective.argtypes = (I, P, U, S, U, U, S, S, I)
nccl.play_send.argtypes = (I, P, U, U, I, I)
nccl.play_channel_start.argtypes = (I, P, I, U)
nccl.play_channel_stop.argtypes = (P, U)
nccl.play_stop.argtypes = (P,)
version = int(sys.argv[2])

def load():
    assert nccl.play_load(os.environ[VARIABLE].encode(), version) == 0

def all_reduce(group, sequence=0, channels=2, communicator=0, hash=7):
    return nccl.play_collective(
        communicator, group, hash, b"AllReduce", sequence, 1000, b"RING", b"LL128", channels)

def run(task, *times, communicator=0):
    channels = [nccl.play_channel_start(communicator, task, i, start) for i, (start, _) in enumerate(times)]
    for channel, (_, end) in zip(channels, times):
        nccl.play_channel_stop(channel, end)

def take(given_up_ns=0):
    return np.frombuffer(events.take(given_up_ns), EVENT_DTYPE)

def text(index):
    return events.names(int(index), int(index) + 1)[0]
"""


def run(nccl, version, body):
    # One cache for all: the library is compiled once.
    done = run_python("-c", f"{PREAMBLE}\n{body}", nccl, version, AORTA_CACHE_DIR=str(nccl.parent))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_a_collective_is_told_as_the_library_has_it(nccl, version):
    result = run(
        nccl,
        version,
        """
load()
nccl.play_communicator(0, 7, 8)
events.record(True)
low = time.monotonic_ns()
group = nccl.play_group(0)
task = all_reduce(group, sequence=3)
nccl.play_stop(task), nccl.play_stop(group)
run(task, (1000, 5000), (900, 4900))
high = time.monotonic_ns()
(row,) = take()
names = [text(row[n]) for n in ("func", "datatype", "algorithm", "protocol")]
numbers = [int(row[n]) for n in ("communicator", "num_ranks", "sequence", "count", "num_channels", "peer")]
times = [int(row["timed_by"]), int(row["start"]), int(row["end"])]
seen = [int(row["launched_ns"]), int(row["start_seen_ns"]), int(row["end_seen_ns"])]
order = [low, *seen, high]
shown = {"names": names, "numbers": numbers, "times": times, "in_order": sorted(order) == order}
print(json.dumps(shown | {"bracket": [low, high]}))
""",
    )
    assert result["names"] == ["AllReduce", "ncclBfloat16", "RING", "LL128"]
    assert result["numbers"] == [7, 8 if version > 3 else 0, 3, 1000, 2, -1]
    by, start, end = result["times"]
    if version == 2:
        assert (by, start, end) == (0, 0, 0)
        return
    assert result["in_order"]
    if version == 3:
        assert by == 1
        assert result["bracket"][0] <= start <= end <= result["bracket"][1]
    else:
        assert (by, start, end) == (2, 900, 5000)


@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_nothing_is_recorded_unless_asked_for(nccl, version):
    result = run(
        nccl,
        version,
        """
load()
nccl.play_communicator(0, 7, 8)
masks = [nccl.play_mask()]
for wanted in (True, False):
    events.record(wanted)
    masks.append(nccl.play_mask())
print(json.dumps(masks))
""",
    )
    assert result == [0, 7 if version == 2 else 71, 0]


def test_a_wish_before_the_first_communicator_holds_for_it(nccl):
    result = run(
        nccl, 5, "events.record(True); load(); nccl.play_communicator(0, 7, 8); print(nccl.play_mask())"
    )
    assert result == 71


@pytest.mark.parametrize("version", [4, 5])
def test_sends_of_one_kernel_have_one_plan(nccl, version):
    result = run(
        nccl,
        version,
        """
load()
nccl.play_communicator(0, 7, 8)
events.record(True)
for peers in ((1, 2), (3,)):
    group = nccl.play_group(0)
    for peer in peers:
        run(nccl.play_send(0, group, 7, 64, peer, 1), (10 * peer, 10 * peer + 5))
rows = take()
print(json.dumps([[int(r["peer"]), int(r["plan"]), text(r["func"]), int(r["start"])] for r in rows]))
""",
    )
    assert result == [[1, 1, "Send", 10], [2, 1, "Send", 20], [3, 2, "Send", 30]]


@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_what_follows_a_send_to_the_own_rank_on_its_communicator_is_marked(nccl, version):
    result = run(
        nccl,
        version,
        """
load()
nccl.play_communicator(0, 7, 8), nccl.play_communicator(1, 9, 8)
events.record(True)
all_reduce(nccl.play_group(0))
group = nccl.play_group(0)
nccl.play_send(0, group, 7, 64, 0, 1), nccl.play_send(0, group, 7, 64, 1, 1)  # rank 0 to itself, and to 1
all_reduce(nccl.play_group(0))
all_reduce(nccl.play_group(1), communicator=1, hash=9)
print(json.dumps(take(time.monotonic_ns())["flags"].tolist()))
""",
    )
    assert result == [0, 3, 2, 2, 0]


def test_how_far_the_channels_of_an_event_disagree_is_told(nccl):
    result = run(
        nccl,
        5,
        """
load()
nccl.play_communicator(0, 7, 8)
events.record(True)
run(all_reduce(nccl.play_group(0), channels=3), (100, 200), (90, 210), (20, 30))
(row,) = take()
print(json.dumps([int(row[n]) for n in ("start", "last_start", "first_end", "end")]))
""",
    )
    assert result == [20, 100, 30, 210]


def test_what_has_not_ended_waits_and_is_not_called_complete(nccl):
    result = run(
        nccl,
        5,
        """
load()
nccl.play_communicator(0, 7, 8)
events.record(True)
first, second = (all_reduce(nccl.play_group(0), i, channels=1) for i in range(2))
run(second, (30, 40))
between = take()["sequence"].tolist(), events.complete_ns < time.monotonic_ns()
waits = events.complete_ns
run(first, (10, 20))
after = take()
same = waits == int(after["launched_ns"][0])
print(json.dumps([between[0], after["sequence"].tolist(), same, events.complete_ns > waits]))
""",
    )
    assert result == [[1], [0], True, True]


def test_an_event_that_lacks_an_end_comes_once_later_kernels_of_its_communicator_have_ended(nccl):
    result = run(
        nccl,
        5,
        """
load()
nccl.play_communicator(0, 7, 8)
events.record(True)
hanging = all_reduce(nccl.play_group(0), 0, channels=2)
run(hanging, (10, 20))
taken = []
for i in (1, 2, 3):
    run(all_reduce(nccl.play_group(0), i, channels=1), (30, 40))
    taken.append(take()["sequence"].tolist())
print(json.dumps(taken))
""",
    )
    assert result == [[1], [0, 2], [3]]


def test_what_is_given_up_comes_as_far_as_it_got(nccl):
    result = run(
        nccl,
        5,
        """
load()
nccl.play_communicator(0, 7, 8)
events.record(True)
task = all_reduce(nccl.play_group(0), channels=2)
nothing = len(take())
(row,) = take(time.monotonic_ns())
run(task, (10, 20), (10, 20))  # too late: the handle is stale
print(json.dumps([nothing, int(row["num_stopped"]), len(take())]))
""",
    )
    assert result == [0, 0, 0]


def test_a_full_ring_loses_events_and_counts_them(nccl):
    result = run(
        nccl,
        5,
        """
load()
nccl.play_communicator(0, 7, 8)
events.record(True)
lost = sum(all_reduce(nccl.play_group(0), i) is None for i in range((1 << 15) + 5))
num = 0
while part := events.take(time.monotonic_ns()):
    num += len(part) // EVENT_DTYPE.itemsize
    counted = events.num_lost
run(all_reduce(nccl.play_group(0), 99, channels=1), (1, 2))
print(json.dumps([lost, num, counted, take()["sequence"].tolist()]))
""",
    )
    assert result == [5, 1 << 15, 5, [99]]


def test_handles_of_anybody_do_no_harm(nccl):
    result = run(
        nccl,
        5,
        """
load()
nccl.play_communicator(0, 7, 8)
events.record(True)
for handle in (0, 1, 2, 3, 0x7FFFDEADBEE3, 2**64 - 1):
    nccl.play_stop(handle)
    nccl.play_channel_stop(handle, 5)
    nccl.play_channel_start(0, handle, 0, 5)
print(json.dumps(len(take(time.monotonic_ns()))))
""",
    )
    assert result == 0


def test_threads_launch_while_another_reads(nccl):
    result = run(
        nccl,
        5,
        """
import threading
load()
for i in range(4):
    nccl.play_communicator(i, i, 8)
events.record(True)
def launch(i):
    for n in range(2000):
        task = all_reduce(nccl.play_group(i), n, channels=2, communicator=i, hash=i)
        run(task, (n + 1, n + 3), (n + 2, n + 4), communicator=i)
threads = [threading.Thread(target=launch, args=(i,)) for i in range(4)]
for t in threads: t.start()
parts = []
while any(t.is_alive() for t in threads):
    parts.append(take())
for t in threads: t.join()
while len(part := take()):
    parts.append(part)
rows = np.concatenate(parts)
right = (rows["start"] == rows["sequence"] + 1) & (rows["end"] == rows["sequence"] + 4)
print(json.dumps([len(rows), len(np.unique(rows["number"])), bool(right.all())]))
""",
    )
    assert result == [8000, 8000, True]


def test_communicators_and_interface_are_told(nccl):
    result = run(
        nccl,
        4,
        """
take(); before = events.version
load()
nccl.play_communicator(0, 7, 8), nccl.play_communicator(1, 9, 2)
take()
print(json.dumps([before, events.version, events.num_communicators]))
""",
    )
    assert result == [0, 4, 2]


@pytest.mark.processes
def test_another_profiler_keeps_its_place(monkeypatch):
    environ = {"NCCL_PROFILER_PLUGIN": "/opt/inspector.so"}
    with pytest.raises(LibraryEventsUnavailable, match="names another profiler, /opt/inspector.so"):
        configure(environ)
    assert environ == {"NCCL_PROFILER_PLUGIN": "/opt/inspector.so"}


@pytest.mark.processes
def test_another_profiler_in_a_file_of_nccl_keeps_its_place(tmp_path):
    path = tmp_path / "nccl.conf"
    path.write_text("NCCL_PROFILER_PLUGIN=/opt/inspector.so\n")
    environ = {"NCCL_CONF_FILE": str(path)}
    with pytest.raises(LibraryEventsUnavailable, match=r"nccl\.conf names another profiler"):
        configure(environ)
    assert "NCCL_PROFILER_PLUGIN" not in environ


@pytest.mark.processes
def test_the_name_in_the_environment_is_that_of_the_cached_library():
    environ = {}
    path = configure(environ)
    assert environ == {"NCCL_PROFILER_PLUGIN": str(path)}
    assert path == library_path("collective_events")
    assert configure(environ) == path  # named by the parent before


def test_without_a_cache_there_is_a_reason(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("AORTA_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(LibraryEventsUnavailable, match="cannot be written"):
        configure({})
