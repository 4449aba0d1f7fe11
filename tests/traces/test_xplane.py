"""XPlane files written here by the wire format of protocol buffers."""

import gzip

import pytest

from aorta.account.load.open import load_run
from aorta.errors import ReplayError, TraceError
from aorta.timeline.overlap import total
from aorta.traces.jax_profiler import parse_xplane
from aorta.traces.sources import open_source
from aorta.why.replay.load import steps_of

BASE_NS = 1_790_000_000_123_456_789
EVENTS = {1: "gemm_fusion", 2: "ncclDevKernel_AllReduce", 3: "cuLaunchKernel", 4: "train"}
STATS = {1: "correlation_id", 2: "step_num"}


def varint(value):
    value &= (1 << 64) - 1
    rows = bytearray()
    while value > 0x7F:
        rows.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*rows, value])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def table(number, names):
    entries = (field(1, i) + field(2, field(1, i) + field(2, name)) for i, name in names.items())
    return b"".join(field(number, entry) for entry in entries)


def event(kind, start_ns, length_ns, **stats):
    data = field(1, kind) + field(2, start_ns * 1000) + field(3, length_ns * 1000)
    numbers = {name: i for i, name in STATS.items()}
    return data + b"".join(field(4, field(1, numbers[name]) + field(4, v)) for name, v in stats.items())


def line(name, *events):
    return field(3, field(2, name) + field(3, BASE_NS) + b"".join(field(4, e) for e in events))


def plane(name, *lines):
    return field(1, field(2, name) + b"".join(lines) + table(4, EVENTS) + table(5, STATS))


def capture():
    """One step of 100 µs: 40 µs of a GEMM from 10 µs on, 30 µs of all-reduce from 30 µs on."""
    gpu = plane(
        "/device:GPU:0",
        line("Stream #13(Compute)", event(1, 10_000, 40_000, correlation_id=1)),
        line("Stream #20(NCCL)", event(2, 30_000, 30_000, correlation_id=2)),
    )
    launches = [event(3, 1_000 * i, 500, correlation_id=i) for i in (1, 2)]
    return gpu + plane("/host:CPU", line("python", event(4, 0, 100_000, step_num=7), *launches))


def test_numbers_to_the_nanosecond():
    trace = parse_xplane(capture(), "vm.xplane.pb")
    sums = total(trace.timeline)
    assert (sums.comm_ms, sums.compute_ms, sums.hidden_ms) == pytest.approx((0.030, 0.040, 0.020))
    assert trace.timeline.origin_unix_ns == BASE_NS + 10_000
    assert [step.step for step in trace.steps] == [7]
    assert trace.collectives[0].op == "all_reduce"


def test_of_the_two_formats_of_a_capture_one_is_read(tmp_path):
    (tmp_path / "vm.xplane.pb").write_bytes(capture())
    (tmp_path / "vm.trace.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    source = open_source(tmp_path)
    assert [file.format for file in source.files.values()] == ["xplane"]
    assert total(source.read(0).timeline).num_kernels == 2


def test_what_has_no_gpu_says_what_it_has():
    with pytest.raises(TraceError, match=r"its planes are /host:CPU; TPUs and CPUs are not read"):
        parse_xplane(plane("/host:CPU", line("python", event(4, 0, 5))), "vm.xplane.pb")


def test_damage_is_one_line():
    whole = capture()
    refusals = []
    for cut in range(1, len(whole), 7):
        for damaged in (whole[:cut], whole[:cut] + b"\xff" * 12 + whole[cut:]):
            try:
                parse_xplane(damaged, "vm.xplane.pb")
            except TraceError as error:
                refusals.append(str(error))
    assert len(refusals) > 20
    assert not any("\n" in text for text in refusals)


def test_a_capture_is_a_run_that_is_not_replayed(tmp_path):
    path = tmp_path / "vm.xplane.pb"
    path.write_bytes(capture())
    run = load_run(path, "x")
    assert run.global_step.tolist() == [7]
    assert run.metrics["comm_ms"][0, 0] == pytest.approx(0.030)
    with pytest.raises(ReplayError, match="vm.xplane.pb is xplane: a replay needs Kineto traces with host"):
        steps_of(path)
