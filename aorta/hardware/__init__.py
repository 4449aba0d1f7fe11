"""GPUs, nodes and networks: rates and sizes of each part, every number with its source.

part   the form of a part, reading it (load_hardware), and rates by data type and clock
names  from a device's own name, or a person's, to the file of its part
parts/ a file for each part; parts/vendor/ for what parts of a vendor share
"""

from aorta.hardware.names import hardware_name_of, hardware_names, part_name
from aorta.hardware.part import (
    DERIVED_INTERVAL,
    DTYPE_BYTES,
    Hardware,
    NumberSource,
    RatioInterval,
    SdpaEfficiency,
    StepFactors,
    at_clock,
    boost_flops,
    dtype_bytes,
    load_hardware,
    numbers,
    rate_interval,
    sourced_values,
    sustained_flops,
    vendor_step,
)

__all__ = [
    "DERIVED_INTERVAL",
    "DTYPE_BYTES",
    "Hardware",
    "NumberSource",
    "RatioInterval",
    "SdpaEfficiency",
    "StepFactors",
    "at_clock",
    "boost_flops",
    "dtype_bytes",
    "hardware_name_of",
    "hardware_names",
    "load_hardware",
    "numbers",
    "part_name",
    "rate_interval",
    "sustained_flops",
    "sourced_values",
    "vendor_step",
]
