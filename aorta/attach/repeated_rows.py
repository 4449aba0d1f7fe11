"""Products of rows with weights, where rows were repeated before: pairs of objects, what both ends of an edge
hold, a state beside each place that is looked at. Multiplied first, and repeated then, they are as many as
they differ.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from aorta.attach.without_data import num_passes, tensors_in
from aorta.records.stacks import StackFrame

COPIES = ("clone", "_to_copy", "repeat")
FLOPS_OF_A_BYTE = 24.0
"""That a larger result costs, which is repeated in place of what it is made of: in three passes, on a CPU."""


class _Rows(NamedTuple):
    tensor: torch.Tensor
    """Held, so that no other one gets its storage's number."""
    part: float
    """Of its rows, that differ."""


class RepeatedRows:
    """Of one call of a model."""

    def __init__(self) -> None:
        self._rows: dict[int, _Rows] = {}
        """By storage."""
        self._maps: dict[int, _Rows] = {}
        """The same of places of maps, by storage."""
        self.flops = Counter[StackFrame | None]()
        """Of both passes, for rows that were multiplied before, by line."""

    def see(
        self,
        name: str,
        args: Any,
        given: list[torch.Tensor],
        result: Any,
        flops: int,
        line: StackFrame | None,
        is_weight: Callable[[torch.Tensor], bool],
    ) -> None:
        """is_weight: whether a tensor is computed from what the model holds alone."""
        if name.endswith("_") and given:  # written to, it is what it was no more
            for known in (self._rows, self._maps):
                known.pop(given[0].untyped_storage()._cdata, None)
            return
        if name == "convolution":
            self._see_convolution(args, result, flops, line, is_weight)
            return
        if flops:
            for rows, weight in (given[-2:], given[-1:-3:-1]) if len(given) > 1 else ():
                part = self._part(rows)
                if part < 1 and is_weight(weight):
                    more_bytes = max(result.nbytes - rows.nbytes, 0)
                    saved = num_passes(given) * (1 - part) * flops - FLOPS_OF_A_BYTE * more_bytes
                    self.flops[line] += max(round(saved), 0)
            return
        made = tensors_in(result)
        if len(made) != 1 or made[0].dim() < 2 or not given:
            return
        if name == "cat" and len(args) > 1 and args[1] == 1 and made[0].dim() > 2:
            part = sum(self._part_of_places(one) * one.numel() for one in given) / made[0].numel()
            if part < 1:
                self._maps[made[0].untyped_storage()._cdata] = _Rows(made[0], part)
        part = 1.0
        if name == "cat":
            part = sum(self._part(one) * one.numel() for one in given) / made[0].numel()
        elif name in COPIES or (_picks_rows(name, args) and not is_weight(given[0])):
            part = min(self._part(given[0]) * given[0].numel() / made[0].numel(), 1.0)
        if part < 1 and made[0].shape[-1] >= given[0].shape[-1]:
            self._rows[made[0].untyped_storage()._cdata] = _Rows(made[0], part)

    def _see_convolution(
        self,
        args: Any,
        result: Any,
        flops: int,
        line: StackFrame | None,
        is_weight: Callable[[torch.Tensor], bool],
    ) -> None:
        """Of one place each, which is a product of its channels with weights: rows there are columns."""
        maps, weight, bias, stride, padding, _, is_transposed = args[:7]
        given = [one for one in (maps, weight, bias) if one is not None]
        made = self._maps.get(maps.untyped_storage()._cdata)
        is_of_places = {*stride} == {1} and {*padding} == {0} and not is_transposed
        is_product = is_of_places and weight.shape[2:].numel() == 1 and weight.shape[1] == maps.shape[1]
        if made is not None and made.tensor.shape == maps.shape and is_product and is_weight(weight):
            more_bytes = max(result.nbytes - maps.nbytes, 0)
            saved = num_passes(given) * (1 - made.part) * flops - FLOPS_OF_A_BYTE * more_bytes
            self.flops[line] += max(round(saved), 0)

    @staticmethod
    def _part_of_places(one: torch.Tensor) -> float:
        """Of the places of a map, channels behind its rows, that differ."""
        repeated = [size for size, stride in zip(one.shape[2:], one.stride()[2:], strict=True) if not stride]
        return 1 / math.prod(repeated) if repeated else 1.0

    def _part(self, one: torch.Tensor) -> float:
        """Of the rows of a tensor, that differ; 1 of what takes them apart."""
        seen = one.numel()
        for size, stride in zip(one.shape, one.stride(), strict=True):
            if not stride:
                seen //= max(size, 1)
        if not one.numel() or not one.dim() or (one.shape[-1] > 1 and not one.stride(-1)):
            return 1.0
        made = self._rows.get(one.untyped_storage()._cdata)
        if made is not None and (made.tensor.numel() != seen or made.tensor.shape[-1] != one.shape[-1]):
            return 1.0
        return seen / one.numel() * (1.0 if made is None else made.part)


def _picks_rows(name: str, args: Any) -> bool:
    """Whole rows, by numbers that may come more than once."""
    num_dims: int = args[0].dim() if name in ("index", "index_select") else 0
    if name == "index_select":
        return int(args[1]) % num_dims < num_dims - 1
    return name == "index" and len(args[1]) < num_dims
