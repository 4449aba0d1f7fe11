"""An attention's size and kernel family, and the interface of what prices it."""

from typing import Literal, Protocol

import msgspec

from aorta.errors import ProjectionError
from aorta.hardware import dtype_bytes
from aorta.projection.kernels.estimate import KernelEstimate

Family = Literal["flash", "cudnn"]
FAMILIES = ("flash", "cudnn")


class AttentionSize(msgspec.Struct, frozen=True):
    """A checked problem. causal aligns the last query with the last key."""

    batch: int
    seq_q: int
    seq_kv: int
    num_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    dtype: str = "bf16"
    causal: bool = True
    window: int | None = None
    """Keys that each query sees at most, under the causal mask."""

    def __post_init__(self) -> None:
        for name in ("batch", "seq_q", "seq_kv", "num_heads", "num_kv_heads", "head_dim_qk", "head_dim_v"):
            if getattr(self, name) < 1:
                raise ProjectionError(f"attention needs {name} of at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ProjectionError(
                f"num_kv_heads = {self.num_kv_heads} must divide num_heads = {self.num_heads}"
            )
        if self.causal and self.seq_kv < self.seq_q:
            raise ProjectionError(
                f"causal attention needs seq_kv of at least seq_q = {self.seq_q}, got {self.seq_kv}"
            )
        dtype_bytes(self.dtype)

    @property
    def scores(self) -> float:
        """Query-key pairs that count, over batch and heads."""
        pairs = float(self.seq_q) * self.seq_kv
        if self.causal:
            pairs -= self.seq_q * (self.seq_q - 1) / 2.0
        if self.window is not None and self.causal and self.window < self.seq_kv:
            first = min(self.window, self.seq_q) if self.seq_kv == self.seq_q else 0
            pairs = float(self.seq_q) * self.window - first * (first - 1) / 2.0
        return pairs * self.batch * self.num_heads

    def flops(self, backward: bool) -> float:
        """QK^T and PV forward; QK^T again, dP, dV, dQ, dK backward."""
        qk, v = self.head_dim_qk, self.head_dim_v
        return 2.0 * self.scores * (3 * qk + 2 * v if backward else qk + v)

    def bytes_moved(self, backward: bool) -> float:
        """Q, K, V, O once; backward also dO, dQ, dK, dV and dQ in fp32 twice (sum, then convert)."""
        q = self.batch * self.num_heads * self.seq_q
        kv = self.batch * self.num_kv_heads * self.seq_kv
        tensors = (q + kv) * float(self.head_dim_qk + self.head_dim_v)
        size = dtype_bytes(self.dtype)
        if not backward:
            return tensors * size + q * 4.0
        return 2 * tensors * size + q * self.head_dim_v * size + q * self.head_dim_qk * 8.0 + q * 12.0


class SdpaBackend(Protocol):
    """A model of attention time on one GPU."""

    def simulate(self, size: AttentionSize, backward: bool, family: Family = "flash") -> KernelEstimate: ...


def checked_family(family: str) -> Family:
    """The kernel family, or an error that names both."""
    if family not in FAMILIES:
        raise ProjectionError(f"attention family {family!r} is not one of {', '.join(FAMILIES)}")
    return "cudnn" if family == "cudnn" else "flash"
