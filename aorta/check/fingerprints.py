"""Fingerprints of tensors: a norm and eight sums with signs, which tell of a sum of tensors what they
tell of its parts, and are far apart for tensors that are."""

from typing import Any

import torch
from torch import Tensor

WIDTH = 64
NUM_ROWS, NUM_COLUMNS = 4, 2
"""Sets of signs along and across a tensor laid out in rows of WIDTH: their products give the sums."""
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
