"""Fingerprints of tensors: a norm and eight sums with signs, which tell of a sum of tensors what they
tell of its parts, and are far apart for tensors that are.

The sums are made on the tensors' device in few kernels and little memory; `numbers` brings them to the host,
many at once.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from math import isfinite
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aorta.hazards.numbers import Numbers

WIDTH = 64
NUM_ROWS, NUM_COLUMNS = 4, 2
"""Sets of signs along and across a tensor laid out in rows of WIDTH: their products give the sums."""
BLOCK = 8
"""Rows that are summed together where tensors are laid out one behind the other."""
MOST_ROWS = 1 << 16
"""Rows that are worked on at a time: they take 16 MiB, and more keep a device busy anyway. The next ones have
the same signs again, or all of a set turned."""
NUM_TURNS = 1 << 12
ROW_SCALE, COLUMN_SCALE = 1 / (MOST_ROWS * NUM_TURNS), 1 / WIDTH
"""Of the signs on a device, so that no sum of finite values overflows; powers of two change no digits."""


class Prints(NamedTuple):
    """Fingerprints of tensors of one device, on it."""

    sums: Tensor
    """[tensors, NUM_ROWS, NUM_COLUMNS], times ROW_SCALE and COLUMN_SCALE: finite where all values are."""
    norms: Tensor
    """Of the pieces of all tensors; infinite where the square of one overflows."""
    tensor_of_norm: Sequence[int]


def fingerprints(tensors: Sequence[Tensor], num_parts: int = 1) -> Prints:
    """Fingerprints of plain tensors of one device; of a single one, those of that many equal parts."""
    if num_parts > 1:
        if not tensors[0].numel() % (num_parts * WIDTH):
            return _in_rows(tensors[0], num_parts)
        tensors = tensors[0].reshape(-1).chunk(num_parts)
    groups: list[list[Tensor]] = [[]]
    num_rows = 0
    for tensor in tensors:
        more = -(-tensor.numel() // (WIDTH * BLOCK)) * BLOCK
        num_rows += more
        if groups[-1] and num_rows > MOST_ROWS:
            groups.append([])
            num_rows = more
        groups[-1].append(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    found = [_in_rows(group[0]) if len(group) == 1 else _together(group) for group in groups]
    if len(found) == 1:
        return found[0]
    firsts = np.cumsum([0, *(len(one.sums) for one in found)]).tolist()
    return Prints(
        torch.cat([one.sums for one in found]),
        torch.cat([one.norms for one in found]),
        [first + n for first, one in zip(firsts, found, strict=False) for n in one.tensor_of_norm],
    )


def numbers(all_prints: Sequence[Prints]) -> list[Numbers]:
    """[square of the norm, eight signed sums] of each tensor, in order; empty where a value is not finite.

    A sum of tensors of one shape has the sum of their signed sums. The mean square of the differences of two
    tensors' signed sums is the square of the norm of their difference, to about a third. That of its own sums
    stands for a square which float32 does not hold.
    """
    rows: dict[torch.device, list[Numbers]] = {}
    for device in {prints.sums.device for prints in all_prints}:
        own = [prints for prints in all_prints if prints.sums.device == device]
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # they were made on the program's streams
        sums = torch.cat([prints.sums for prints in own]).flatten(1).cpu().double().numpy()
        sums /= ROW_SCALE * COLUMN_SCALE
        norms = torch.cat([prints.norms for prints in own]).cpu().double().numpy()
        firsts = np.cumsum([0, *(len(prints.sums) for prints in own)])
        places = [np.array(p.tensor_of_norm, np.int64) + first for p, first in zip(own, firsts, strict=False)]
        squares = np.bincount(np.concatenate(places), weights=norms * norms, minlength=len(sums))
        with np.errstate(invalid="ignore"):  # of sums that are not finite
            around = np.maximum(np.square(sums).mean(axis=1), np.finfo(np.float32).max)
        squares = np.where(np.isfinite(squares), squares, around)
        rows[device] = np.concatenate((squares[:, None], sums), axis=1).tolist()
    left = {device: iter(of_device) for device, of_device in rows.items()}
    return [
        row if all(map(isfinite, row)) else []
        for prints in all_prints
        for row in islice(left[prints.sums.device], len(prints.sums))
    ]


def _in_rows(tensor: Tensor, num_parts: int = 1) -> Prints:
    """Fingerprints of a tensor; of equal parts of one, if they are more, in whole rows."""
    num_rows = max(-(-tensor.numel() // (num_parts * WIDTH)), 1)
    signs, turns, columns = _signs(tensor.device)
    sums: Tensor | None = None
    norms = []
    step = max(MOST_ROWS >> (num_parts - 1).bit_length(), 1)
    for at in range(0, num_rows, step):
        rows = _rows(tensor, num_parts, at, min(at + step, num_rows)).float()
        first, turn = at % MOST_ROWS, at // MOST_ROWS % NUM_TURNS
        own = signs[:, first : first + rows.shape[1]].expand(num_parts, -1, -1)
        part = torch.bmm(own, rows @ columns)
        sums = part if sums is None else torch.addcmul(sums, part, turns[turn])
        norms.append(torch.linalg.vector_norm(rows, dim=(1, 2)))
    assert sums is not None
    return Prints(sums, norms[0] if len(norms) == 1 else torch.cat(norms), [*range(num_parts)] * len(norms))


def _rows(tensor: Tensor, num_parts: int, start: int, end: int) -> Tensor:
    """These rows of each part of a tensor: [num_parts, end - start, WIDTH]. Zeros fill a last one."""
    size = tensor.numel() // num_parts
    if tensor.is_contiguous() and not size % WIDTH and size:
        return tensor.view(num_parts, -1, WIDTH)[:, start:end]
    until = min(end * WIDTH, size)
    parts = [_elements(tensor, part * size + start * WIDTH, part * size + until) for part in range(num_parts)]
    if until < end * WIDTH:
        parts.append(tensor.new_zeros(end * WIDTH - until))
    return torch.cat(parts).view(num_parts, -1, WIDTH)


def _elements(tensor: Tensor, start: int, end: int) -> Tensor:
    """tensor.reshape(-1)[start:end], without a copy of more than these."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:end]
    size = tensor.numel() // len(tensor)
    first, last = -(-start // size), end // size
    if first > last:  # within one slice of the first dimension
        return _elements(tensor[last], start - last * size, end - last * size)
    pieces = []
    if start < first * size:
        pieces.append(_elements(tensor[first - 1], start - (first - 1) * size, size))
    if first < last:
        pieces.append(tensor[first:last].reshape(-1))
    if last * size < end:
        pieces.append(_elements(tensor[last], 0, end - last * size))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _together(tensors: list[Tensor]) -> Prints:
    """Fingerprints of small tensors: laid out one behind the other, each in whole blocks of rows."""
    device = tensors[0].device
    layout = _layout(tuple([tensor.numel() for tensor in tensors]), tensors[0].dtype, device)
    filled = [piece for pair in zip(tensors, layout.fillings, strict=True) for piece in pair]
    # One call lays out all of them, and all of one type in one kernel; each tensor would need two.
    table = torch._C._nn.flatten_dense_tensors(filled).float().view(-1, BLOCK, WIDTH)
    of_blocks = torch.bmm(layout.signs, table @ _signs(device)[2])
    found = torch.zeros(len(tensors), NUM_ROWS, NUM_COLUMNS, dtype=torch.float32, device=device)
    return Prints(
        found.index_add_(0, layout.tensor_of_block, of_blocks),
        torch.linalg.vector_norm(table, dim=(1, 2)),
        layout.owners,
    )


class _Layout(NamedTuple):
    fillings: list[Tensor]
    """Zeros behind each tensor, to the end of its last block."""
    signs: Tensor
    """Of each block, as rows have them alone."""
    tensor_of_block: Tensor
    owners: list[int]


@lru_cache(maxsize=64)
def _layout(numels: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> _Layout:
    num_blocks = [-(-numel // (WIDTH * BLOCK)) for numel in numels]
    zeros = torch.zeros(WIDTH * BLOCK, dtype=dtype, device=device)
    of_rows = _signs(torch.device("cpu"))[0]
    signs = [of_rows[:, : num * BLOCK].view(NUM_ROWS, num, BLOCK).transpose(0, 1) for num in num_blocks]
    owners = [number for number, num in enumerate(num_blocks) for _ in range(num)]
    return _Layout(
        fillings=[zeros[: -numel % (WIDTH * BLOCK)] for numel in numels],
        signs=torch.cat(signs).to(device),
        tensor_of_block=torch.tensor(owners, dtype=torch.int64, device="cpu").to(device),
        owners=owners,
    )


@lru_cache
def _signs(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Signs along the rows, [NUM_ROWS, MOST_ROWS]; of the next MOST_ROWS and so on, [NUM_TURNS, NUM_ROWS, 1];
    and across, [WIDTH, NUM_COLUMNS]. The same on every rank."""
    generator = torch.Generator().manual_seed(20260101)
    signs, turns, columns = (
        (torch.randint(0, 2, shape, generator=generator, device="cpu") * 2 - 1).float()
        for shape in ((NUM_ROWS, MOST_ROWS), (NUM_TURNS, NUM_ROWS, 1), (WIDTH, NUM_COLUMNS))
    )
    turns[0] = 1.0
    return (signs * ROW_SCALE).to(device), turns.to(device), (columns * COLUMN_SCALE).to(device)
