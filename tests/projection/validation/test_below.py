"""Which files are found below a folder, and that no folder gives a traceback."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from aorta.cli import main
from aorta.errors import ConfigError
from aorta.exit_codes import BAD_INPUT
from aorta.projection.validation import below


def test_files_are_sorted_and_links_not_followed(tmp_path: Path) -> None:
    for name in ("b/x.json", "a/c/x.json", "x.json", "a/y.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "a" / "again").symlink_to(tmp_path, target_is_directory=True)
    assert below.files_below(tmp_path, "x*.json") == [
        tmp_path / "a/c/x.json", tmp_path / "b/x.json", tmp_path / "x.json"
    ]  # fmt: skip
    assert below.folders_below(tmp_path) == [tmp_path, tmp_path / "a", tmp_path / "a/c", tmp_path / "b"]


def test_a_folder_that_goes_while_it_is_walked_is_left_out(tmp_path: Path, monkeypatch) -> None:
    scandir = below.os.scandir

    def gone(place):
        if Path(place).name == "gone":
            raise FileNotFoundError(place)
        return scandir(place)

    (tmp_path / "gone").mkdir()
    (tmp_path / "x.json").touch()
    monkeypatch.setattr(below.os, "scandir", gone)
    assert below.files_below(tmp_path, "*.json") == [tmp_path / "x.json"]


@pytest.mark.parametrize("words", [("validate", "--data"), ("calibrate", "--measurements")])
def test_the_root_of_a_machine_is_one_line(words: tuple[str, ...], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(below, "MOST_FOLDERS", 50)
    result = CliRunner().invoke(main, ["project", *words, "/"])
    assert result.exit_code == BAD_INPUT
    assert result.output == "error: /: holds more than 50 folders; give the one with the measurements\n"
    with pytest.raises(ConfigError, match="is not a folder"):
        below.folders_below(tmp_path / "none")
