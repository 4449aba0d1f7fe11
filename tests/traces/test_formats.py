"""Every format of the one capture of makers.py gives the same numbers, worked out by hand there."""

import json
import sqlite3

import pytest

from aorta.errors import TraceError
from aorta.timeline.overlap import total
from aorta.timeline.types import Kind
from aorta.traces.classify import COMM_RULES, CommRule, load_rules
from aorta.traces.host_calls import CollectiveCalls, HostCall
from aorta.traces.nsys import nsys_processes, read_nsys
from aorta.traces.rocpd import read_rocpd, rocpd_processes
from aorta.traces.rocprof import parse_rocprofv3_json, read_rocprofv3_csv
from aorta.traces.sources import open_source
from tests.traces.trace_writers import (
    KERNELS,
    NSYS_EPOCH_NS,
    PID,
    WRITERS,
    ns,
    rocprofv3_json,
    write_csv_set,
    write_nsys,
    write_rocpd,
    write_rocpd_normalised,
    write_rpd,
)


@pytest.mark.parametrize("name", WRITERS)
def test_the_same_capture_in_every_format(tmp_path, name):
    file, write = WRITERS[name]
    write(tmp_path / file)
    trace = open_source(tmp_path).read(0)
    sums = total(trace.timeline)
    assert (sums.num_kernels, sums.num_collectives) == (5, 1)
    assert [sums.span_ms, sums.comm_ms, sums.compute_ms] == pytest.approx([0.160, 0.040, 0.075])
    assert [sums.hidden_ms, sums.exposed_ms] == pytest.approx([0.010, 0.030])
    assert [step.step for step in trace.steps] == [1, 2]
    assert [len(step) for step in trace.steps] == [2, 3]
    assert trace.steps[0].window_ms == pytest.approx((-0.030, 0.070))
    assert trace.steps[1].window_ms == pytest.approx((0.070, 0.170))
    (c,) = trace.collectives
    assert (c.op, c.step, c.stream) == ("all_reduce", 1, "2")
    assert c.bytes == (None if name in ("rocprofv3-csv", "nsys") else 4096)
    q = trace.quality
    assert (q.num_unlinked, q.num_launches_without_kernel) == (1, 1)
    assert (q.num_copy_kernels, q.truncated_steps) == (1, (2,))
    assert trace.timeline.origin_unix_ns == ns(30) + (NSYS_EPOCH_NS if name == "nsys" else 0)
    assert trace.device == (None if name == "rocprofv3-csv" else "a device")


def test_the_tool_may_be_an_object_or_a_list():
    one, two = (parse_rocprofv3_json(rocprofv3_json(as_list), "t.json") for as_list in (True, False))
    assert total(one.timeline) == total(two.timeline)


def test_without_host_calls_there_are_no_steps_and_it_is_said():
    trace = parse_rocprofv3_json(rocprofv3_json(hip_api=[], rccl_api=[]), "t.json")
    assert trace.steps == []
    assert any("--hip-trace" in note for note in trace.quality.notes)
    assert [c.op for c in trace.collectives] == ["unknown"]


def test_missing_dispatches_and_missing_times_are_counted():
    kernels = json.loads(rocprofv3_json(as_list=False))["rocprofiler-sdk-tool"]["buffer_records"][
        "kernel_dispatch"
    ]
    kernels[4]["dispatch_info"]["dispatch_id"] = 9
    kernels[3]["end_timestamp"] = 0
    quality = parse_rocprofv3_json(rocprofv3_json(kernel_dispatch=kernels), "t.json").quality
    assert (quality.num_missing_dispatches, quality.num_without_time) == (4, 1)


def call(name, start, end, **arguments):
    return HostCall(name, start, end, 1, {key: str(value) for key, value in arguments.items()})


def test_the_kernel_of_a_group_is_launched_at_its_end():
    calls = CollectiveCalls(
        [
            call("ncclGroupStart", 0, 1),
            call("ncclAllReduce", 2, 3, count=10, datatype=7),
            call("ncclAllReduce", 4, 5, count=5, datatype="ncclFloat"),
            call("ncclGroupEnd", 6, 9),
        ]
    )
    assert calls.call_at(1, 2) is None
    assert calls.call_at(1, 7).op == "all_reduce"
    assert calls.call_at(1, 7).bytes == 60
    assert calls.call_at(2, 7) is None


def test_sends_and_receives_of_a_group_are_one_operation():
    calls = CollectiveCalls(
        [
            call("ncclGroupStart", 0, 1),
            call("ncclGroupStart", 0, 1),
            call("ncclSend", 2, 3, count=10, datatype=0),
            call("ncclRecv", 4, 5, count=10, datatype=0),
            call("ncclGroupEnd", 6, 7),
            call("ncclGroupEnd", 8, 9),
        ]
    )
    assert calls.call_at(1, 6) is None
    assert calls.call_at(1, 8).op == "send_recv"


def test_one_ranks_share_counts_for_the_whole_group():
    init = call("ncclCommInitRank", 0, 1, nranks=8, rank=3)
    calls = CollectiveCalls([init, call("ncclAllGather", 2, 3, sendcount=10, datatype=9)])
    assert (calls.rank, calls.num_ranks) == (3, 8)
    assert calls.call_at(1, 2).bytes == 10 * 2 * 8
    lone = CollectiveCalls([call("ncclAllGather", 2, 3, sendcount=10, datatype=9)])
    assert lone.call_at(1, 2).bytes is None


def test_csv_of_an_older_version(tmp_path):
    trace = read_rocprofv3_csv(write_csv_set(tmp_path, newer=False))
    assert total(trace.timeline).comm_ms == pytest.approx(0.040)
    assert set(trace.timeline.streams) == {"queue 1", "queue 2", "copies"}


@pytest.mark.parametrize("normalised", [False, True])
def test_rocpd_tables_are_read_where_there_are_no_views(tmp_path, normalised):
    path = tmp_path / "x.db"
    write_rocpd(path, normalised=normalised, views=False)
    trace = read_rocpd(path)
    assert total(trace.timeline).compute_ms == pytest.approx(0.075)
    assert total(trace.timeline).num_collectives == 1
    assert any("no view regions" in note for note in trace.quality.notes)


@pytest.mark.parametrize("normalised", [False, True])
def test_kernels_that_the_rocpd_view_leaves_out_are_read(tmp_path, normalised):
    path = tmp_path / "x.db"
    write_rocpd(path, normalised=normalised, without_region=(2, 5))
    trace = read_rocpd(path)
    assert total(trace.timeline).num_kernels == 5
    assert any("has 3 rows for 5 kernels" in note for note in trace.quality.notes)
    assert len(trace.steps) == 2


def test_rocm_profile_data_is_read_through_its_own_tables(tmp_path):
    path = tmp_path / "x.rpd"
    write_rpd(path)
    assert rocpd_processes(path) == [PID]
    trace = open_source(path).read(0)
    result = total(trace.timeline)
    assert (result.num_kernels, result.num_collectives) == (2, 1)
    # gemm 1 to 3 ms, the collective 2 to 5 ms, the copy 5 to 6 ms
    assert (result.compute_ms, result.comm_ms, result.hidden_ms, result.span_ms) == (2.0, 3.0, 1.0, 5.0)
    assert len(trace.steps) == 1


@pytest.mark.parametrize(
    ("name", "header", "said"),
    [
        ("run_kernel_stats.csv", "Name,Calls,TotalDurationNs,AverageNs,Percentage", "sums by name, and no"),
        ("run_agent_info.csv", "Node_Id,Logical_Node_Id,Agent_Type", "no kernel ran under rocprofv3 there"),
    ],
)
def test_what_rocprofv3_wrote_without_times_is_said(tmp_path, name, header, said):
    (tmp_path / name).write_text(header + "\n")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(TraceError, match=said):
            open_source(path)


def test_a_rocpd_without_times_says_what_it_has(tmp_path):
    path = tmp_path / "x.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE rocpd_kernel_dispatch (id, kernel_id, begin)")
    with pytest.raises(
        TraceError, match="neither start and end nor start_id and end_id; it has id, kernel_id"
    ):
        read_rocpd(path)


@pytest.mark.heavy
def test_a_rocpd_view_that_never_ends(tmp_path):
    path = tmp_path / "x.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE rocpd_string (id)")
        db.execute(
            "CREATE VIEW kernels AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
            ' SELECT i AS start, i AS "end", i AS name FROM n WHERE i < 0'
        )
    with pytest.raises(TraceError):
        read_rocpd(path)


def test_each_process_of_an_nsys_report_is_a_rank(tmp_path):
    path = tmp_path / "x.sqlite"
    write_nsys(path, pids=(300, 200))
    assert nsys_processes(path) == [300, 200]  # by device
    with pytest.raises(TraceError, match="holds 2 processes"):
        read_nsys(path)
    source = open_source(path)
    assert source.ranks == [0, 1]
    assert source.files[0].process == 300
    assert total(source.read(1).timeline).num_kernels == 5
    assert [step.step for step in source.read(1).steps] == [1, 2]


@pytest.mark.parametrize(
    ("leave_out", "note"),
    [
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "no runtime calls"),
        ("TARGET_INFO_SESSION_START_TIME", "lacks the session's start"),
        ("NVTX_EVENTS", None),
        ("CUPTI_ACTIVITY_KIND_MEMCPY", None),
    ],
)
def test_an_nsys_report_without_a_table(tmp_path, leave_out, note):
    path = tmp_path / "x.sqlite"
    write_nsys(path, leave_out=[leave_out])
    trace = read_nsys(path)
    assert total(trace.timeline).num_kernels == 5
    assert note is None or any(note in text for text in trace.quality.notes)


def test_an_nsys_report_without_kernels_is_one_clear_line(tmp_path):
    path = tmp_path / "x.sqlite"
    write_nsys(path, leave_out=["CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY"])
    with pytest.raises(TraceError, match="--trace=cuda"):
        read_nsys(path)


def test_what_nsys_says_was_lost(tmp_path):
    path = tmp_path / "x.sqlite"
    write_nsys(path)
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO DIAGNOSTIC_EVENT VALUES (0, 2, 'CUDA events were dropped')")
    assert "nsys says: CUDA events were dropped" in read_nsys(path).quality.notes


def test_rocpd_of_several_processes(tmp_path):
    path = tmp_path / "x.db"
    write_rocpd_normalised(path)
    with sqlite3.connect(path) as db:
        (table,) = db.execute(
            "SELECT name FROM sqlite_master WHERE name LIKE 'rocpd_track_%' AND type = 'table'"
        )
        db.execute(
            f'UPDATE "{table[0]}" SET pid = 1000 WHERE id > {len(KERNELS) - 2} AND id <= {len(KERNELS)}'
        )
    assert rocpd_processes(path) == [908, 1000]
    assert total(read_rocpd(path, process=1000).timeline).num_kernels == 2


def test_a_copy_between_devices_is_communication_by_a_rule(tmp_path):
    """A collective of copy engines: nothing but the copy tells of it."""
    copies = json.loads(rocprofv3_json(as_list=False))["rocprofiler-sdk-tool"]["buffer_records"][
        "memory_copy"
    ]
    copies[0] |= {"operation": 2, "src_agent_id": {"handle": 21}}
    agents = [{"id": {"handle": h}, "type": 2, "name": "gpu"} for h in (20, 21)]
    data = json.loads(rocprofv3_json(as_list=False, memory_copy=copies))
    data["rocprofiler-sdk-tool"]["agents"] = agents
    plain = parse_rocprofv3_json(json.dumps(data).encode(), "t.json")
    assert (plain.quality.num_peer_copies, plain.quality.peer_copy_ms) == (1, pytest.approx(0.010))
    rules = tmp_path / "rules.yaml"
    rules.write_text("communication:\n  - {pattern: DEVICE_TO_DEVICE, op: all_gather}\n")
    ruled = parse_rocprofv3_json(json.dumps(data).encode(), "t.json", rules=load_rules(rules))
    assert [c.op for c in ruled.collectives] == ["all_reduce", "all_gather"]
    assert ruled.quality.num_peer_copies == 0
    assert int((ruled.timeline.kind == Kind.COMM).sum()) == 2


def test_rules_of_a_file_come_first(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text("communication: [{pattern: my_exchange, op: alltoall}, {pattern: nccl}]")
    rules = load_rules(path)
    assert rules[:2] == (CommRule("my_exchange", "all_to_all"), CommRule("nccl", None))
    assert rules[2:] == COMM_RULES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no table of rules"),
        ("communication: 3", "no table of rules"),
        ("communication: [{patern: x}]", "no table of rules"),
        ("communication: [{pattern: '('}]", "no regular expression"),
        ("communication: [{pattern: x, op: matmul}]", "is no collective"),
        ("communication: [{pattern: !!python/object/apply:os.system [ls]}]", "no table of rules"),
        ("a: [", "no table of rules"),
    ],
)
def test_a_faulty_file_of_rules_is_one_clear_line(tmp_path, text, message):
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(TraceError, match=message) as error:
        load_rules(path)
    assert "\n" not in str(error.value)
