"""Operators that a forward pass calls on tensors with data, made such that they run on copies without."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

OF_THE_HOST = ("cpu", "meta")


class WithoutData:
    """Of one call of a copy of the model.

    A model makes tensors on the device that it knows by name (torch.arange(n, device="cuda")), and uses some
    that it does not hold: they meet copies on the meta device, which torch refuses. On the host they keep
    their data until then, since programs choose by such numbers.
    """

    def __init__(self, made: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """made: told of each tensor with data, and what stands for it."""
        self._made = made
        self._stands_for: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By id of a tensor with data, which is held so that no other one gets its id."""

    def __call__(self, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type not in OF_THE_HOST:
            kwargs = {
                **kwargs,
                "device": torch.device("meta"),
                **({"pin_memory": False} if "pin_memory" in kwargs else {}),
            }
        given = tensors_in((args, kwargs))
        if any(one.is_meta for one in given) and any(map(_has_data, given)):
            args, kwargs = tree_map(self._of, (args, dict(kwargs)))
        return args, dict(kwargs)

    def _of(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not _has_data(leaf):
            return leaf
        if id(leaf) not in self._stands_for:
            empty = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
            self._made(leaf, empty)
            self._stands_for[id(leaf)] = leaf, empty
        return self._stands_for[id(leaf)][1]


def tensors_in(nested: Any) -> list[torch.Tensor]:
    """In what an operator is called with, or gives."""
    if isinstance(nested, torch.Tensor):
        return [nested]
    if isinstance(nested, dict):
        nested = nested.values()
    elif not isinstance(nested, (tuple, list)):
        return []
    return [tensor for one in nested for tensor in tensors_in(one)]


def is_sparse(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided


def num_passes(given: list[torch.Tensor]) -> int:
    """Products of an operator on these: the forward pass's, and the gradients of those that have some."""
    return 1 + sum(one.requires_grad and one.dim() > 1 for one in given)


def _has_data(tensor: torch.Tensor) -> bool:
    """A number without dimensions of the host may meet tensors of any device."""
    return (
        type(tensor) is torch.Tensor
        and not tensor.is_meta
        and (tensor.dim() > 0 or tensor.device.type != "cpu")
    )


class OneType(TorchFunctionMode):
    """Calls once more in one type what refuses floats of several, as autocast would have cast them: it is
    off, and a model may cast by itself what autocast gives the type to elsewhere (a mask of attention)."""

    is_told_causal = False
    """The last call of scaled_dot_product_attention, which makes a mask of that where there is no data."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.is_told_causal = bool(kwargs.get("is_causal", args[5:6] == (True,)))
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            found = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if _is_float(leaf)}
            if len(found) < 2:
                raise
        widest = max(found, key=lambda dtype: dtype.itemsize)
        args, kwargs = tree_map(lambda leaf: leaf.to(widest) if _is_float(leaf) else leaf, (args, kwargs))
        return func(*args, **kwargs)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
