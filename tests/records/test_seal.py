"""Lines that are missing, twice, out of order, changed, or of another run."""

import msgspec
import pytest

from aorta.errors import RecordError
from aorta.records.reader import read_steps
from aorta.records.seal import encoded, seal_of, sealed
from aorta.records.writer import LineWriter
from tests.records.plain_records import step


def written(path, num=20, **changes):
    with LineWriter.create(path) as writer:
        for number in range(num):
            writer.write(step(number, run_id="a", **changes))
    return path.read_bytes().splitlines(keepends=True)


def read(path, lines):
    path.write_bytes(b"".join(lines))
    notes = []
    return [record.global_step for record in read_steps(path, notes)], notes


def test_what_is_no_utf_8_in_a_name_or_argument_is_written_with_a_mark():
    assert msgspec.json.decode(encoded({"command": ["caf\udce9", "é"]})) == {"command": ["caf?", "é"]}


def test_a_seal_is_the_end_of_one_json_object():
    line = sealed(b'{"a":1}', 7)
    assert msgspec.json.decode(line)["line"] == 7
    assert seal_of(line) == (7, True)
    assert seal_of(line.replace(b'"a":1', b'"a":2')) == (7, False)
    assert seal_of(b'{"a":1}\n') is None


def test_missing_lines_are_said_with_their_place(tmp_path):
    path = tmp_path / "rank_0_metrics.jsonl"
    lines = written(path)
    steps, notes = read(path, lines[:10] + lines[13:])
    assert steps == [*range(10), *range(13, 20)]
    (note,) = notes
    assert note.endswith("3 lines are missing (3 before line 11, global step 13)")


@pytest.mark.parametrize(
    ("order", "words"),
    [
        pytest.param(lambda lines: [*lines, lines[3]], ":21: was written as line 4", id="twice"),
        pytest.param(lambda lines: [*lines[5:], *lines[:5]], ":16: was written as line 1", id="reordered"),
        pytest.param(
            lambda lines: [*lines[:2], lines[2].replace(b'"loss":1.5', b'"loss":1.6'), *lines[3:]],
            ":3: damaged or changed",
            id="changed",
        ),
    ],
)
def test_lines_that_are_not_as_they_were_written_are_refused(tmp_path, order, words):
    path = tmp_path / "rank_0_metrics.jsonl"
    lines = written(path)
    with pytest.raises(RecordError, match=words):
        read(path, order(lines))


def test_lines_of_another_run_are_refused(tmp_path):
    path, other = tmp_path / "rank_0_metrics.jsonl", tmp_path / "other"
    lines = written(path)
    with LineWriter.create(other) as writer:
        for number in range(20):
            writer.write(step(number, run_id="b"))
    with pytest.raises(RecordError, match=":11: mixes runs: b follows a"):
        read(path, lines[:10] + other.read_bytes().splitlines(keepends=True)[10:])


@pytest.mark.parametrize("changes", [{"tokens": -1}, {"host_ms": -5.0}])
def test_numbers_below_nothing_are_refused(tmp_path, changes):
    path = tmp_path / "rank_0_metrics.jsonl"
    with pytest.raises(RecordError, match="impossible record"):
        read(path, written(path, 1, **changes))


def test_a_later_attempt_goes_on_after_the_last_whole_line(tmp_path):
    path = tmp_path / "rank_0_metrics.jsonl"
    lines = written(path, 3)
    path.write_bytes(b"".join(lines) + lines[0][:30])
    with LineWriter.append(path) as writer:
        writer.write(step(1, run_id="a", attempt=1))
    notes = []
    assert [(r.global_step, r.attempt) for r in read_steps(path, notes)] == [(0, 0), (1, 0), (2, 0), (1, 1)]
    assert notes == []


def test_a_file_that_is_removed_while_it_is_written_comes_back_whole(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("aorta.records.writer.LOOK_S", 0.0)
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "rank_0_metrics.jsonl"
    with LineWriter.create(path) as writer:
        writer.write(step(0))
        path.unlink()
        folder.rmdir()
        assert writer.write(step(1))
    assert [record.global_step for record in read_steps(path)] == [0, 1]
    assert "written again, complete" in caplog.text
