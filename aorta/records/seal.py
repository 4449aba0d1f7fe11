"""Seals each line of a record file: with its number in the file and a checksum of all before it.

    {...,"line":17,"crc32":"89abcdef"}

A reader sees lines that are missing, repeated, out of order or changed; a line is still one JSON object.
"""

import json
import re
import zlib
from typing import Any, NamedTuple

import msgspec

_TAIL = re.compile(rb',"line":(\d{1,18}),"crc32":"([0-9a-f]{8})"\}\s*$')
_LONGEST = 64


class Seal(NamedTuple):
    number: int
    """The line's number in its file, from 0."""
    is_whole: bool
    """The checksum fits."""


def encoded(value: Any) -> bytes:
    """JSON of a value. Of names and arguments that are no UTF-8, what is none is written as '?'."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value), ensure_ascii=False).encode(errors="replace")


def sealed(body: bytes, number: int) -> bytes:
    """The sealed line of a JSON object (not an empty one), with its newline."""
    head = b'%b,"line":%d' % (body[:-1], number)
    return b'%b,"crc32":"%08x"}\n' % (head, zlib.crc32(head))


def seal_of(line: bytes) -> Seal | None:
    """The seal of a line; None where it has none: of schema 1, or written by others."""
    tail = _TAIL.search(line[-_LONGEST:])
    if tail is None:
        return None
    start = max(0, len(line) - _LONGEST) + tail.start(2) - len(b',"crc32":"')
    return Seal(int(tail[1]), zlib.crc32(memoryview(line)[:start]) == int(tail[2], 16))
