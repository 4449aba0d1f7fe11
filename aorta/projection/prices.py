"""Seconds of each operation: kernel models of the hardware, and the few factors that a step adds to them."""

from collections.abc import Mapping
from copy import copy
from functools import cache
from typing import Any, Literal, NamedTuple

import msgspec

from aorta.hardware.part import Hardware, StepFactors, sustained_flops
from aorta.projection.collectives import collective_time, domain_size, rank_group
from aorta.projection.constants import constants
from aorta.projection.estimates import KernelEstimate, estimate, memory_bound
from aorta.projection.gemm import TileGemm
from aorta.projection.model import Model
from aorta.projection.ops import AttentionOp, CollectiveOp, Elementwise, GemmOp, Op, Scan
from aorta.projection.plan import Plan
from aorta.projection.sdpa import AttentionSize, TileSdpa

ROUTED = ("experts", "permute", "unpermute")
"""Prefixes of the names of operations on routed tokens."""
CATEGORIES = {axis: f"{axis}_comm" for axis in ("tp", "ep", "cp", "dp", "pp")}
CATEGORIES |= dict.fromkeys(("edp", "copies"), "dp_comm")
"""Of collectives, by the axis of the mesh that they go along."""


class Contention(NamedTuple):
    """Factors on a task's time while the other kind runs beside it."""

    compute: float = 1.0
    communication: float = 1.0


class Factors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factors of a step on kernels that were measured or modelled alone. All that is fitted above kernels.

    constants.yaml says where each comes from; --set factors.gemm=x1.1 changes one.
    """

    gemm: float
    """Time of a bf16 GEMM in a step over the same GEMM repeated alone. This and the next two come from the
    hardware file, which says what they were fitted on."""
    fp8_gemm: float
    """Time of an FP8 GEMM in a step over the same GEMM repeated alone."""
    fp4_gemm: float
    """Time of an FP4 GEMM in a step over the same GEMM repeated alone."""
    grouped: float
    """Further factor on batched GEMMs of experts in FP8 or FP4: conversions run expert by expert."""
    attention: float
    """Time of an attention in a step over the same attention alone."""
    two_widths: float
    """Further factor on attention whose queries are wider than its values, as those of latent heads."""
    scan: float
    """Share of the sustained matrix rate that scans of state spaces reach."""
    rows: float
    """Share of the memory bandwidth in norms, softmax and loss."""
    strided: float
    """Share of it in broadcast, transposed or joined operands."""
    scatter: float
    """Share of it in lookups by index."""
    copy: float
    """Share of it where data are converted and repacked."""
    optimizer: float
    """Share of it in the optimizer."""
    contention_compute: float
    """Compute beside a collective over compute alone."""
    contention_communication: float
    """A collective beside compute over the collective alone."""
    straggler: float
    """Standard deviation of a GPU's step time over its mean, where all wait for the slowest."""
    moe_layer_host_s: float
    """Host time of one layer of experts in Megatron, forward and backward: each asks the GPU for the tokens
    of every expert, so that the host cannot run ahead."""
    expert_host_s: float
    """Host time of each expert of a rank beside that: a GEMM and conversions of its own."""
    graph_host: float
    """Share of the launches of a layer, and of the first of these two, that is left with recorded graphs."""
    eager_launch_s: float
    """Host time per operation of eager PyTorch, autograd included."""
    dtensor_launch_s: float
    """Host time per operation where operands are distributed tensors."""
    compiled_launch_s: float
    """Host time per operation in code from torch.compile."""
    megatron_launch_s: float
    """Host time per operation in Megatron with Transformer Engine."""
    fsdp_unit_s: float
    """Host time that FSDP2 takes per layer, forward and backward together."""
    fsdp_dtensor_unit_s: float
    """Host time that FSDP2 takes per layer where parameters are already split by tp."""

    @property
    def contention(self) -> Contention:
        return Contention(self.contention_compute, self.contention_communication)


def factors_of(hardware: Hardware) -> Factors:
    """Factors of the vendor, with the hardware file's own for steps on the part."""
    return step_factors(hardware.vendor, hardware.step)


@cache
def step_factors(vendor: str, step: StepFactors) -> Factors:
    """Factors of a vendor, with corrections that steps gave for a part."""
    further = {"gemm": step.gemm, "fp8_gemm": step.fp8_gemm, "fp4_gemm": step.fp4_gemm}
    return constants(Factors, "factors.any", f"factors.{vendor}", **further)


class Anchor(NamedTuple):
    """What one measured step says about a user's software; see anchor.py."""

    name: str
    model: Model
    plan: Plan
    part: str
    terms: Mapping[str, float]
    """Measured over projected time by category of operations, and of launches (`host`)."""
    rest: float
    """Measured over projected step with these: a factor on the whole step."""


LAUNCHES = tuple(name for name in Factors.__struct_fields__ if name.endswith("_s"))
"""Factors that are host times."""


class Priced(NamedTuple):
    op: Op
    seconds: float
    """All launches together."""
    category: str
    estimate: KernelEstimate
    """Estimate of one launch, before the factors."""
    link_share: float = 1.0
    """Share of a collective's time that its work on the GPUs takes; below 1 on a slow network."""


class Pricer:
    """Prices operations of one plan on one hardware; equal operations once."""

    def __init__(
        self,
        hardware: Hardware,
        plan: Plan,
        *,
        factors: Factors | None = None,
        disabled_terms: frozenset[str] = frozenset(),
    ) -> None:
        self.hardware, self.plan, self.disabled_terms = hardware, plan, disabled_terms
        self.factors = factors or factors_of(hardware)
        self.contention = self.factors.contention
        self._gemm, self._sdpa = TileGemm(hardware), TileSdpa(hardware)
        self.domain_size = domain_size(hardware, plan.gpus_per_node)
        """GPUs that scale-up links join on the plan's nodes."""
        self._cache: dict[Op, Priced] = {}
        self.unit_runs: dict[int, Any] = {}
        self.units: dict[tuple[str, bool], Any] = {}
        self.anchor: Anchor | None = None
        self._kernels: dict[tuple[object, ...], KernelEstimate] = {}

    def with_plan(self, plan: Plan) -> "Pricer":
        """A pricer for another plan on the same hardware that keeps what was priced."""
        clone = copy(self)
        clone.plan = plan
        clone.domain_size = domain_size(self.hardware, plan.gpus_per_node)
        clone._cache = {}
        clone.unit_runs = {}
        clone.units = {}
        return clone

    def with_factors(self, factors: Factors) -> "Pricer":
        """A pricer for the same plan and part under other factors."""
        clone = self.with_plan(self.plan)
        clone.factors = factors
        clone.contention = factors.contention
        return clone

    def with_anchor(self, anchor: Anchor) -> "Pricer":
        """A pricer under which operations and launches take as long as a measured step says."""
        clone = self.with_plan(self.plan)
        host = anchor.terms.get("host")
        if host is not None:
            launches = {name: getattr(self.factors, name) * host for name in LAUNCHES}
            clone = self.with_factors(msgspec.structs.replace(self.factors, **launches))
        clone.anchor = anchor
        return clone

    def without_term(self, term: str) -> "Pricer":
        """A pricer with one term switched off."""
        if term == "contention":
            return self.with_factors(
                msgspec.structs.replace(self.factors, contention_compute=1.0, contention_communication=1.0)
            )
        clone = self.with_plan(self.plan)
        clone.disabled_terms = self.disabled_terms | {term}
        return clone

    @property
    def family(self) -> Literal["cudnn", "flash"]:
        """Attention kernels: the vendor's tuned ones (cuDNN; AITER under Megatron on AMD) or plain flash."""
        if self.plan.attention == "cudnn" or self.plan.attention == "flash":
            return self.plan.attention
        tuned = self.hardware.vendor == "nvidia" or self.plan.stack == "megatron"
        return "cudnn" if tuned else "flash"

    @property
    def attention_library(self) -> str:
        """Name of the library whose kernels serve the attention family on the part."""
        if self.plan.attention == "unfused":
            return "batched GEMMs"
        names = {
            ("nvidia", "cudnn"): "cuDNN",
            ("nvidia", "flash"): "FlashAttention",
            ("amd", "cudnn"): "AITER",
            ("amd", "flash"): "Composable Kernel",
        }
        return names[self.hardware.vendor, self.family]

    def price(self, op: Op) -> Priced:
        """Seconds of one operation with its category in the breakdown."""
        priced = self._cache.get(op)
        if priced is None:
            priced = self._price(op)
            if self.anchor is not None and priced.category in self.anchor.terms:
                priced = priced._replace(seconds=priced.seconds * self.anchor.terms[priced.category])
            self._cache[op] = priced
        return priced

    def _price(self, op: Op) -> Priced:
        factors = self.factors
        if isinstance(op, GemmOp):
            kernel_estimate = self._kernel(op.m, op.n, op.k, op.dtype, op.layout, op.batch)
            share = {"fp8": factors.fp8_gemm, "fp4": factors.fp4_gemm}.get(op.dtype, factors.gemm)
            share *= self._software(op.name)
            if op.batch > 1 and op.dtype in ("fp8", "fp4"):
                share *= factors.grouped
            return Priced(
                op,
                self._enabled_s("gemm", kernel_estimate.time_s * share * op.launches),
                "gemm",
                kernel_estimate,
            )
        if isinstance(op, AttentionOp):
            kernel_estimate = self._attention(op)
            share = self.plan.slowdown * self.plan.attention_factor * factors.attention
            if op.qk_dim != op.v_dim and self.plan.attention != "unfused":
                share *= factors.two_widths
            return Priced(
                op, self._enabled_s("attention", kernel_estimate.time_s * share), "attention", kernel_estimate
            )
        if isinstance(op, Scan):
            rate = sustained_flops(self.hardware, "bf16") * factors.scan
            kernel_estimate = memory_bound(self.hardware, op.size_bytes, 0.0)
            seconds = (
                max(kernel_estimate.time_s, op.flops / rate)
                + (op.launches - 1) * self.hardware.launch.kernel_s
            )
            return Priced(op, self._enabled_s("attention", seconds), "attention", kernel_estimate)
        if isinstance(op, Elementwise):
            kernel_estimate = memory_bound(self.hardware, op.bytes_read, op.bytes_written, op.flops)
            share = 1.0 if op.access == "stream" else getattr(factors, op.access)
            launch_s = self.hardware.launch.kernel_s
            seconds = (kernel_estimate.time_s - launch_s) / share * self._software(
                op.name
            ) + launch_s * op.launches
            category = "fp8_cast" if op.name.endswith(("_to_fp8", "_to_fp4")) else "elementwise"
            return Priced(op, self._enabled_s(category, seconds), category, kernel_estimate)
        category = CATEGORIES[op.axis]
        kernel_estimate = self._collective(op)
        seconds = self._enabled_s(category, kernel_estimate.time_s * op.launches)
        return Priced(op, seconds, category, kernel_estimate, _link_share(kernel_estimate))

    def _software(self, name: str) -> float:
        """Time of an operation as the plan's software runs it over the model's."""
        routed = name.startswith(ROUTED)
        return self.plan.slowdown * (self.plan.expert_factor if routed else 1.0)

    def _enabled_s(self, category: str, seconds: float) -> float:
        return 0.0 if category in self.disabled_terms else seconds

    def _kernel(self, m: int, n: int, k: int, dtype: str, layout: str, batch: int) -> KernelEstimate:
        key = (m, n, k, dtype, layout, batch)
        kernel_estimate = self._kernels.get(key)
        if kernel_estimate is None:
            kernel_estimate = self._kernels[key] = self._gemm.simulate(m, n, k, dtype, layout, batch)
        return kernel_estimate

    def _attention(self, op: AttentionOp) -> KernelEstimate:
        if self.plan.attention == "unfused" or (
            self.plan.attention == "unfused_windows" and op.window is not None
        ):
            return self._unfused(op)
        key: tuple[object, ...] = (*op[2:], self.family)
        kernel_estimate = self._kernels.get(key)
        if kernel_estimate is None:
            size = AttentionSize(
                op.batch, op.seq_q, op.seq_kv, op.num_heads, op.num_kv_heads, op.qk_dim, op.v_dim,
                causal=op.causal, window=op.window,
            )  # fmt: skip
            kernel_estimate = self._sdpa.simulate(size, op.backward, self.family)
            if op.ring > 1:
                kernel_estimate = self._ring(kernel_estimate, size, op)
            self._kernels[key] = kernel_estimate
        return kernel_estimate

    def _unfused(self, op: AttentionOp) -> KernelEstimate:
        """Batched GEMMs and, between them, masked softmax and dropout over scores that lie in memory."""
        heads = op.batch * op.num_heads
        scores = float(heads) * op.seq_q * op.seq_kv
        sizes = [(op.seq_q, op.seq_kv, op.qk_dim), (op.seq_q, op.v_dim, op.seq_kv)]
        if op.backward:
            sizes = [
                (op.seq_q, op.seq_kv, op.v_dim),
                (op.seq_kv, op.v_dim, op.seq_q),
                (op.seq_q, op.qk_dim, op.seq_kv),
                (op.seq_kv, op.qk_dim, op.seq_q),
            ]
        parts = [self._kernel(m, n, k, "bf16", "TN", heads) for m, n, k in sizes]
        # bf16 scores and one byte of dropout mask: read and written by both kernels of a pass.
        passes = (5.0, 4.0) if op.backward else (4.0, 5.0)
        softmax_kernels = [memory_bound(self.hardware, scores * read, scores * (9 - read)) for read in passes]
        share = self.factors.rows
        time_s = sum(part.time_s for part in parts) + sum(part.time_s / share for part in softmax_kernels) / 2
        return estimate(time_s, "memory", "attention by GEMMs", self.hardware.efficiency.flash.interval)

    def _ring(self, masked: KernelEstimate, size: AttentionSize, op: AttentionOp) -> KernelEstimate:
        """Adds the kernels of a ring: own keys under the mask, half of every other rank's pairs without."""
        seq_kv = op.seq_kv if op.window is None else min(op.seq_kv, op.window)
        unmasked_size = msgspec.structs.replace(size, causal=False, window=None, seq_kv=max(1, seq_kv // 2))
        unmasked = self._sdpa.simulate(unmasked_size, op.backward, self.family)
        # Windows end within the ranks next to this one.
        steps = op.ring - 1
        if op.window is not None:
            steps = min(steps, -(-op.window // op.seq_kv))
        time_s = masked.time_s + steps * unmasked.time_s
        share = time_s / masked.time_s
        return KernelEstimate(
            time_s,
            unmasked.bound,
            f"{masked.source}, ring of {op.ring}",
            masked.low_s * share,
            masked.high_s * share,
        )

    def _collective(self, op: CollectiveOp) -> KernelEstimate:
        num_ranks, stride = self.plan.mesh_axis(op.axis)
        group = rank_group(num_ranks, self.hardware, stride, self.plan.gpus_per_node)
        name = "p2p" if op.op == "send_recv" else op.op
        # DeepEP sends over the network in parallel with the links of the node, by the rail of the receiver.
        algorithm: Literal["auto", "pxn"] = "pxn" if op.axis == "ep" and self.plan.deepep else "auto"
        return collective_time(name, op.size_bytes, group, self.hardware, algorithm)


def _link_share(estimate: KernelEstimate) -> float:
    """Share of a collective's time that its work on the GPUs takes: all of it where the network is faster."""
    details = estimate.details
    if details.get("nic_s", 0.0) <= details.get("link_s", 0.0):
        return 1.0
    return (details["latency_s"] + details["link_s"]) / estimate.time_s
