"""The work of a step as plain data: each operation with its true size on one rank."""

from typing import Literal, NamedTuple

BF16 = 2
"""Bytes of one element."""
FP32 = 4
"""Bytes of one element."""

Phase = Literal["forward", "dgrad", "wgrad", "recompute", "optimizer"]
"""dgrad: every part of the backward pass that the layer before waits for; wgrad: weight gradients."""

Access = Literal["stream", "rows", "strided", "scatter", "copy"]
"""Access of an element-wise kernel to memory, which decides the share of the bandwidth it reaches.
stream: contiguous; rows: reductions along rows (norms, softmax); strided: broadcast, transposed or joined
operands; scatter: by index; copy: converts and repacks (gradients into a flat buffer)."""


OverlapMode = Literal["", "next", "chunks_next", "chunks_previous"]
"""Place of a collective. '': between its neighbours, which wait. next: while the next GEMM or attention
runs. chunks_next, chunks_previous: in as many chunks as it has ranks beside the GEMM that uses or feeds it,
so that one chunk stays outside."""


class GemmOp(NamedTuple):
    """D[m, n] += A[m, k] B[k, n], batch times. launches above 1: one after the other instead of batched."""

    name: str
    phase: Phase
    m: int
    n: int
    k: int
    layout: Literal["TN", "NN", "NT"]
    dtype: str = "bf16"
    batch: int = 1
    launches: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.batch * self.launches


class AttentionOp(NamedTuple):
    """Softmax(Q K^T) V of the heads of one rank; backward its five products."""

    name: str
    phase: Phase
    batch: int
    seq_q: int
    seq_kv: int
    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    causal: bool = True
    backward: bool = False
    launches: int = 1
    window: int | None = None
    """Keys that a query sees at most."""
    ring: int = 1
    """Context parallelism as a ring: the rank's own keys, then ring - 1 kernels of half the pairs each, one
    for the keys of every other rank. Early and late blocks are dealt out so that all have the same work."""

    @property
    def flops(self) -> float:
        products = (3 * self.qk_dim + 2 * self.v_dim) if self.backward else (self.qk_dim + self.v_dim)
        pairs = float(self.seq_q) * self.seq_kv / (2 if self.causal else 1) * self.ring
        if self.window is not None and self.window < self.seq_kv:
            pairs = float(self.seq_q) * self.window - self.window**2 / 2
        return 2.0 * self.batch * self.num_heads * pairs * products


class Scan(NamedTuple):
    """A state space over the sequence: chunked products, and the traffic of their operands."""

    name: str
    phase: Phase
    flops: float
    size_bytes: float
    """Read and written."""
    launches: int = 5


class Elementwise(NamedTuple):
    name: str
    phase: Phase
    bytes_read: float
    bytes_written: float
    access: Access = "stream"
    flops: float = 0.0
    launches: int = 1


class CollectiveOp(NamedTuple):
    """Collective on the group of one axis. size_bytes is the full (gathered, unscattered) buffer."""

    name: str
    phase: Phase
    op: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
    axis: Literal["tp", "ep", "cp", "dp", "edp", "copies", "pp"]
    size_bytes: float
    overlap: OverlapMode = ""
    launches: int = 1


Op = GemmOp | AttentionOp | Scan | Elementwise | CollectiveOp
