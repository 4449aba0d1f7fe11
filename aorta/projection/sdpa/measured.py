"""Rows of a table of measured attention: backend,batch,heads,kv_heads,seqlen,head_dim,causal,fwd_ms,..."""

from pathlib import Path

import msgspec

from aorta.errors import ProjectionError
from aorta.projection.gemm.measured import read_rows

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


def read_sdpa(path: str | Path) -> list[MeasuredSdpa]:
    """Two entries per row: forward and backward."""
    try:
        return [
            MeasuredSdpa(
                family=row["backend"],
                batch=int(row["batch"]),
                heads=int(row["heads"]),
                kv_heads=int(row["kv_heads"]),
                seqlen=int(row["seqlen"]),
                head_dim=int(row["head_dim"]),
                causal=row["causal"].lower() == "true",
                backward=backward,
                time_s=float(row["bwd_ms" if backward else "fwd_ms"]) * 1e-3,
            )
            for row in read_rows(path, COLUMNS)
            for backward in (False, True)
        ]
    except ValueError as error:
        raise ProjectionError(f"{path}: {error}") from None
