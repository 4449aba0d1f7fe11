"""Files written whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from aorta.files import replacing, write_whole


def write_half(path: Path, error: BaseException) -> None:
    with replacing(path) as file:
        file.write(b"half")
        raise error


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_old_content_stays_until_the_block_ends(tmp_path):
    path = tmp_path / "summary.json"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == {"summary.json"}


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), ValueError("x"), KeyboardInterrupt()]
)
def test_a_failure_leaves_the_old_content_and_nothing_beside_it(tmp_path, error):
    path = tmp_path / "summary.json"
    path.write_bytes(b"old")
    with pytest.raises(type(error)):
        write_half(path, error)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == {"summary.json"}


@pytest.mark.parametrize("planted", [".report.html.tmp", ".report.html.part", "report.html"])
def test_a_planted_link_is_not_written_through(tmp_path, planted):
    target, folder = tmp_path / "precious", tmp_path / "report"
    target.write_bytes(b"precious")
    folder.mkdir()
    (folder / planted).symlink_to(target)
    write_whole(folder / "report.html", b"page")
    assert target.read_bytes() == b"precious"
    assert (folder / "report.html").read_bytes() == b"page"
    assert not (folder / "report.html").is_symlink()


def test_a_link_under_the_very_temporary_name_is_refused(tmp_path, monkeypatch):
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    monkeypatch.setattr("aorta.files.secrets.token_hex", lambda num: "0" * num)
    (tmp_path / f".page.{os.getpid()}.0000.tmp").symlink_to(target)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "page", b"x")
    assert target.read_bytes() == b"precious"
    assert not (tmp_path / "page").exists()


def test_a_device_is_not_replaced(tmp_path, monkeypatch):
    path = tmp_path / "null"
    path.write_bytes(b"")
    monkeypatch.setattr(type(path), "is_char_device", lambda self: True)
    with pytest.raises(OSError, match="no regular file"):
        write_whole(path, b"new")
    assert path.read_bytes() == b""


def test_a_name_of_the_longest_length_is_written(tmp_path):
    write_whole(tmp_path / ("n" * 255), b"x")
    assert names(tmp_path) == {"n" * 255}


def test_the_mode_is_that_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write_whole(tmp_path / "whole", b"", durable=False)
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "whole")}
    assert len(modes) == 1
