"""Products of which the next one makes narrow what they made wide: (A @ x) @ w, which A @ (x @ w) is as well.

Of a matrix with features, and then with a layer's weights, as graph networks have them. Layers one after the
other are none: their weights are what trains.
"""

from collections import Counter
from typing import Any, NamedTuple

import torch

from aorta.attach.without_data import num_passes
from aorta.records.stacks import StackFrame

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_sparse_mm", "_sparse_addmm")


class _Wide(NamedTuple):
    result: torch.Tensor
    """Held, so that no other one gets its storage's number."""
    flops: int
    """Forward."""
    passes: int
    rows: int
    """Of its right factor, which the next product would have instead."""
    line: StackFrame | None


class ProductOrder:
    """Of the forward pass of a call."""

    def __init__(self) -> None:
        self._wide: dict[int, _Wide] = {}
        """By storage, those that may be the left factor of another."""
        self._spared: dict[int, tuple[StackFrame | None, StackFrame | None, int]] = {}
        """By storage, of those that one product alone has read: its line, their own, and FLOPs that are
        spared."""

    def see(
        self,
        name: str,
        given: list[torch.Tensor],
        result: Any,
        flops: int,
        line: StackFrame | None,
        is_of_model: bool,
    ) -> None:
        """An operator that is no view. is_of_model: its right factor is made of weights."""
        factors = given[-2:] if name in PRODUCTS else []
        for one in given:
            wide = self._wide.pop(one.untyped_storage()._cdata, None)
            if self._spared.pop(one.untyped_storage()._cdata, None) or wide is None:
                continue
            is_left = bool(factors) and one is factors[0] and one.shape[-1] == wide.result.shape[-1]
            if is_left and is_of_model and one.stride()[-1] == wide.result.stride()[-1]:  # not transposed
                columns, narrow = wide.result.shape[-1], result.shape[-1]
                passes, height = num_passes(given), wide.result.shape[-2]
                before = wide.passes * wide.flops + passes * flops
                # Backward it goes through the first one as well then, for what it multiplies is trained.
                after = 2 * wide.flops * narrow / columns + passes * flops * wide.rows / height
                if narrow < columns and after < before and one.numel() == wide.result.numel():
                    self._spared[one.untyped_storage()._cdata] = line, wide.line, round(before - after)
        if factors and isinstance(result, torch.Tensor) and not is_of_model:
            rows, passes = factors[1].shape[-2], num_passes(given)
            self._wide[result.untyped_storage()._cdata] = _Wide(result, flops, passes, rows, line)

    def kept(self, storage: int) -> None:
        """What follows may read it."""
        self._spared.pop(storage, None)

    @property
    def flops(self) -> Counter[StackFrame | None]:
        """That the other order spares, by the line of the second product."""
        by_line = Counter[StackFrame | None]()
        for line, _, num in self._spared.values():
            by_line[line] += num
        return by_line

    def first_of(self, second: StackFrame | None) -> StackFrame | None:
        """The line of the first product of those of a second one."""
        return next((first for line, first, _ in self._spared.values() if line == second), None)
