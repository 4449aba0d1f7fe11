"""Rows of a table of measured GEMMs: op,dtype,batch,m,n,k,median_ms,..."""

import csv
from pathlib import Path

import msgspec

from aorta.errors import ProjectionError

DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "tf32": "tf32", "float8": "fp8",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
}  # fmt: skip
COLUMNS = ("op", "dtype", "m", "n", "k", "median_ms")


class MeasuredGemm(msgspec.Struct, frozen=True):
    """One row."""

    op: str
    layout: str
    dtype: str
    batch: int
    m: int
    n: int
    k: int
    time_s: float


def read_gemms(path: str | Path) -> list[MeasuredGemm]:
    """All rows; the layout is what follows the last underscore of op, as in fwd_TN."""
    try:
        return [gemm_of(row) for row in read_rows(path, COLUMNS)]
    except ValueError as error:
        raise ProjectionError(f"{path}: {error}") from None


def gemm_of(row: dict[str, str]) -> MeasuredGemm:
    """One row; ValueError where a number is none."""
    return MeasuredGemm(
        op=row["op"],
        layout=row["op"].rpartition("_")[2],
        dtype=DTYPES.get(row["dtype"], row["dtype"]),
        batch=int(row.get("batch") or 1),
        m=int(row["m"]),
        n=int(row["n"]),
        k=int(row["k"]),
        time_s=seconds_of(row["median_ms"]),
    )


def seconds_of(milliseconds: str) -> float:
    """A measured time, above 0."""
    value = float(milliseconds)
    if not 0 < value < float("inf"):
        raise ValueError(f"a time must be above 0, got {milliseconds}")
    return value * 1e-3


def read_rows(path: str | Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows of a CSV file that must have these columns."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            absent = [name for name in columns if name not in (reader.fieldnames or ())]
            if absent:
                raise ProjectionError(f"{path}: lacks the column {absent[0]!r}")
            return [{name: value or "" for name, value in row.items() if name} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ProjectionError(f"{path}: cannot be read: {error}") from None
