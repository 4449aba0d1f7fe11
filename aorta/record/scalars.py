"""Scalars that a step logs (loss, gradient norm): copied from the device now, read once it has passed them.

Reading a tensor at once would make the host wait for the device, in every step.
"""

from collections import deque
from typing import Any

import torch

from aorta.device.backend import accelerator

_pinned: deque[torch.Tensor] = deque()
"""Pinned host memory to copy scalars to, used again by any thread: allocating it may wait for the device."""


def scalar(value: Any) -> "float | DeviceScalar":
    """Return a number as it is and a device's tensor as an asynchronous copy; CPU tensors are read at once.

    A DTensor gives its local value: scalars of training are replicated.
    """
    if isinstance(value, torch.Tensor):
        # A DTensor's own methods are Python, dispatched twice; this is what they would give.
        tensor = value._local_tensor if hasattr(value, "_local_tensor") else value
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.numel() != 1:
            raise ValueError(
                f"step.log takes numbers and one-element tensors, got shape {tuple(value.shape)}"
            )
        if accelerator().holds(tensor):
            return DeviceScalar(tensor)
        return float(tensor)
    return float(value)


class DeviceScalar:
    """A copy of a one-element tensor on its way to pinned host memory.

    The copy is queued on the caller's current stream, so it sees the value as the program would,
    and the tensor itself is not kept. `read` may be called once the device has passed a later
    mark of that stream.
    """

    __slots__ = ("_host",)

    def __init__(self, value: torch.Tensor) -> None:
        try:
            self._host = _pinned.pop()
        except IndexError:
            self._host = torch.empty((), dtype=torch.float32, pin_memory=True)
        self._host.copy_(value if value.dim() == 0 else value.reshape(()), non_blocking=True)

    def read(self) -> float:
        value = float(self._host)
        _pinned.append(self._host)
        return value


def read_scalars(scalars: dict[str, "float | DeviceScalar"]) -> dict[str, float]:
    """Read the numbers of a step whose marks the device has passed."""
    return {name: v.read() if isinstance(v, DeviceScalar) else v for name, v in scalars.items()}
