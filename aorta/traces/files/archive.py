"""Traces inside a tar file, read where they are: nothing is unpacked to disk."""

import tarfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from aorta.errors import TraceError
from aorta.traces.files.inflate import LARGEST_BYTES, open_regular, unpack
from aorta.traces.files.sniff import HEAD_BYTES, Content, sniff_text, unpacked_head
from aorta.traces.files.sqlite import MAGIC as SQLITE


def archive_members(path: Path) -> dict[str, Content]:
    """The traces in a tar file, by the name of the member."""
    contents: dict[str, Content] = {}
    unread = []
    with _opened(path) as archive:
        for member in _members(archive, path):
            if Path(member.name).name.startswith("._"):
                continue  # resource forks of a Mac
            file = archive.extractfile(member)
            if file is None:
                continue
            location = f"{path}:{member.name}"
            head = file.read(HEAD_BYTES)
            if head.startswith(SQLITE):
                unread.append(member.name)
                continue
            if head[:2] == b"\x1f\x8b":
                head = unpacked_head(head, path)
            if not head.lstrip()[:1] or head.lstrip()[:1] not in b"{[":
                continue
            content = sniff_text(
                head, len(head) < HEAD_BYTES, partial(read_member, path, member.name), location
            )
            if content.format in ("kineto", "rocprofv3-json"):
                contents[member.name] = content
    if not contents:
        hint = f"; unpack it to read {unread[0]}" if unread else ""
        raise TraceError(f"{path} holds no trace{hint}")
    return contents


def read_member(path: Path, name: str) -> bytes:
    with _opened(path) as archive:
        for member in _members(archive, path):
            if member.name == name:
                file = archive.extractfile(member)
                if file is not None:
                    return unpack(file.read(), f"{path}:{name}")
    raise TraceError(f"{path} holds no {name}")


class _opened:
    """A tar file whose faults are TraceErrors."""

    FAULTS = (tarfile.TarError, EOFError, zlib.error, OSError, ValueError, OverflowError, MemoryError)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> tarfile.TarFile:
        self._file: BinaryIO = open_regular(self._path)
        try:
            self._archive = tarfile.open(fileobj=self._file, mode="r:*")
        except self.FAULTS as error:
            self._file.close()
            raise TraceError(f"{self._path} is no archive that can be read: {_line(error)}") from error
        return self._archive

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._archive.close()
        self._file.close()
        if isinstance(error, self.FAULTS) or type(error).__module__ == "lzma":
            raise TraceError(f"{self._path} is a damaged archive: {_line(error)}") from error


def _members(archive: tarfile.TarFile, path: Path) -> Iterator[tarfile.TarInfo]:
    for member in archive:
        parts = member.name.replace("\\", "/").split("/")
        if member.name.startswith("/") or ".." in parts:
            raise TraceError(f"{path} holds the name {member.name!r}, which leaves the archive's folder")
        if not member.isreg() or not member.name.isprintable():
            continue
        if member.size > LARGEST_BYTES:
            raise TraceError(f"{path}:{member.name} is larger than 16 GiB")
        yield member


def _line(error: BaseException | None) -> str:
    return " ".join(str(error).split()) or type(error).__name__
