"""Options of a recorder, checked before anything is made, and how messages show a wrong value."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch

from aorta.device.backend import accelerator
from aorta.errors import ConfigError, InstrumentError
from aorta.record.kernel_source import Kernels
from aorta.records.overhead import overhead_limit

Placement = Literal["native", "dedicated"]


@dataclass(frozen=True, kw_only=True)
class RecorderSettings:
    """Options of a recorder; aorta.instrument says what each does. InstrumentError for a wrong value."""

    placement: Placement = "native"
    overhead: float | str | None = "1%"
    telemetry_interval_s: float = 1.0
    config: dict[str, Any] | None = None
    model: dict[str, Any] | None = None
    layout: dict[str, Any] | None = None
    device: torch.device | str | None = None
    kernels: Kernels = "auto"
    flops_per_token: float | None = None
    precision: str | None = None
    stacks: bool = True

    def __post_init__(self) -> None:
        if self.placement not in ("native", "dedicated"):
            raise InstrumentError(f"placement must be 'native' or 'dedicated', got {self.placement!r}")
        try:
            overhead_limit(self.overhead)
        except ConfigError as error:
            raise InstrumentError(str(error)) from None
        interval_s = self.telemetry_interval_s
        if not isinstance(interval_s, int | float) or not 0 < interval_s < math.inf:
            raise InstrumentError(f"telemetry_interval_s must be a number above 0, got {interval_s!r}")
        flops = self.flops_per_token
        if flops is not None and not (is_number(flops) and flops > 0):
            raise InstrumentError(f"flops_per_token must be a number above 0, got {value_text(flops)}")
        _ = self.torch_device  # raises now rather than at the first step

    @property
    def limit(self) -> float | None:
        """The share of the step time that recording may cost; None: every step is recorded.

        Dedicated placement moves collectives, so a step that is not recorded would be another program's.
        """
        return None if self.placement == "dedicated" else overhead_limit(self.overhead)

    @property
    def torch_device(self) -> torch.device | None:
        """The device given; None: the one in use at the first step."""
        try:
            return None if self.device is None else torch.device(self.device)
        except RuntimeError:
            raise InstrumentError(
                f"device must be one of torch's, as in '{accelerator().torch_type}:0', got {self.device!r}"
            ) from None

    def check_writable(self) -> None:
        """Raise InstrumentError where config, model or layout cannot be written to run.json."""
        for name in ("config", "model", "layout"):
            try:
                msgspec.json.encode(getattr(self, name))
            except (TypeError, ValueError, RecursionError) as error:
                raise InstrumentError(f"{name} cannot be written as JSON: {error}") from None


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def value_text(value: Any) -> str:
    """Show a value in a message; not a tensor's, which would have to be waited for."""
    return "a tensor: count on the host" if isinstance(value, torch.Tensor) else repr(value)[:80]
