"""Files and folders below a folder that a user names, which may be any: also one that changes meanwhile."""

import os
from fnmatch import fnmatch
from pathlib import Path

from aorta.errors import ConfigError

MOST_FOLDERS = 10_000


def folders_below(folder: Path) -> list[Path]:
    """The folder and all below it, sorted; those that may not be read, or are gone, are left out, and links
    are not followed. ConfigError where it is none, or holds more than MOST_FOLDERS."""
    return sorted(place for place, _ in _walked(folder))


def files_below(folder: Path, pattern: str) -> list[Path]:
    """Files at or below the folder whose name fits, sorted; as folders_below."""
    paths = [place / name for place, names in _walked(folder) for name in names if fnmatch(name, pattern)]
    return sorted(path for path in paths if path.is_file())


def _walked(folder: Path) -> list[tuple[Path, list[str]]]:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder")
    walked: list[tuple[Path, list[str]]] = []
    for place, _, names in os.walk(folder):
        walked.append((Path(place), names))
        if len(walked) > MOST_FOLDERS:
            raise ConfigError(
                f"{folder}: holds more than {MOST_FOLDERS} folders; give the one with the measurements"
            )
    return walked
