"""The trace is read back as a reader of the format would, and its intervals compared with the records."""

import gzip
import json
from collections import defaultdict

import msgspec
import numpy as np
import pytest

from aorta.errors import RecordError
from aorta.records.perfetto import COMPUTE, EXPOSED, HIDDEN, IDLE, OVERLAP, states, write_perfetto
from aorta.records.schema import CollectiveRecord, DeviceRecord, KernelSpan, KernelSums, MemoryRecord
from aorta.timeline.intervals import clip, intervals, length_ms, subtract, union
from aorta.timeline.overlap import unions
from aorta.timeline.types import COPY, Kind, Segment, Span, Timeline
from tests.records.run_folders import step_record, step_timeline

MS = 10**6


def read(path):
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def write(tmp_path, items, **options):
    path = tmp_path / "run.perfetto.json.gz"
    assert write_perfetto(path, "run", items, **options) == len(read(path)["traceEvents"])
    return read(path)


def slices(trace, rank=None, **fields):
    return [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X"
        and (rank is None or event["pid"] == 1000 * (rank + 1))
        and all(event[key] == value for key, value in fields.items())
    ]


def names(trace, kind):
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == kind
    }


def unix_ms(trace, events, *, offset_ns=0):
    """Intervals in ms after offset_ns on the Unix clock."""
    origin_ms = (trace["otherData"]["origin_unix_ns"] - offset_ns) / MS
    return intervals(
        (origin_ms + event["ts"] / 1000, origin_ms + (event["ts"] + event["dur"]) / 1000) for event in events
    )


def collective(start_ms, end_ms, op="all_gather", stream="group", seq=0, **changes):
    fields = dict(group="default", ranks=[0, 1], bytes=4096, dtype="bfloat16", algbw_gb_s=2.0, busbw_gb_s=1.0)
    return CollectiveRecord(
        op=op, stream=stream, seq=seq, start_ms=start_ms, end_ms=end_ms, **(fields | changes)
    )


def random_records(seed, num_steps=6, world_size=3):
    """Steps that follow one another, with communication and copies at random."""
    rng = np.random.default_rng(seed)
    kinds = [(Kind.COMPUTE, ""), (Kind.COMM, "all_gather"), (Kind.COMM, "all_reduce"), (Kind.COPY, "")]
    for rank in range(world_size):
        origin_ns = 1_795_182_737_847_137_160 + int(rng.integers(0, 10**6))
        for step in range(num_steps):
            spans = []
            for _ in range(40):
                kind, op = kinds[rng.integers(len(kinds))]
                start = float(rng.uniform(-1, 50))
                spans.append(Span(start, start + float(rng.exponential(1.5)), kind, op, f"s{kind}"))
            window_ms = float(rng.uniform(40, 60))
            timeline = Timeline.from_spans(
                spans, (0.0, window_ms), rank=rank, step=step, source="kineto", origin_unix_ns=origin_ns
            )
            yield step_record(timeline.clipped(0.0, window_ms), world_size)
            origin_ns += round(window_ms * MS)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(3))
def test_intervals_of_the_file_are_those_of_the_records(tmp_path, seed):
    records = list(random_records(seed))
    trace = write(tmp_path, records)
    for record in records:
        named = unions(record.active_segments)
        comm = union(np.concatenate([rows for name, rows in named.items() if name not in ("compute", COPY)]))
        expected = {(COMPUTE, HIDDEN): named["compute"], (EXPOSED, HIDDEN): comm}
        for wanted, intervals_ms in expected.items():
            found = unix_ms(
                trace,
                [e for e in slices(trace, record.rank, cat=OVERLAP) if e["name"] in wanted],
                offset_ns=record.start_unix_ns,
            )
            found = union(clip(found, 0.0, record.step_ms))
            apart = length_ms(subtract(found, intervals_ms)) + length_ms(subtract(intervals_ms, found))
            assert apart < 1e-3 * max(1, len(intervals_ms) / 10)
            assert length_ms(found) == pytest.approx(length_ms(intervals_ms), abs=1e-3)


def test_slices_of_a_track_are_in_order_and_do_not_overlap(tmp_path):
    records = [
        step_record(line, collectives=[collective(3, 9), collective(1, 5), collective(4, 6, seq=1)])
        for line in (step_timeline(step=step, rank=rank) for step in range(3) for rank in range(2))
    ]
    trace = write(tmp_path, records)
    tracks = defaultdict(list)
    for event in slices(trace):
        assert event["dur"] > 0
        assert event["ts"] >= 0
        tracks[event["pid"], event["tid"]].append(event)
    assert set(tracks) <= set(names(trace, "thread_name"))
    for events in tracks.values():
        for before, after in zip(events, events[1:], strict=False):
            assert after["ts"] >= before["ts"] + before["dur"] - 1e-6
    assert len(slices(trace, cat="collectives: group")) == 18


def test_collectives_that_run_at_once_are_beside_each_other(tmp_path):
    record = step_record(step_timeline(), collectives=[collective(0, 4), collective(2, 6), collective(5, 7)])
    trace = write(tmp_path, [record])
    tracks = [names(trace, "thread_name")[e["pid"], e["tid"]] for e in slices(trace, name="all_gather")]
    assert tracks == ["collectives: group", "collectives: group (2)", "collectives: group"]


def test_a_collective_keeps_its_unclipped_times_and_its_numbers(tmp_path):
    row = collective(-0.5, 11.25, op="reduce_scatter", seq=7, group="3")
    trace = write(tmp_path, [step_record(step_timeline(), collectives=[row])])
    (event,) = slices(trace, name="reduce_scatter")
    assert unix_ms(trace, [event], offset_ns=10**12).tolist() == [[-0.5, 11.25]]
    assert event["args"] == {
        "op": "reduce_scatter",
        "bytes": 4096,
        "dtype": "bfloat16",
        "group": "3",
        "num_ranks": 2,
        "seq": 7,
        "async": False,
        "busbw_gb_s": 1.0,
        "algbw_gb_s": 2.0,
        "global_step": 0,
    }


def test_an_offset_moves_everything_of_its_rank(tmp_path):
    records = [step_record(step_timeline(rank=rank)) for rank in range(2)]
    plain, moved = (write(tmp_path, records, **o) for o in ({}, {"offset_ns": {1: -2_500_000}}))
    for rank, shift_us in ((0, 0), (1, -2500)):
        before, after = ([e["ts"] for e in slices(trace, rank)] for trace in (plain, moved))
        assert [ts + shift_us for ts in before] == pytest.approx(after, abs=1e-6)


def test_a_process_per_rank_with_its_name(tmp_path):
    trace = write(tmp_path, [step_record(step_timeline(rank=rank)) for rank in range(2)])
    assert names(trace, "process_name") == {(1000, 1000): "rank 0 (run)", (2000, 2000): "rank 1 (run)"}


@pytest.mark.parametrize("first", ["record", "no-window"])
def test_the_steps_are_the_main_thread_of_their_process_and_no_other_track_is(tmp_path, first):
    """Also where another track was there before them; the others are in the order of their first slices."""
    records = [
        step_record(step_timeline(step=step, rank=rank), collectives=[collective(1, 5), collective(2, 6)])
        for rank in range(3)
        for step in range(2)
    ]
    if first == "no-window":
        records[::2] = [msgspec.structs.replace(record, step_ms=None) for record in records[::2]]
    trace = write(tmp_path, records)
    tracks = names(trace, "thread_name")
    order = {
        (e["pid"], e["tid"]): e["args"]["sort_index"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_sort_index"
    }
    for rank in range(3):
        pid = 1000 * (rank + 1)
        own = [place for place in order if place[0] == pid]
        assert [tracks[place] for place in own if place[1] == pid] == ["steps"]
        assert [tracks[place] for place in sorted(own, key=order.__getitem__)] == [
            "steps",
            "overlap",
            "collectives: group",
            "collectives: group (2)",
        ]


def test_counters_have_the_time_of_their_sample_and_come_once(tmp_path):
    origin_ns = 10**12
    device = DeviceRecord(sample_unix_ns=origin_ns + 3 * MS, power_w=512.5)
    memory = MemoryRecord(allocated_bytes=5, reserved_bytes=6, peak_allocated_bytes=7)
    records = [step_record(step_timeline(step=i), device=device, memory=memory) for i in range(2)]
    trace = write(tmp_path, records)
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    power = [event for event in counters if event["name"] == "power, W"]
    assert [event["args"]["value"] for event in power] == [512.5]
    assert power[0]["ts"] == slices(trace, cat="steps")[0]["ts"] + 3000
    assert [e["name"] for e in counters].count("memory allocated, bytes") == 2
    assert not any("clock" in event["name"] for event in counters)


def test_a_step_without_details_keeps_its_slice(tmp_path):
    record = step_record(step_timeline(), active_segments=None, collectives=None)
    assert [event["cat"] for event in slices(write(tmp_path, [record]))] == ["steps"]


def test_kernels_of_a_line_have_their_names_on_their_streams(tmp_path):
    spans = [KernelSpan(0.0, 4.0, 7, 1), KernelSpan(1.0, 2.0, 20, 2), KernelSpan(5.0, 1.0, 7, 9)]
    sums = KernelSums(num_kernels=3, classes={}, top=[], spans=spans)
    record = step_record(step_timeline(source="kernels"), kernels=sums)
    trace = write(tmp_path, [record], kernel_names={0: ["", "gemm", "ncclDevKernel_AllGather"]})
    assert [(e["name"], e["dur"]) for e in slices(trace, cat="stream 7")] == [
        ("gemm", 4000),
        ("kernel", 1000),
    ]
    assert [(e["name"], e["dur"]) for e in slices(trace, cat="stream 20")] == [
        ("ncclDevKernel_AllGather", 2000)
    ]


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        pytest.param([], [(0, 10, IDLE)], id="nothing-active"),
        pytest.param([(0, 10, ["copy"])], [(0, 10, IDLE)], id="copies-alone-are-idle"),
        pytest.param([(0, 4, ["compute"]), (4, 10, ["compute", "copy"])], [(0, 10, COMPUTE)], id="joined"),
        pytest.param(
            [(1, 4, ["aux"]), (4, 6, ["allreduce", "compute"])],
            [(0, 1, IDLE), (1, 4, EXPOSED), (4, 6, HIDDEN), (6, 10, IDLE)],
            id="all-four-but-compute",
        ),
        pytest.param([(-2, 12, ["compute"])], [(0, 10, COMPUTE)], id="clipped"),
    ],
)
def test_states_cut_the_window_without_gaps(segments, expected):
    rows = [Segment(start, end, active, len(active)) for start, end, active in segments]
    assert list(states(rows, 0, 10)) == expected


def test_an_empty_run_is_a_valid_trace(tmp_path):
    assert write(tmp_path, [])["traceEvents"] == []


def test_records_are_taken_one_at_a_time(tmp_path):
    """A generator that fails midway leaves the file that was there and no other."""

    def failing():
        yield step_record(step_timeline())
        raise RuntimeError

    path = tmp_path / "a.perfetto.json.gz"
    path.write_bytes(b"before")
    with pytest.raises(RuntimeError):
        write_perfetto(path, "a", failing())
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"before"


def test_a_place_where_nothing_can_be_written_is_one_line(tmp_path):
    with pytest.raises(RecordError, match="cannot write .*No such file or directory"):
        write_perfetto(tmp_path / "absent" / "a.json.gz", "a", [])
