"""Fingerprints of tensors: a norm and eight sums with signs, which tell of a sum of tensors what they
tell of its parts, and are far apart for tensors that are."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

WIDTH = 64
NUM_ROWS, NUM_COLUMNS = 4, 2
"""Sets of signs along and across a tensor laid out in rows of WIDTH: their products give the sums."""
BLOCK = 8
"""Rows that are summed together where tensors are laid out one behind the other."""
MOST_TOGETHER = 1 << 22
"""Elements that are laid out together at most: larger tensors keep the device busy alone."""
_signs: dict[Any, Tensor] = {}


def fingerprint(tensor: Tensor) -> Tensor:
    """[square of the norm, eight signed sums] on the tensor's device, in float64.

    A sum of tensors of one shape has the sum of their signed sums. The mean square of the differences of two
    tensors' signed sums is the square of the norm of their difference, to about a third.
    """
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    flat = flat.to(torch.float64 if flat.dtype == torch.float64 else torch.float32)
    num_rows = flat.numel() // WIDTH
    table, rest = flat[: num_rows * WIDTH].view(num_rows, WIDTH), flat[num_rows * WIDTH :]
    sums = _of_rows(num_rows, flat).T @ table
    if rest.numel():
        sums[:, : rest.numel()] += rest
    signed = sums.double() @ _of_columns(flat.device)
    return torch.cat((flat.square().sum(dtype=torch.float64).reshape(1), signed.reshape(-1)))


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Row by row the fingerprints of plain tensors of one device, in few kernels however many they are."""
    groups: list[list[int]] = [[]]
    num = 0
    for place, tensor in enumerate(tensors):
        num += tensor.numel()
        if groups[-1] and num > MOST_TOGETHER:
            groups.append([])
            num = tensor.numel()
        groups[-1].append(place)
    rows = []
    for places in groups:
        group = [tensors[place] for place in places]
        if len(group) == 1 or any(tensor.is_complex() for tensor in group):
            rows += [fingerprint(tensor).unsqueeze(0) for tensor in group]
        else:
            rows.append(_together(group))
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _together(tensors: list[Tensor]) -> Tensor:
    """Fingerprints of small tensors: laid out one behind the other, each in whole blocks of rows."""
    device = tensors[0].device
    numels = tuple([tensor.numel() for tensor in tensors])
    layout = _layout(numels, device)
    table = torch.zeros(layout.num_rows * WIDTH, device=device)
    flat = torch._C._nn.flatten_dense_tensors(tensors)  # one call, where each tensor would need two
    torch._foreach_copy_(list(table.split_with_sizes(layout.pieces)[::2]), flat.split_with_sizes(numels))
    table = table.view(layout.num_rows, WIDTH)
    across = (table @ _of_columns(device).float()).double()
    signed = layout.signs.unsqueeze(2) * across.unsqueeze(1)
    values = torch.cat((table.square().sum(1, dtype=torch.float64, keepdim=True), signed.flatten(1)), 1)
    of_blocks = values.view(-1, BLOCK, values.shape[1]).sum(1)
    found = torch.zeros(len(tensors), values.shape[1], dtype=torch.float64, device=device)
    return found.index_add_(0, layout.tensor_of_block, of_blocks)


class _Layout(NamedTuple):
    pieces: list[int]
    """Elements of each tensor, then those that fill its last block."""
    num_rows: int
    signs: Tensor
    """Of each row, as fingerprint() has them: a tensor's last row is added as it is, if it is not whole."""
    tensor_of_block: Tensor


@lru_cache(maxsize=64)
def _layout(numels: tuple[int, ...], device: torch.device) -> _Layout:
    num_blocks = [-(-numel // (WIDTH * BLOCK)) for numel in numels]
    of_rows = _of_rows(max(num_blocks) * BLOCK, torch.empty(0)).double()
    signs = []
    for numel, num in zip(numels, num_blocks, strict=True):
        own = of_rows[: num * BLOCK].clone()
        own[numel // WIDTH :] = 1.0
        signs.append(own)
    numbers = torch.arange(len(numels)).repeat_interleave(torch.tensor(num_blocks))
    return _Layout(
        pieces=[
            piece
            for numel, num in zip(numels, num_blocks, strict=True)
            for piece in (numel, num * BLOCK * WIDTH - numel)
        ],
        num_rows=sum(num_blocks) * BLOCK,
        signs=torch.cat(signs).to(device),
        tensor_of_block=numbers.to(device),
    )


def _of_rows(num_rows: int, like: Tensor) -> Tensor:
    """Signs of the first rows; the same numbers on every rank and for every length."""
    key = (like.device, like.dtype)
    known = _signs.get(key)
    if known is None or len(known) < num_rows:
        generator = torch.Generator().manual_seed(20260101)
        length = max(num_rows, 1024 if known is None else 2 * len(known))
        # Drawn row by row, so that a longer draw begins with the shorter one.
        signs = torch.randint(0, 2, (length, NUM_ROWS), generator=generator) * 2 - 1
        known = _signs[key] = signs.to(like.device, like.dtype)
    return known[:num_rows]


def _of_columns(device: torch.device) -> Tensor:
    known = _signs.get(device)
    if known is None:
        generator = torch.Generator().manual_seed(20260102)
        signs = torch.randint(0, 2, (WIDTH, NUM_COLUMNS), generator=generator) * 2 - 1
        known = _signs[device] = signs.to(device, torch.float64)
    return known
