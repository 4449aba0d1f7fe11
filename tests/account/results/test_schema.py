"""Documents on disk: read back whole, refused in one line, never written over."""

from pathlib import Path

import pytest

from aorta.account.results.schema import read_document, to_json, write_document
from aorta.errors import RecordError
from tests.queues.documents import document, point


def test_a_document_is_read_back_as_it_was(tmp_path: Path) -> None:
    made = document(point(1), point(64, status="skipped"), torch="2.13")
    write_document(tmp_path / "deep" / "a.json", made)
    assert read_document(tmp_path / "deep" / "a.json") == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "not a result", id="empty"),
        pytest.param("[]", "not a result", id="list"),
        pytest.param('{"schema": 1}', "not a result", id="no-kind"),
        pytest.param('{"schema": 99, "kind": "queues"}', "schema 99, this version reads 1", id="newer"),
        pytest.param('{"schema": 1, "kind": "queues"}', "missing required field", id="incomplete"),
        pytest.param('{"schema": 1, "kind": "queues", "throughput": 3}', "unknown field", id="foreign"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(RecordError) as refused:
        read_document(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("mine")
    with pytest.raises(RecordError, match="already exists"):
        write_document(path, document(point()))
    assert path.read_text() == "mine"
    write_document(path, document(point()), overwrite=True)
    assert path.read_bytes() == to_json(document(point())) + b"\n"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="is a folder"):
        write_document(tmp_path, document(point()))
