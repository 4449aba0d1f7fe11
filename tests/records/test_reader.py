import json

import msgspec
import pytest

from aorta.errors import RecordError
from aorta.records.reader import read_run, read_steps
from aorta.records.schema import StepRecord
from aorta.timeline.overlap import active_segments, overlap
from aorta.timeline.types import Kind, OverlapRecord, Span, Timeline

LIVE = Timeline.from_spans(
    [
        Span(0, 3, Kind.COMPUTE),
        Span(2, 5, Kind.COMM, "all_gather", "nccl"),
        Span(6, 7, Kind.COMM, "broadcast", "nccl"),
        Span(6.5, 8, Kind.COPY, "memcpy", "copies"),
    ],
    (0.0, 10.0),
    step=4,
    sees_copies=True,
)


def record(timeline=LIVE, **changes):
    fields = dict(
        rank=0,
        world_size=2,
        epoch=0,
        step=4,
        global_step=4,
        loss=None,
        lr=None,
        grad_norm=None,
        tokens=None,
        source="events",
        start_unix_ns=10**18 + 1,
        clock_error_us=2.0,
        step_ms=10.0,
        between_steps_ms=1.0,
        host_ms=9.0,
        streams={},
        overlap=overlap(timeline),
        active_segments=active_segments(timeline),
        collectives=None,
        num_collectives=2,
    )
    return StepRecord(**(fields | changes))


def write(path, *lines):
    path.write_bytes(b"".join(lines))
    return path


LINE = msgspec.json.encode(record()) + b"\n"


def test_a_last_line_that_was_cut_off_is_left_out_and_noted(tmp_path):
    path = write(tmp_path / "rank_0_metrics.jsonl", LINE, LINE[: len(LINE) // 2])
    notes = []
    assert list(read_steps(path, notes)) == [record()]
    assert notes == [f"{path}:2: the last line is cut off and left out"]


@pytest.mark.parametrize("keep", [1, 2, 50, len(LINE) - 2])
def test_wherever_the_only_line_was_cut(tmp_path, keep):
    notes = []
    path = write(tmp_path / "a.jsonl", LINE[:keep])
    assert list(read_steps(path, notes)) == []
    assert len(notes) == 1


def test_a_whole_last_line_without_newline_is_read(tmp_path):
    assert list(read_steps(write(tmp_path / "a.jsonl", LINE.rstrip()))) == [record()]


def test_an_empty_file_has_no_steps(tmp_path):
    assert list(read_steps(write(tmp_path / "a.jsonl"))) == []


def test_records_are_read_one_at_a_time(tmp_path):
    path = write(tmp_path / "a.jsonl", LINE, b"broken\n")
    steps = read_steps(path)
    assert next(steps) == record()
    with pytest.raises(RecordError, match=r"a\.jsonl:2: not a step record"):
        next(steps)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(LINE[:20] + b"\n" + LINE, ":1: not a step record", id="cut-in-the-middle"),
        pytest.param(b'{"schema": 99}\n', ":1: .*schema 99.* reads 1, 2 and 3", id="other-version"),
        pytest.param(
            LINE.replace(b'"schema":3', b'"schema":4'), ":1: .*schema 4", id="other-version-that-decodes"
        ),
        pytest.param(b"hello", ":1: not a step record", id="text"),
        pytest.param(b'{"a": 1}', ":1: not a step record", id="another-json"),
        pytest.param(b"[1, 2]\n", ":1: not a step record", id="json-list"),
        pytest.param(b"\x89PNG\r\n\x1a\n\x00", ":1: not a step record", id="binary"),
        pytest.param(b'{"a":"\xff"}\n', ":1: not a step record", id="not-utf8"),
        pytest.param(b'{"a":' + b"[" * 100_000 + b"\n", ":1: not a step record", id="deep"),
    ],
)
def test_a_file_that_is_no_record_is_one_clear_line(tmp_path, data, message):
    path = write(tmp_path / "a.jsonl", data)
    with pytest.raises(RecordError, match=message) as error:
        list(read_steps(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"rank": 2}, "rank 2 of 2"),
        ({"global_step": 10**30}, "global_step 1000"),
        ({"num_collectives": -1}, "num_collectives -1"),
        ({"step_ms": -0.5}, "step_ms -0.5"),
    ],
)
def test_a_record_that_no_run_writes_is_one_clear_line(tmp_path, changes, fault):
    line = json.dumps(msgspec.to_builtins(record()) | changes).encode() + b"\n"
    with pytest.raises(RecordError, match=f":1: impossible record: {fault}"):
        list(read_steps(write(tmp_path / "a.jsonl", line)))


def test_a_missing_file_is_one_clear_line(tmp_path):
    with pytest.raises(RecordError, match="cannot read .*No such file"):
        list(read_steps(tmp_path / "none.jsonl"))
    with pytest.raises(RecordError, match="cannot read"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a run record"),
        (b'{"schema": 7}', "schema 7"),
        (b"[]", "not a run record"),
    ],
)
def test_a_run_that_cannot_be_read(tmp_path, data, message):
    with pytest.raises(RecordError, match=message):
        read_run(write(tmp_path / "run.json", data))


def test_overlap_of_a_record_is_the_struct_of_the_schema():
    assert isinstance(record().overlap, OverlapRecord)
