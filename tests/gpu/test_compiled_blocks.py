"""A program whose blocks torch compiles trains under `aorta run` as without, to the bit."""

import sys
from pathlib import Path

import pytest

from tests.gpu.outcomes import RANKS, outcomes

PROGRAM = Path(__file__).with_name("compiled_blocks.py")
one_gpu, two_gpus = pytest.mark.gpu(1), pytest.mark.gpu(2)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("wraps", "num_ranks"),
    [
        pytest.param("plain", 1, marks=one_gpu),
        pytest.param("DDP", 1, marks=one_gpu),
        pytest.param("fully_shard", 1, marks=one_gpu),
        pytest.param("DDP", 2, marks=two_gpus),
        pytest.param("fully_shard", 2, marks=two_gpus),
        pytest.param("DataParallel", 1, marks=two_gpus),
    ],
)
def test_blocks_that_compile_train_as_without(wraps: str, num_ranks: int, tmp_path: Path) -> None:
    in_group = wraps in ("DDP", "fully_shard")
    launch = [*RANKS, str(num_ranks)] if in_group else [sys.executable]
    outcomes(tmp_path, launch, PROGRAM, wraps)
    lines = (tmp_path / "run" / "rank_0_metrics.jsonl").read_text().splitlines()
    assert len(lines) >= 60
