"""The rate that a run's model FLOPs are a share of: the data sheet's, from config/hardware."""

from collections.abc import Mapping, Sequence
from typing import Any

from aorta.errors import AortaError
from aorta.records.schema import GPU_KINDS, PeakRecord


class UnknownPeak(AortaError):
    """The message is the reason, for not_measured."""


def precision_of(config: Mapping[str, Any] | None) -> str | None:
    """train.py's training.precision, where a configuration of that form was given."""
    training = (config or {}).get("training")
    precision = training.get("precision") if isinstance(training, Mapping) else None
    return precision if isinstance(precision, str) else None


def peak_record(devices: Sequence[Mapping[str, Any]], precision: str | None) -> PeakRecord:
    """The dense rate of matrix multiplies of one device in this precision. UnknownPeak where there is none:
    an unlike device is never priced as its namesake."""
    from aorta.hardware import hardware_name_of, load_hardware  # PyYAML, once a run

    names = sorted({str(row.get("name")) for row in devices if row.get("kind") in GPU_KINDS})
    if not names:
        raise UnknownPeak("config/hardware holds GPUs only, and this run used none")
    if len(names) > 1:
        raise UnknownPeak(f"the devices differ: {', '.join(names)}")
    if precision is None:
        raise UnknownPeak("the precision is not known: give aorta.instrument precision, such as 'bf16'")
    hardware_name = hardware_name_of(names[0])
    if hardware_name is None:
        raise UnknownPeak(f"config/hardware has no file for {names[0]}")
    try:
        hardware = load_hardware(hardware_name)
    except AortaError as error:
        raise UnknownPeak(str(error)) from error
    rates = hardware.compute.peak_flops
    if precision not in rates:
        raise UnknownPeak(f"config/hardware has {', '.join(rates)} for {hardware.title}, not {precision}")
    source = hardware.sources.get(f"compute.peak_flops.{precision}")
    return PeakRecord(
        flops_per_s=rates[precision],
        precision=precision,
        hardware=hardware.title,
        origin="derived" if source is None else f"{source.what}, {source.date}",
    )
