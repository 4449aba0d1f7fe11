"""Copies of a model on the meta device, which hold no data, no random number and no hook of the program's."""

from typing import Any

import torch
from torch.nn import Module
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_map

from aorta.attach.compiled_modules import CALL, as_written
from aorta.attach.needless_batches import MOST_ENTRIES, plain_class, unwrapped
from aorta.attach.without_data import is_sparse
from aorta.device.backend import backend_of

OF_WEIGHTS = (WeightNorm, SpectralNorm)
"""Hooks of torch's own that compute a weight before each call, of nothing but what the module holds."""


class NotCountedError(Exception):
    """Why there is no number."""


LEFT_OUT = "wrapper_left_out"
"""Attribute of a copy whose forward was wrapped."""
MOST_MODULES = 20_000
LEAST_ROWS = 64
"""Of a matrix, and columns, whose zeros are counted."""
TENSOR_AXES = ("tp", "tensor", "model", "mp")
"""Axes of device meshes whose ranks share the work of one model, and are given the same batch."""
REFUSED_AXES = ("ep", "cp", "pp", "expert", "context", "pipeline")
"""Axes whose ranks share it otherwise."""


def copy_without_data(module: Module) -> Module:
    """Same modules, with parameters and buffers on the meta device, and without hooks but OF_WEIGHTS.

    Wrappers are left out: what DDP and torch.compile wrap, or compile in place. Raises NotCountedError.
    """
    module = unwrapped(module)
    if sum(1 for _ in module.modules()) > MOST_MODULES:
        raise NotCountedError(f"the model has more than {MOST_MODULES:,} modules")
    if any(type(inner).__name__ == "FullyShardedDataParallel" for inner in module.modules()):
        raise NotCountedError("FSDP1 keeps parameters flat")
    return _copied(module, {})


def num_ranks_sharing(module: Module) -> int:
    """Ranks that share the work of one model, by the meshes that its parameters lie on: those of a tensor
    axis; where a mesh has no names, all of it where matrices are sharded though not by FSDP.

    Raises NotCountedError where ranks share it otherwise, or may do so.
    """
    of_fsdp = {
        id(parameter)
        for inner in module.modules()
        if plain_class(type(inner)) is not type(inner)
        for parameter in inner.parameters()
    }
    sizes: set[int] = set()
    for name, parameter in module.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        axes = getattr(mesh, "mesh_dim_names", None) or ()
        for axis, size in zip(axes, getattr(mesh, "shape", ()), strict=False):
            if axis.startswith(REFUSED_AXES):
                raise NotCountedError(f"ranks of the axis {axis} share the work of one model")
            if axis.startswith(TENSOR_AXES):
                sizes.add(size)
        if mesh is None or axes or id(parameter) in of_fsdp:
            continue
        if any(not placement.is_replicate() for placement in getattr(parameter, "placements", ())):
            if parameter.dim() > 2 or mesh.ndim > 1:  # experts, which get tokens of their own
                raise NotCountedError(
                    f"{name} is sharded over a mesh without names: ranks may share the work of one model"
                )
            sizes.add(mesh.size())
    if len(sizes) > 1:
        raise NotCountedError("different numbers of ranks share the work of parts of the model")
    return sizes.pop() if sizes else 1


def _copied(module: Module, known: dict[int, Any]) -> Module:
    module = unwrapped(module)
    if id(module) in known:
        found: Module = known[id(module)]
        return found
    made: Module = object.__new__(plain_class(type(module)))
    known[id(module)] = made
    state = {name: as_written(value) for name, value in module.__dict__.items() if name != CALL}
    for name, value in state.items():
        if name in ("_parameters", "_buffers"):
            state[name] = {key: _copied_tensor(tensor, known) for key, tensor in value.items()}
        elif name == "_modules":
            state[name] = {key: None if one is None else _copied(one, known) for key, one in value.items()}
        elif name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(
            value, dict
        ):
            state[name] = type(value)((key, hook) for key, hook in value.items() if type(hook) in OF_WEIGHTS)
        elif isinstance(value, Module):
            state[name] = _copied(value, known)
        elif isinstance(value, (torch.Tensor, list, tuple, dict)):
            state[name] = tree_map(
                lambda leaf: (
                    _copied_tensor(leaf, known)
                    if isinstance(leaf, torch.Tensor)
                    else _copied(leaf, known)
                    if isinstance(leaf, Module)
                    else leaf
                ),
                value,
            )
        elif getattr(value, "__self__", None) is module and hasattr(value, "__func__"):
            state[name] = value.__func__.__get__(made)
    own = state.get("forward")
    if own is not None and (
        getattr(own, "__self__", None) is not made or hasattr(own.__func__, "__wrapped__")
    ):
        del state["forward"]  # a wrapper, of autocast or of checkpoints, which would call the model itself
        state[LEFT_OUT] = getattr(own, "__func__", None) is not type(made).forward
    made.__dict__.update(state)
    return made


def _copied_tensor(tensor: torch.Tensor | None, known: dict[int, Any]) -> torch.Tensor | None:
    if tensor is None:
        return None
    if id(tensor) not in known:
        if _stays_sparse(tensor):
            return tensor
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")  # of a DTensor: the whole one
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        else:
            _note_zeros(tensor, made)
        made.copy_of = id(tensor)  # type: ignore[attr-defined]
        known[id(tensor)] = made
    found: torch.Tensor = known[id(tensor)]
    return found


def without_data(tensor: torch.Tensor) -> torch.Tensor:
    """What a module was called with: shape and type. A gradient goes on where one would."""
    if _stays_sparse(tensor):
        return tensor
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    _note_zeros(tensor, made)
    return made.requires_grad_(tensor.requires_grad)


def _note_zeros(tensor: torch.Tensor, made: Any) -> None:
    """Of a matrix how many entries are not zero, which stays on its device until the end. Of a plain tensor
    alone, as in NeedlessBatches.is_table."""
    is_of_floats = tensor.is_floating_point() or tensor.dtype == torch.bool  # such as a mask
    is_matrix = tensor.dim() > 1 and min(tensor.shape[-2:]) >= LEAST_ROWS and is_of_floats
    is_matrix = is_matrix and tensor.numel() <= MOST_ENTRIES
    devices = backend_of(tensor.device)
    if is_matrix and type(tensor) is torch.Tensor and not (devices.is_device and devices.is_capturing()):
        made.num_full = torch.count_nonzero(tensor)


def _stays_sparse(tensor: torch.Tensor) -> bool:
    """Such a matrix stays as it is: its shape does not tell the FLOPs of products with it. What its gradient
    takes is not known."""
    if is_sparse(tensor) and tensor.requires_grad:
        raise NotCountedError("a tensor of the model is sparse and trains: its shape does not tell the FLOPs")
    return is_sparse(tensor)


def form_of(copy: Module) -> Any:
    return type(copy), tuple(one.shape for one in copy.parameters())


def held_by(module: Module) -> list[torch.Tensor]:
    """Buffers and tensors, which are no parameters."""
    of_modules = (
        one for inner in module.modules() for one in (*inner._buffers.values(), *vars(inner).values())
    )
    return [one for one in of_modules if isinstance(one, torch.Tensor)]
