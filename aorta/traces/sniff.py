"""Tells the format of a file by its first bytes, with the rank and the world size where these say so.

Also reads traces inside a tar file where they are: nothing is unpacked to disk.
"""

import json
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from aorta.errors import TraceError
from aorta.traces.files import LARGEST_BYTES, SQLITE_MAGIC, open_database, open_regular, read_bytes, unpack
from aorta.traces.model import rank_in_name
from aorta.traces.nsys import is_nsys
from aorta.traces.rocpd import is_rocpd
from aorta.traces.rocprof import kind_of_header

Format = Literal[
    "kineto", "rocprofv3-json", "rocprofv3-csv", "rocpd", "nsys", "tar", "records", "drawing",
    "rocprofv3-sums", "rocprofv3-agents", "json", "other",
]  # fmt: skip
"""Formats of files. drawing: what a report draws of a run. rocprofv3-sums: its statistics by name, without
times; rocprofv3-agents: its list of devices. json: JSON that is no trace. other: nothing that is known."""

HEAD_BYTES = 1 << 17
"""Bytes at the start of a file that are looked at."""
HEADERS: dict[Format, set[str]] = {
    "rocprofv3-sums": {"Name", "Calls", "TotalDurationNs"},
    "rocprofv3-agents": {"Node_Id", "Agent_Type"},
}
"""Columns of rocprofv3's CSV files that hold no times: *_kernel_stats, *_domain_stats and *_agent_info."""
KEYS: dict[Format, bytes] = {"rocprofv3-json": b'"rocprofiler-sdk-tool"', "kineto": b'"traceEvents"'}
"""Keys at the top of the JSON formats."""
DRAWN = b'"written_by":"aorta '
"""Stands before the events that a report writes for Perfetto."""
TAR_MAGIC = slice(257, 262)
"""Place of the word ustar in a tar file."""


class Content(NamedTuple):
    """Format of a file; rank and world size where its head says them."""

    format: Format
    rank: int | None = None
    world_size: int | None = None


def sniff(path: Path) -> Content:
    """Content of a file. Raises TraceError where it is empty or its compression is damaged."""
    with open_regular(path) as file:
        try:
            start = file.read(HEAD_BYTES)
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error.strerror}") from error
    if not start:
        raise TraceError(f"{path} is empty")
    if start.startswith(SQLITE_MAGIC):
        with open_database(path) as database:
            if is_rocpd(database):
                return Content("rocpd")
            return Content("nsys" if is_nsys(database) else "other")
    head = _unpacked_head(start, path)
    is_named_tar = path.name.endswith((".tar", ".tar.gz", ".tgz"))
    if head[TAR_MAGIC] == b"ustar" or (is_named_tar and head[:1] not in (b"{", b"[")):
        return Content("tar")
    return _sniff_text(head, len(start) < HEAD_BYTES and head is start, lambda: read_bytes(path), str(path))


def _sniff_text(head: bytes, is_whole: bool, read: Callable[[], bytes], location: str) -> Content:
    """Content of JSON or CSV. read returns the whole document, for where the head does not tell."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not text:
        raise TraceError(f"{location} is empty")
    if text[:1] not in b"{[":
        line = text.split(b"\n", 1)[0].decode("utf-8", "replace")
        header = [field.strip().strip('"') for field in line.split(",")]
        if kind_of_header(header):
            return Content("rocprofv3-csv")
        return Content(next((name for name, columns in HEADERS.items() if columns <= set(header)), "other"))
    if re.match(rb'\{\s*"schema":\s*\d+,\s*"(rank|started_unix_ns)":\s*\d+', text):
        return Content("records")
    format = _first_key(text)
    document = text
    if format is None and not is_whole and text[:1] == b"{":  # a list has no keys at its top
        document = read()
        format = _first_key(document)
    if format is None:
        return Content("json")
    if format != "kineto":
        return Content(format, rank_in_name(location))
    if DRAWN in document[: document.find(KEYS["kineto"])]:
        return Content("drawing")
    rank, world_size = _distributed(document)
    if rank is None and rank_in_name(location) is None and not is_whole and document is text:
        rank, world_size = _distributed(read())
    return Content("kineto", rank if rank is not None else rank_in_name(location), world_size)


def _first_key(text: bytes) -> Format | None:
    places = {name: text.find(key) for name, key in KEYS.items()}
    present = [(offset, name) for name, offset in places.items() if offset >= 0]
    return min(present)[1] if present else None


def _distributed(text: bytes) -> tuple[int | None, int | None]:
    """Rank and world size of a Kineto header, without reading the events."""
    match = re.search(rb'"distributedInfo"\s*:\s*(?=\{)', text)
    if match is None:
        return None, None
    try:
        part = text[match.end() : match.end() + HEAD_BYTES].decode("utf-8", "replace")
        info, _ = json.JSONDecoder().raw_decode(part)
    except (ValueError, RecursionError):
        return None, None
    rank, world_size = info.get("rank"), info.get("world_size")
    return (rank if type(rank) is int else None), (world_size if type(world_size) is int else None)


def _unpacked_head(start: bytes, path: Path) -> bytes:
    if start[:2] != b"\x1f\x8b":
        return start
    try:
        return zlib.decompressobj(31).decompress(start, HEAD_BYTES)
    except zlib.error as error:
        raise TraceError(f"{path} is a damaged gzip file: {error}") from error


def archive_members(path: Path) -> dict[str, Content]:
    """Content of the traces in a tar file, by the name of the member."""
    contents: dict[str, Content] = {}
    unread = []
    with _open_archive(path) as archive:
        for member in _members(archive, path):
            if Path(member.name).name.startswith("._"):
                continue  # resource forks of a Mac
            file = archive.extractfile(member)
            if file is None:
                continue
            location = f"{path}:{member.name}"
            head = file.read(HEAD_BYTES)
            if head.startswith(SQLITE_MAGIC):
                unread.append(member.name)
                continue
            if head[:2] == b"\x1f\x8b":
                head = _unpacked_head(head, path)
            if not head.lstrip()[:1] or head.lstrip()[:1] not in b"{[":
                continue
            content = _sniff_text(
                head, len(head) < HEAD_BYTES, partial(read_member, path, member.name), location
            )
            if content.format in ("kineto", "rocprofv3-json"):
                contents[member.name] = content
    if not contents:
        hint = f"; unpack it to read {unread[0]}" if unread else ""
        raise TraceError(f"{path} holds no trace{hint}")
    return contents


def read_member(path: Path, name: str) -> bytes:
    """A member of a tar file, unpacked where it is gzip."""
    with _open_archive(path) as archive:
        for member in _members(archive, path):
            if member.name == name:
                file = archive.extractfile(member)
                if file is not None:
                    return unpack(file.read(), f"{path}:{name}")
    raise TraceError(f"{path} holds no {name}")


class _open_archive:
    """Context of an open tar file, in which its faults are TraceErrors."""

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
    """Regular files of an archive. Raises TraceError for names that leave its folder, and for bombs."""
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
