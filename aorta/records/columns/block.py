"""A block of columns as bytes, and which lines it is of.

    magic, length of the head, length of the body, checksum; the head in MessagePack; the body: the arrays

Everything is little endian. A block is used whole or not at all.
"""

import sys
import zlib
from array import array
from collections.abc import Callable, Iterator
from struct import Struct
from typing import NamedTuple

import msgspec

from aorta.errors import NOT_JSON
from aorta.records.columns.flat import FlatColumns

FRAME = Struct("<8sIII")
MAGIC = b"aorta-c1"
"""Another one with every change of what a block holds."""
MOST_BYTES = 1 << 28
ALIGNMENT = 8


class Lines(msgspec.Struct, array_like=True):
    """Neighbouring lines of the file, numbered one after the other."""

    number: int
    """Of the first one."""
    offset: int
    """Where it begins in the file."""
    sizes: list[int]
    """Bytes of each line, with its newline."""
    checksums: list[int]
    """CRC-32 of each."""

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)


class Head(msgspec.Struct, array_like=True):
    lines: Lines
    constants: dict[str, float | int | str]
    texts: dict[str, list[str]]
    columns: list[tuple[str, str, int]]
    """Name, type code and length, in the order of the body; each begins at a multiple of ALIGNMENT."""


class Block(NamedTuple):
    """A block that has been read, its columns still bytes."""

    head: Head
    body: memoryview
    num_bytes: int
    """In the file."""

    def arrays(self) -> Iterator[tuple[str, str, memoryview]]:
        """Name, type code and bytes of each column."""
        position = 0
        for name, code, length in self.head.columns:
            num_bytes = array(code).itemsize * length
            yield name, code, self.body[position : position + num_bytes]
            position += _padded(num_bytes)


def block_bytes(lines: Lines, flat: FlatColumns) -> bytes:
    columns: list[tuple[str, str, int]] = []
    body = bytearray()
    for name, column in flat.arrays.items():
        columns.append((name, column.typecode, len(column)))
        if sys.byteorder == "big":
            column.byteswap()
        body += column.tobytes()
        body += bytes(_padded(len(body)) - len(body))
    head = msgspec.msgpack.encode(Head(lines, flat.constants, flat.texts, columns))
    frame = FRAME.pack(MAGIC, len(head), len(body), zlib.crc32(body, zlib.crc32(head)))
    return b"".join((frame, head, body))


def read_block(read: Callable[[int], bytes]) -> Block | None:
    """The next block of a file, by its `read`; None where no whole one follows. Raises OSError."""
    frame = read(FRAME.size)
    if len(frame) < FRAME.size:
        return None
    magic, head_bytes, body_bytes, checksum = FRAME.unpack(frame)
    if magic != MAGIC or head_bytes + body_bytes > MOST_BYTES:
        return None
    head, body = read(head_bytes), read(body_bytes)
    if len(head) + len(body) < head_bytes + body_bytes or zlib.crc32(body, zlib.crc32(head)) != checksum:
        return None
    num_bytes = FRAME.size + head_bytes + body_bytes
    try:
        return Block(msgspec.msgpack.decode(head, type=Head), memoryview(body), num_bytes)
    except NOT_JSON:
        return None


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
