"""Rows of a table of measured attention: backend,batch,heads,kv_heads,seqlen,head_dim,causal,fwd_ms,..."""

from pathlib import Path

import msgspec

from aorta.errors import ProjectionError
from aorta.projection.kernels.gemm.measured import read_rows, seconds_of
from aorta.projection.kernels.sdpa.size import AttentionSize

COLUMNS = ("backend", "batch", "heads", "kv_heads", "seqlen", "head_dim", "causal", "fwd_ms", "bwd_ms")


class MeasuredSdpa(msgspec.Struct, frozen=True):
    """One direction of one row; all are bf16."""

    family: str
    batch: int
    heads: int
    kv_heads: int
    seqlen: int
    head_dim: int
    causal: bool
    backward: bool
    time_s: float

    @property
    def size(self) -> AttentionSize:
        """The row's size, in the form that the models take."""
        return AttentionSize(
            batch=self.batch,
            seq_q=self.seqlen,
            seq_kv=self.seqlen,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim_qk=self.head_dim,
            head_dim_v=self.head_dim,
            causal=self.causal,
        )


def read_sdpa(path: str | Path) -> list[MeasuredSdpa]:
    """Two entries per row: forward and backward."""
    try:
        return [entry for row in read_rows(path, COLUMNS) for entry in sdpa_of(row)]
    except ValueError as error:
        raise ProjectionError(f"{path}: {error}") from None


def sdpa_of(row: dict[str, str]) -> list[MeasuredSdpa]:
    """Forward and backward of one row; ValueError where a number is none."""
    return [
        MeasuredSdpa(
            family=row["backend"],
            batch=int(row["batch"]),
            heads=int(row["heads"]),
            kv_heads=int(row["kv_heads"]),
            seqlen=int(row["seqlen"]),
            head_dim=int(row["head_dim"]),
            causal=row["causal"].lower() in ("true", "1"),
            backward=backward,
            time_s=seconds_of(row["bwd_ms" if backward else "fwd_ms"]),
        )
        for backward in (False, True)
    ]
