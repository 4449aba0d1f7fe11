"""Columns give the numbers of the lines that they stand beside, whatever becomes of either file."""

import math
import os
import random
import signal
import subprocess
import sys
import time

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from aorta.account.load.rank import reduce
from aorta.account.load.rank.reduce import reduce_file
from aorta.errors import AortaError
from aorta.records import columns as columns_writer
from aorta.records import table
from aorta.records import writer as lines_writer
from aorta.records.blocks import StepNumbers
from aorta.records.columns import ArrowTable
from aorta.records.files import columns_name, steps_name
from aorta.records.schema import (
    CollectiveRecord,
    DeviceRecord,
    HostSpan,
    HostUse,
    KernelSpan,
    KernelSums,
    MemoryRecord,
    StepRecord,
)
from aorta.records.writer import LineWriter
from aorta.timeline.types import OverlapRecord
from tests.records import plain_records
from tests.records.run_folders import step_record, step_timeline


def records(num=40, seed=0, rank=0, **changes):
    """Lines with all that a line may have, each only in some of them."""
    draw = random.Random(seed)
    lines = []
    for i in range(num):
        timeline = step_timeline(
            compute=8 + draw.random(), exposed=draw.random(), idle=draw.choice((0.5, 1.0)), rank=rank, step=i
        )
        line = step_record(timeline, 2, run_id="r", step=i % 7, epoch=i // 7)
        window_ms, overlap = timeline.span_ms, line.overlap
        overlap = msgspec.structs.replace(overlap, host_bound=draw.choice((None, True, False)))
        parts = {
            "overlap": overlap,
            "lr": draw.choice((None, 1, 0.1)),
            "tokens": draw.choice((None, 3, 2**50)),
        }
        if i % 3:
            spans = [HostSpan("data", 0.0, draw.random()), HostSpan("backward", 1, 2 + draw.random())]
            spans += [
                HostSpan("garbage_collection", 1.5, window_ms),
                HostSpan("optimizer", 3.0, 4.0, "A", 7 + i),
            ]
            parts |= {"host_spans": spans[: draw.randrange(5)]}
        if i % 4:
            parts |= {
                "active_segments": None,
                "collectives": None,
                "not_measured": {"a.b": f"{i % 2}", "c": "é"},
            }
        else:
            call = CollectiveRecord(
                op="all_gather", stream="group", group="g", ranks=[0, 1], dtype="bfloat16", seq=i,
                bytes=draw.choice((None, 1 << 20)), start_ms=0.5, end_ms=draw.choice((None, 1.0)),
                algbw_gb_s=None, busbw_gb_s=None,
            )  # fmt: skip
            parts |= {"collectives": [call] * draw.randrange(3)}
        if i % 5 < 2:
            parts |= {"memory": MemoryRecord(allocated_bytes=i, reserved_bytes=2**40, peak_allocated_bytes=3,
                                             num_alloc_retries=draw.choice((None, 2)))}  # fmt: skip
        if i % 5 < 4:
            throttling = draw.choice((None, [], ["thermal"], ["power", "thermal"]))
            parts |= {
                "device": DeviceRecord(
                    sample_unix_ns=i, power_w=draw.choice((None, -0.0, 5)), throttling=throttling
                )
            }
        if i % 4 == 1:
            parts |= {"host_use": HostUse(cpu_ms=draw.random(), ready_ms=draw.choice((None, 0.25)))}
        lines.append(msgspec.structs.replace(line, **parts))
    return [msgspec.structs.replace(line, **changes) for line in lines]


def by_kernels(lines):
    """The same steps as kernel records tell them."""
    draw = random.Random(1)
    changed = []
    for i, line in enumerate(lines):
        kernels = KernelSums(
            num_kernels=5 + i % 2, num_graph_nodes=i % 3,
            classes={"gemm": (draw.random(), 4), "copy": (0.1, 1)},
            top=[(0, draw.random(), 4), (i % 2, 0.25, 1)][: 1 + i % 2],
            spans=[KernelSpan(0.0, 1.0, 7, 0)] if i % 4 == 0 else None,
        )  # fmt: skip
        changed.append(
            msgspec.structs.replace(
                line,
                source="kernels" if i % 6 else "events",
                kernels=kernels if i % 6 else None,
                exposed_run_lengths_ns=[10, 20, 5, draw.randrange(9)] if i % 3 else [],
            )  # fmt: skip
        )
    return changed


def of_attempts(lines):
    """Ten steps were done again by a second attempt, two of them once more after a rollback."""
    again = [msgspec.structs.replace(line, attempt=1, gap="a restart") for line in lines[-10:]]
    rolled_back = [msgspec.structs.replace(line, attempt=1, rollbacks=1) for line in lines[-2:]]
    return lines + again + rolled_back


def bare(lines):
    """As nobody measured anything."""
    nothing = dict(
        step_ms=None, between_steps_ms=None, host_ms=None, clock_error_us=None, tokens=None, run_id=None,
        active_segments=None, collectives=None, memory=None, device=None, host_spans=None, loss=None,
        streams={},
    )  # fmt: skip
    return [msgspec.structs.replace(line, **nothing) for line in lines]


KINDS = {
    "plain": list,
    "kernels": by_kernels,
    "attempts": of_attempts,
    "bare": bare,
}


def written(folder, lines, max_lines=7, monkeypatch=None):
    """The file of lines, with blocks of columns of so many."""
    if monkeypatch is not None:
        monkeypatch.setattr(columns_writer, "MOST_LINES", max_lines)
    folder.mkdir(exist_ok=True)
    LineWriter.create(folder / steps_name(0)).close()
    return continued(folder / steps_name(0), lines)


def continued(path, lines):
    with LineWriter.append(path, with_columns=True) as writer:
        for line in lines:
            assert writer.write(line)
    return path


def plain(value):
    """Bytes of arrays, so that equal means equal to the last digit."""
    if isinstance(value, np.ndarray):
        return (
            value.dtype.str,
            value.shape,
            np.where(np.isnan(value), 0, value).tobytes(),
            np.isnan(value).tobytes(),
        )
    if isinstance(value, dict):
        return sorted((str(key), plain(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


def numbers(path):
    """What is read of a rank's file, or the words with which it is refused."""
    try:
        return plain(reduce_file(path))
    except AortaError as error:
        return str(error)


def numbers_of_lines(path):
    columns = path.with_name(columns_name(0))
    aside = columns.with_suffix(".aside")
    if not columns.exists():
        return numbers(path)
    columns.rename(aside)
    try:
        return numbers(path)
    finally:
        aside.rename(columns)


@pytest.fixture
def of_columns(monkeypatch):
    """How many lines were read as columns."""
    counts = []
    real = reduce.read_blocks

    def read_blocks(path, notes, **options):
        for block in real(path, notes, **options):
            counts.append(len(block) if isinstance(block, ArrowTable) else 0)
            yield block

    monkeypatch.setattr(reduce, "read_blocks", read_blocks)
    return counts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_lines", [1, 7, 40, 1000])
def test_columns_and_lines_give_the_same_numbers(tmp_path, monkeypatch, of_columns, kind, max_lines):
    lines = KINDS[kind](records())
    path = written(tmp_path, lines, max_lines, monkeypatch)
    read = numbers(path)
    assert not isinstance(read, str)
    assert sum(of_columns) == (len(lines) if max_lines <= len(lines) else 0)  # of few lines there are none
    assert read == numbers_of_lines(path)


def test_blocks_that_a_killed_writer_left_out_are_read_from_lines(tmp_path, monkeypatch, of_columns):
    path = written(tmp_path, records(20), 7, monkeypatch)
    monkeypatch.setattr(columns_writer.ColumnsWriter, "close", lambda self: self._close())
    continued(path, records(25)[20:])
    assert numbers(path) == numbers_of_lines(path)
    monkeypatch.undo()
    continued(path, records(40)[25:])
    assert numbers(path) == numbers_of_lines(path)
    assert plain(reduce_file(path))["sources"][0][1]["global_step"][1] == (40,)


def test_a_process_killed_at_any_moment_leaves_what_its_lines_say(tmp_path):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from aorta.records import columns as columns_writer\n"
        "from aorta.records.writer import LineWriter\n"
        "from tests.account.load.test_columns_beside_lines import records\n"
        "columns_writer.MOST_LINES = 3\n"
        "lines = records(60)\n"
        "path = Path(sys.argv[1])\n"
        "if not path.exists(): LineWriter.create(path).close()\n"
        "writer = LineWriter.append(path, with_columns=True)\n"
        "print('ready', flush=True)\n"
        "for line in lines[int(sys.argv[2]):]: writer.write(line)\n"
        "import time; time.sleep(60)\n"
    )
    path, draw = tmp_path / steps_name(0), random.Random(3)
    for _ in range(3):
        num = path.read_bytes().count(b"\n") if path.exists() else 0
        process = subprocess.Popen([sys.executable, "-c", code, str(path), str(num)], stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(draw.random() * 4e-3)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert numbers(path) == numbers_of_lines(path)


@pytest.mark.parametrize("kind", ["plain", "kernels", "attempts"])
def test_a_changed_byte_of_columns_changes_no_number(tmp_path, monkeypatch, kind):
    path = written(tmp_path, KINDS[kind](records(24)), 7, monkeypatch)
    columns, draw = path.with_name(columns_name(0)), random.Random(kind)
    data, right = columns.read_bytes(), numbers_of_lines(path)
    for place in draw.sample(range(len(data)), 60):
        changed = bytearray(data)
        changed[place] ^= 1 << draw.randrange(8)
        columns.write_bytes(changed[: None if draw.random() < 0.7 else place])
        assert numbers(path) == right


@pytest.mark.parametrize("kind", ["plain", "kernels"])
def test_changed_lines_are_read_or_refused_as_without_columns(tmp_path, monkeypatch, kind):
    path = written(tmp_path, KINDS[kind](records(24)), 7, monkeypatch)
    data, draw = path.read_bytes(), random.Random(kind)
    for place in draw.sample(range(len(data)), 40):
        changed = bytearray(data)
        match draw.randrange(4):
            case 0:
                del changed[place:]
            case 1:  # a line is taken out
                begin = data.rfind(b"\n", 0, place) + 1
                del changed[begin : data.find(b"\n", place) + 1]
            case 2:
                changed[place:place] = b"\n"
            case _:
                changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        assert numbers(path) == numbers_of_lines(path)


def test_columns_of_another_rank_run_or_attempt_are_not_used(tmp_path, monkeypatch, of_columns):
    path = written(tmp_path, records(24), 7, monkeypatch)
    others = ({"rank": 1}, {"run_id": "s"}, {"attempt": 1}, {"seed": 5})
    for i, changes in enumerate(others):
        other = written(tmp_path / str(i), records(24, **changes), 7)
        other.with_name(columns_name(0)).rename(path.with_name(columns_name(0)))
        of_columns.clear()
        assert numbers(path) == numbers_of_lines(path)
        assert sum(of_columns) == 0


def test_lines_without_columns_are_read_as_before(tmp_path, monkeypatch, of_columns):
    path = written(tmp_path, records(24), 7, monkeypatch)
    path.with_name(columns_name(0)).unlink()
    assert not isinstance(numbers(path), str)
    assert of_columns == [0]


@pytest.mark.parametrize("field", ["step_ms", "host_ms"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_a_line_cannot_hold_makes_no_columns(tmp_path, monkeypatch, of_columns, field, value):
    lines = records(21)
    lines[10] = msgspec.structs.replace(lines[10], **{field: value})
    path = written(tmp_path, lines, 7, monkeypatch)
    assert numbers(path) == numbers_of_lines(path)
    assert sum(of_columns) == 21  # a line has null in its place, and columns are made of lines


@pytest.mark.parametrize("value", [10**30, 2**62, -1, "text", True])
def test_impossible_integers_are_refused_in_the_same_words(tmp_path, monkeypatch, value):
    for field in ("global_step", "tokens", "num_collectives", "start_unix_ns"):
        lines = records(21)
        lines[10] = msgspec.structs.replace(lines[10], **{field: value})
        path = written(tmp_path / field, lines, 7, monkeypatch)
        assert numbers(path) == numbers_of_lines(path)


def test_rotated_lines_have_no_columns(tmp_path, monkeypatch, of_columns):
    monkeypatch.setattr(columns_writer, "MOST_LINES", 5)
    path = tmp_path / steps_name(0)
    LineWriter.create(path).close()
    with LineWriter.append(path, with_columns=True) as writer:
        writer.max_bytes = 60_000
        for line in records(120):
            assert writer.write(line)
            assert path.stat().st_size <= 60_000
    assert not isinstance(numbers(path), str)
    assert not path.with_name(columns_name(0)).exists()


def test_a_full_disk_costs_columns_and_no_line(tmp_path, monkeypatch, of_columns):
    real = os.pwrite

    def pwrite(descriptor, data, position):
        if position > 4000:
            real(descriptor, data[: len(data) // 2], position)
            raise OSError(28, "No space left on device")
        return real(descriptor, data, position)

    monkeypatch.setattr(columns_writer.os, "pwrite", pwrite)
    path = written(tmp_path, records(40), 5, monkeypatch)
    assert not isinstance(numbers(path), str)
    assert sum(of_columns) == 0
    assert not path.with_name(columns_name(0)).exists()


def test_a_line_that_a_full_disk_has_lost_is_in_no_block(tmp_path, monkeypatch, of_columns):
    real, lines = os.write, records(20)
    monkeypatch.setattr(columns_writer, "MOST_LINES", 4)
    LineWriter.create(tmp_path / steps_name(0)).close()
    with LineWriter.append(tmp_path / steps_name(0), with_columns=True) as writer:
        for i, line in enumerate(lines):
            if i == 6:
                monkeypatch.setattr(
                    lines_writer.os, "write", lambda *_: real(os.open("/dev/full", os.O_WRONLY), b"x")
                )
            assert writer.write(line) == (i not in (6, 7))
            if i == 7:
                monkeypatch.setattr(lines_writer.os, "write", real)
                monkeypatch.setattr(lines_writer, "RETRY_S", 0.0)
    path = tmp_path / steps_name(0)
    assert not isinstance(numbers(path), str)
    assert sum(of_columns) == 0  # lines without columns name the gap


def test_a_new_run_does_not_take_over_columns(tmp_path, monkeypatch, of_columns):
    path = written(tmp_path, records(24), 7, monkeypatch)
    path.unlink()
    written(tmp_path, records(7, seed=9))
    assert numbers(path) == numbers_of_lines(path)
    path.with_name(columns_name(0)).write_bytes(b"not columns")
    continued(path, [plain_records.step(30 + i, run_id="r", world_size=2) for i in range(7)])
    of_columns.clear()
    assert numbers(path) == numbers_of_lines(path)
    assert sum(of_columns) == 14


def test_columns_that_cannot_be_written_are_none_of_the_runs_business(tmp_path, caplog):
    (tmp_path / columns_name(0)).mkdir()
    path = written(tmp_path, records(5))
    assert not isinstance(numbers(path), str)
    assert not caplog.records


def test_every_field_of_a_record_is_a_column_or_one_that_no_statistic_reads():
    """A field that columns lack would be missing in silence."""
    parts = {prefix.partition(".")[0] for prefix, _ in table.PARTS}
    lists = {name.partition(".")[0] for name in table.LISTS}
    columns = {*table.FIELDS, *parts, *lists, "overlap"}
    left = {*StepRecord.__struct_fields__, *OverlapRecord.__struct_fields__} - columns
    assert left == {"modules", "packed"}
    assert set(StepNumbers.__struct_fields__) - columns == {"line", "packed"}
    for _, struct in table.PARTS:
        left = set(struct.__struct_fields__) - table.scalar_fields(struct).keys()
        assert left <= {"throttling", "classes", "copies", "top", "spans"}


def test_lines_that_were_copied_or_changed_later_are_compared_as_a_whole(tmp_path, monkeypatch, of_columns):
    path = written(tmp_path, records(24), 7, monkeypatch)
    state = path.stat()
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))
    assert numbers(path) == numbers_of_lines(path)
    assert sum(of_columns) == 24
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    of_columns.clear()
    assert isinstance(numbers(path), str)
    assert sum(of_columns) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch", 5),
        ("source", "gpu"),
        ("rank", 7),
        ("attempt", -1),
        ("global_step", -1),
        ("not_measured", "{"),
        ("step_ms", "a"),
    ],
)
def test_columns_that_no_run_writes_are_not_used(tmp_path, monkeypatch, of_columns, field, value):
    """Made with checksums that fit, as somebody may who wants the reader to stumble."""
    path = written(tmp_path, records(24), 7, monkeypatch)
    columns = columns_writer.columns_of(path)
    stream = columns_writer.Stream(path.with_name(columns_name(0)), 0, 0)
    num_lines, schema = 0, columns_writer.arrow_schema()
    if field == "step_ms":
        place = schema.get_field_index(field)
        schema = schema.set(place, pa.field(field, pa.string()))
        stream._writer = pa.ipc.new_stream(pa.PythonFile(stream, "w"), schema)
    for batch in [*columns.batches, columns.batches[0].slice(0, 0)]:
        place = schema.get_field_index(field)
        wrong = pa.array([value] * len(batch), schema.field(place).type)
        batch = pa.RecordBatch.from_arrays(
            [wrong if i == place else column for i, column in enumerate(batch.columns)], schema=schema
        )
        monkeypatch.setattr(columns_writer, "arrow_batch", lambda _, batch=batch: batch)
        counts = dict(num_lines=num_lines, file_bytes=stream.num_bytes, file_crc=stream.checksum)
        stream.write(table.LineTable([]), msgspec.structs.replace(columns.seal, **counts))
        num_lines += len(batch)
    stream.sync()
    stream.close()
    assert not isinstance(numbers(path), str)
    assert sum(of_columns) == (24 if field == "epoch" else 0)  # which a run might have written
