"""Every file of JSON that aorta reads may hold bytes that are no text, or brackets without end."""

from collections.abc import Callable
from pathlib import Path

import pytest

from aorta.account.results.schema import read_document
from aorta.errors import AortaError
from aorta.hang.report import read_reports
from aorta.records.files import steps_name
from aorta.records.newest import Follower
from aorta.records.requests import read_plan, read_request
from aorta.records.rotation import dropped_path, read_dropped
from aorta.traces.kineto_file import GraphArgs, decode
from aorta.training.checkpoint import read_meta

NO_JSON = {"no-text": b'{"schema": 1, "a": "\xdb\xff"}', "deep": b"[" * 100_000, "cut": b'{"schema": '}


@pytest.mark.parametrize("data", NO_JSON.values(), ids=NO_JSON)
@pytest.mark.parametrize(
    ("name", "read"),
    [
        pytest.param("rank0.json", lambda path: read_reports(path.parent), id="hang"),
        pytest.param("a.json", read_document, id="results"),
        pytest.param("aorta.json", lambda path: read_meta(path.parent), id="checkpoint"),
        pytest.param("trace.json", lambda path: decode(path.read_bytes(), path.name, GraphArgs), id="trace"),
    ],
)
def test_what_is_no_json_is_refused_in_one_line(
    data: bytes, name: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(AortaError) as refused:
        read(tmp_path / name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("data", NO_JSON.values(), ids=NO_JSON)
def test_what_is_only_a_help_is_as_if_it_were_not_there(data: bytes, tmp_path: Path) -> None:
    lines = tmp_path / steps_name(0)
    for path in (dropped_path(lines), tmp_path / "capture_request.json", tmp_path / "capture_plan.json"):
        path.write_bytes(data)
    assert read_dropped(lines).num_steps == 0
    assert read_request(tmp_path) is None
    assert read_plan(tmp_path) is None


def test_a_line_that_is_no_text_is_left_out_of_a_running_jobs_picture(tmp_path: Path) -> None:
    (tmp_path / steps_name(0)).write_bytes(b'{"schema": "\xd3"}\n')
    assert Follower(tmp_path).poll()
