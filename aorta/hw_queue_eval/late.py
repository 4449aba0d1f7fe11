"""torch, imported when something of it is first used.

The command line shows what workloads declare in the files in which they run. Importing torch takes seconds,
and neither a list of workloads nor a help text needs it. A workload's file therefore has

    from __future__ import annotations  # an annotation that was evaluated would import torch

    from aorta.hw_queue_eval.late import Tensor, torch

and uses torch inside functions alone. What was used once is an attribute like any other from then on, so that
no launch takes longer by it; what replaces a function of torch later is not seen.
"""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Tensor", "dist", "functional", "torch"]

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as functional
    from torch import Tensor
else:

    class _Late:
        def __init__(self, module: str) -> None:
            self._module = module

        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module(self._module), name)
            setattr(self, name, value)
            return value

    torch = _Late("torch")
    dist = _Late("torch.distributed")
    functional = _Late("torch.nn.functional")
    Tensor = "torch.Tensor"  # for annotations
