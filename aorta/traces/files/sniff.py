"""What a file is, by its content: a few bytes of it, as a rule."""

import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from aorta.errors import TraceError
from aorta.traces.files.inflate import open_regular, read_bytes
from aorta.traces.files.sqlite import MAGIC as SQLITE
from aorta.traces.files.sqlite import open_database
from aorta.traces.names import rank_in_name
from aorta.traces.nsys import is_nsys
from aorta.traces.rocprof.csv_tables import kind_of_header
from aorta.traces.rocprof.rocpd import is_rocpd

Format = Literal[
    "kineto", "rocprofv3-json", "rocprofv3-csv", "rocpd", "nsys", "xplane", "tar", "records", "json", "other"
]
"""json: JSON that is no trace. other: nothing that is known."""

HEAD_BYTES = 1 << 17
KEYS: dict[Format, bytes] = {"rocprofv3-json": b'"rocprofiler-sdk-tool"', "kineto": b'"traceEvents"'}
TAR_MAGIC = slice(257, 262)


class Content(NamedTuple):
    format: Format
    rank: int | None = None
    world_size: int | None = None


def sniff(path: Path) -> Content:
    """TraceError where the file is empty or its compression is damaged."""
    with open_regular(path) as file:
        try:
            start = file.read(HEAD_BYTES)
        except OSError as error:
            raise TraceError(f"cannot read {path}: {error.strerror}") from error
    if not start:
        raise TraceError(f"{path} is empty")
    if start.startswith(SQLITE):
        with open_database(path) as database:
            if is_rocpd(database):
                return Content("rocpd")
            return Content("nsys" if is_nsys(database) else "other")
    if path.name.endswith(".xplane.pb"):
        return Content("xplane", rank_in_name(str(path)))
    head = unpacked_head(start, path)
    if is_tar(head) or (head[:1] not in (b"{", b"[") and path.name.endswith((".tar", ".tar.gz", ".tgz"))):
        return Content("tar")
    return sniff_text(head, len(start) < HEAD_BYTES and head is start, lambda: read_bytes(path), str(path))


def sniff_text(head: bytes, is_whole: bool, read: Callable[[], bytes], location: str) -> Content:
    """Of JSON and CSV. read gives the whole where the head does not tell."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not text:
        raise TraceError(f"{location} is empty")
    if text[:1] not in b"{[":
        line = text.split(b"\n", 1)[0].decode("utf-8", "replace")
        header = [field.strip().strip('"') for field in line.split(",")]
        return Content("rocprofv3-csv" if kind_of_header(header) else "other")
    if re.match(rb'\{\s*"schema":\s*\d+,\s*"(rank|started_unix_ns)":\s*\d+', text):
        return Content("records")
    format = _first_key(text)
    document = text
    if format is None and not is_whole:
        document = read()
        format = _first_key(document)
    if format is None:
        return Content("json")
    if format != "kineto":
        return Content(format, rank_in_name(location))
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


def unpacked_head(start: bytes, path: Path) -> bytes:
    if start[:2] != b"\x1f\x8b":
        return start
    try:
        return zlib.decompressobj(31).decompress(start, HEAD_BYTES)
    except zlib.error as error:
        raise TraceError(f"{path} is a damaged gzip file: {error}") from error


def is_tar(head: bytes) -> bool:
    return head[TAR_MAGIC] == b"ustar"
