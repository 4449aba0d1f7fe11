"""Rates and sizes of a GPU, its node and its network, each number with its source.

Rates are in FLOP/s and bytes/s of one GPU and one direction. "Peak" is the data sheet, "sustained" is
what the best kernels reach for seconds under the power limit. A sustained rate that nobody measured is
derived: the peak times the median of sustained / peak over the parts of the same vendor and data type that
have a measurement and are limited by power, and listed in `derived`. (A100 and H20 nearly hold their clock.)
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from aorta.config.yaml_files import convert, near, read_yaml
from aorta.errors import ProjectionError
from aorta.hardware.names import PARTS_DIR, hardware_names, packaged, part_name

DTYPE_BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5}
"""Bytes of one element in memory. tf32 is a way to multiply fp32."""


class RatioInterval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factors that turn a prediction into its likely range: quantiles of leave-one-out residuals."""

    low: float
    high: float


DERIVED_INTERVAL = RatioInterval(low=0.85, high=1.18)
"""Widening of an interval by a derived matrix rate: sustained / peak is 0.54 on MI300X, 0.64 on MI325X, 0.71
on H200, so a part that was not measured may well be a sixth off."""


class NumberSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Origin of a number, and the date it was read."""

    what: str
    date: str
    url: str = ""


class Compute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The compute units (CUs or SMs) of one GPU."""

    num_cus: int
    clock_hz: float
    """The clock that peak_flops is stated at."""
    boost_clock_hz: float
    """The highest clock: what a GPU reaches while most of it idles."""
    sustained_clock_hz: float
    """The clock under a long GEMM; sustained_flops belong to it."""
    peak_flops: dict[str, float]
    sustained_flops: dict[str, float]
    vector_flops: float
    """fp32 outside the matrix units."""
    exp_per_cu_clock: float
    """Exponentials that one CU finishes per clock."""
    lds_bytes_per_cu_clock: float
    lds_rows: float
    """Rows of the left operand that one read of the right one from shared memory serves."""
    register_bytes: float


class PartMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """HBM and the caches in front of it."""

    hbm_bytes: float
    """Capacity as reported to a program (totalGlobalMem): data sheets round, and differ in their GB."""
    hbm_bytes_per_s: float
    sustained_hbm_bytes_per_s: float
    l2_bytes: float
    """Last cache that all compute units share (Infinity Cache on AMD)."""
    l2_bytes_per_s: float
    """All compute units reading it together, at the boost clock."""
    l2_readers: float
    """Neighbouring tiles that one read of an operand serves: cluster multicast."""


class ScaleUp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Links between the GPUs of one domain."""

    topology: Literal["switch", "mesh"]
    """switch: any pair can use all links of a GPU; mesh: one link per pair."""
    domain_size: int
    """GPUs that reach each other over these links."""
    gpu_bytes_per_s: float
    """All links of a GPU together, one direction, as in the data sheet."""
    sustained_gpu_bytes_per_s: float
    """Rate that long collectives approach: payload after headers and protocol."""


class ScaleOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Network cards of one node."""

    gpus_per_node: int
    nics_per_node: int
    nic_bytes_per_s: float
    """Rate of one card in one direction, as in the data sheet."""
    sustained_nic_bytes_per_s: float


class HostLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Link from a GPU to the memory of its host."""

    sustained_bytes_per_s: float
    """Rate in one direction, pinned memory."""


class Launch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time that a kernel costs beside its work."""

    kernel_s: float
    """Time from one kernel's end to the work of the next in the same stream, host far ahead."""
    ramp_s: float
    """Time of a kernel that streams from HBM until memory is busy, and after."""
    host_s: float
    """Host time of one element-wise operation of eager PyTorch."""
    host_gemm_s: float
    """Host time of one matrix multiply of eager PyTorch."""
    host_collective_s: float
    """Host time of one collective of eager PyTorch."""


class GemmEfficiency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fitted factors of the tile model."""

    issue: float
    """Share of the peak rate at the boost clock that the inner loop of one tile reaches."""
    fill_s: float
    """Time of a tile beside its inner loop: filling the pipeline and writing the result."""
    l2: float
    """Share of the L2 rate that all tiles together reach."""
    hbm: float
    """Share of the sustained HBM rate that operands and result reach."""
    unhidden: float
    """Share of the shorter of arithmetic and HBM traffic that does not overlap the longer."""
    power_knee: float
    """Exponent that joins the schedule and the power limit; large: one takes over from the other sharply."""
    interval: RatioInterval


class SdpaEfficiency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fitted factors of one attention kernel family."""

    forward: float
    """Rate of QK^T and PV over the peak at the boost clock, softmax and power limit apart. Those two are
    joined to it, so a fit of all three may end above 1."""
    backward: float
    """Rate of the five GEMMs of the backward pass, in the same terms."""
    softmax_forward: float
    """Time of the softmax that the matrix units wait for, in times of its exponentials."""
    softmax_backward: float
    """Time of the softmax in the backward pass, in the same terms."""
    interval: RatioInterval


class CollectiveEfficiency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fitted terms of collectives."""

    start_s: float
    """A collective of no bytes and one step, on the GPU."""
    hop_s: float
    """Each step over links of the domain."""
    low_latency_hop_s: float
    """Each step in the protocol of the library that sends flags with the data."""
    low_latency_rate: float
    """Share of the link rate that is left for data in that protocol."""
    nic_hop_s: float
    """Each step over the network."""
    peer_s: float
    """Each further peer of an all-to-all in the domain."""
    nic_peer_s: float
    """Each further peer of an all-to-all over the network."""
    half_bytes: float
    """Bytes over the wire at which half of the rate is reached; see projection/collectives.py."""
    own_chunk: float
    """Cost of handling the rank's own chunk, in chunks over the link."""
    all_to_all_link: float
    """Share of the sustained link rate that all-to-all reaches."""
    all_to_all_nic: float
    """Share of the sustained NIC rate that all-to-all reaches when every rank sends to every other."""
    interval: RatioInterval


class Efficiency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fitted constants of a vendor; the file says what each was fitted on."""

    gemm: GemmEfficiency
    flash: SdpaEfficiency
    cudnn: SdpaEfficiency
    collective: CollectiveEfficiency
    memory_interval: RatioInterval

    def sdpa(self, family: Literal["flash", "cudnn"]) -> SdpaEfficiency:
        """The constants of an attention kernel family."""
        return self.flash if family == "flash" else self.cudnn


class StepFactors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factors of a part that whole training steps told."""

    gemm: float
    """Time of a bf16 GEMM in a step over the tile model's: below 1, because the memory-bound work between
    GEMMs leaves power for higher clocks."""
    fp8_gemm: float
    """Time of an FP8 GEMM in a step over the tile model's. Stands for the sustained FP8 rate as well where
    nobody published one."""
    fp4_gemm: float
    """Time of an FP4 GEMM in a step over the tile model's."""


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU in its usual node."""

    name: str
    title: str
    vendor: Literal["amd", "nvidia"]
    architecture: str
    compute: Compute
    memory: PartMemory
    scale_up: ScaleUp
    scale_out: ScaleOut
    host_link: HostLink
    launch: Launch
    efficiency: Efficiency
    step: StepFactors
    sources: dict[str, NumberSource] = {}
    """Dotted name of each number, as in `memory.hbm_bytes`, to where it comes from."""
    derived: tuple[str, ...] = ()
    """Numbers nobody measured, from the rule in this file's head or the one its source states."""


def load_hardware(name_or_path: str | Path, gpu_clock_mhz: float | None = None) -> Hardware:
    """The GPU of that name among the parts, or of a file of the same form; at another clock if one is
    given."""
    hardware = _load(str(name_or_path))
    return hardware if gpu_clock_mhz is None else at_clock(hardware, gpu_clock_mhz * 1e6)


@cache
def _load(name_or_path: str) -> Hardware:
    """A part's file over that of its vendor, every number with its source."""
    path = packaged(Path(name_or_path), "hardware", PARTS_DIR)
    if path.suffix not in (".yaml", ".yml"):
        part = part_name(name_or_path)
        path = PARTS_DIR / f"{part}.yaml"
        if part is None:
            hint = near(name_or_path.lower(), hardware_names())
            raise ProjectionError(f"{name_or_path!r} is not a GPU in config/hardware{hint}")
    settings = read_yaml(path)
    if not isinstance(settings, dict):
        raise ProjectionError(f"{path}: must hold sections such as 'compute:'")
    vendor_files = {file.stem: file for file in (PARTS_DIR / "vendor").glob("*.yaml")}
    vendor_name, own_sources = str(settings.get("vendor")), settings.pop("sources", {})
    if vendor_name not in vendor_files:
        raise ProjectionError(
            f"{path}: vendor must be {' or '.join(sorted(vendor_files))}, got {vendor_name!r}"
        )
    if not isinstance(own_sources, Mapping):
        raise ProjectionError(f"{path}: sources must hold names and what each is, got {own_sources!r}")
    vendor = read_yaml(vendor_files[vendor_name])
    cited = vendor.pop("sources") | own_sources
    provenance: dict[str, str] = {}
    values = sourced_values(_over(vendor, settings), "", str(path), provenance)
    for key, source in provenance.items():
        if source not in cited and source != "derived":
            raise ProjectionError(f"{path}: {key} names the source {source!r}, which sources: does not have")
    sources = {
        name: convert(source, NumberSource, f"{path}: sources.{name}") for name, source in cited.items()
    }
    return msgspec.structs.replace(
        convert(values, Hardware, str(path)),
        sources={key: sources[source] for key, source in provenance.items() if source in sources},
        derived=tuple(key for key, source in provenance.items() if source == "derived"),
    )


def _over(defaults: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a part over those of its vendor, section by section."""
    merged = dict(defaults)
    for name, item in settings.items():
        old = merged.get(name)
        merged[name] = _over(old, item) if isinstance(old, Mapping) and isinstance(item, Mapping) else item
    return merged


def sourced_values(
    node: Mapping[str, Any], prefix: str, path: str, provenance: dict[str, str]
) -> dict[str, Any]:
    """Settings without their sources, which are put into provenance under the dotted names."""
    values: dict[str, Any] = {}
    for name, item in node.items():
        key = f"{prefix}{name}"
        if isinstance(item, Mapping):
            values[name] = sourced_values(item, f"{key}.", path, provenance)
        elif isinstance(item, list):
            if len(item) != 2 or not isinstance(item[1], str):
                raise ProjectionError(f"{path}: {key} must be [value, source], got {item!r}")
            values[name] = _number(item[0], key, path)
            provenance[key] = item[1]
        elif isinstance(item, str | bool):
            values[name] = item
        else:
            raise ProjectionError(f"{path}: {key} = {item!r} has no source, write it as [{item!r}, source]")
    return values


def _number(value: Any, key: str, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ProjectionError(f"{path}: {key} must be a number above 0, got {value!r}")
    return value


def at_clock(hardware: Hardware, sustained_clock_hz: float) -> Hardware:
    """The GPU with its compute units held at another clock. HBM, links and launches keep their speed."""
    old = hardware.compute
    low_mhz, high_mhz = 0.1 * old.boost_clock_hz / 1e6, old.boost_clock_hz / 1e6
    if not low_mhz <= sustained_clock_hz / 1e6 <= high_mhz:
        raise ProjectionError(
            f"--gpu-clock-mhz must be between {low_mhz:.0f} and {hardware.name}'s boost clock "
            f"{high_mhz:.0f}, got {sustained_clock_hz / 1e6:g}"
        )
    ratio = sustained_clock_hz / old.sustained_clock_hz
    compute = msgspec.structs.replace(
        old,
        sustained_clock_hz=sustained_clock_hz,
        boost_clock_hz=sustained_clock_hz,
        sustained_flops={
            dtype: min(flops * ratio, old.peak_flops[dtype] * max(1.0, sustained_clock_hz / old.clock_hz))
            for dtype, flops in old.sustained_flops.items()
        },
    )
    l2_ratio = sustained_clock_hz / old.boost_clock_hz
    memory = msgspec.structs.replace(
        hardware.memory, l2_bytes_per_s=hardware.memory.l2_bytes_per_s * l2_ratio
    )
    return msgspec.structs.replace(hardware, compute=compute, memory=memory)


@cache
def vendor_step(vendor: str) -> StepFactors:
    """Factors of the vendor for parts that have none of their own."""
    values = sourced_values(read_yaml(PARTS_DIR / "vendor" / f"{vendor}.yaml")["step"], "step.", vendor, {})
    return convert(values, StepFactors, vendor)


def sustained_flops(hardware: Hardware, dtype: str) -> float:
    """FLOP/s of the matrix units for this data type."""
    rates = hardware.compute.sustained_flops
    if dtype not in rates:
        raise ProjectionError(f"{hardware.name} has no matrix rate for {dtype!r}{near(dtype, rates)}")
    return rates[dtype]


def boost_flops(hardware: Hardware, dtype: str) -> float:
    """FLOP/s of the matrix units at the highest clock, were power no limit."""
    compute = hardware.compute
    if dtype not in compute.peak_flops:
        raise ProjectionError(
            f"{hardware.name} has no matrix rate for {dtype!r}{near(dtype, compute.peak_flops)}"
        )
    return compute.peak_flops[dtype] * compute.boost_clock_hz / compute.clock_hz


def rate_interval(hardware: Hardware, dtype: str, interval: RatioInterval) -> RatioInterval:
    """Interval of a model, widened where the matrix rate that it uses is itself derived."""
    if f"compute.sustained_flops.{dtype}" not in hardware.derived:
        return interval
    return RatioInterval(low=interval.low * DERIVED_INTERVAL.low, high=interval.high * DERIVED_INTERVAL.high)


def dtype_bytes(dtype: str) -> float:
    """Bytes of one element."""
    if dtype not in DTYPE_BYTES:
        raise ProjectionError(f"{dtype!r} is not a data type{near(dtype, DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def numbers(hardware: Hardware) -> Iterator[tuple[str, str]]:
    """Dotted name of each number and what it rests on, for printing."""
    for key, source in hardware.sources.items():
        yield key, f"{source.what}, {source.date}" + (f", {source.url}" if source.url else "")
    for key in hardware.derived:
        yield key, "derived"
