"""The end of each line of a record file: its number in the file and a checksum of all before it.

    {...,"line":17,"crc32":"89abcdef"}

What is missing, twice, out of order or changed then shows, and a line is still one JSON object.
"""

import re
import zlib
from typing import NamedTuple

_TAIL = re.compile(rb',"line":(\d{1,18}),"crc32":"([0-9a-f]{8})"\}\s*$')
_LONGEST = 64


class Seal(NamedTuple):
    number: int
    """Of the line in its file, from 0."""
    is_whole: bool
    """The checksum fits."""


def sealed(body: bytes, number: int) -> bytes:
    """The line of a JSON object that has keys, with its newline."""
    return sealed_with_checksum(body, number)[0]


def sealed_with_checksum(body: bytes, number: int) -> tuple[bytes, int]:
    """The line of a JSON object, and the CRC-32 of all of it."""
    head = b'%b,"line":%d' % (body[:-1], number)
    checksum = zlib.crc32(head)
    tail = b',"crc32":"%08x"}\n' % checksum
    return head + tail, zlib.crc32(tail, checksum)


def seal_of(line: bytes) -> Seal | None:
    """None where a line has none: of schema 1, or written by others."""
    tail = _TAIL.search(line[-_LONGEST:])
    if tail is None:
        return None
    start = max(0, len(line) - _LONGEST) + tail.start(2) - len(b',"crc32":"')
    return Seal(int(tail[1]), zlib.crc32(memoryview(line)[:start]) == int(tail[2], 16))
