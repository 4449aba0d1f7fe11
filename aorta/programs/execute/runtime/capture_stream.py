"""The stream on which captures begin, which cannot be the default stream."""

import torch

from aorta.device.streams import stream_apart

_capturing: dict[torch.device, torch.cuda.Stream] = {}


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One per device and process; none of those that aorta.device.streams.kept_streams lends."""
    if device not in _capturing:
        _capturing[device] = stream_apart(device)
    return _capturing[device]
