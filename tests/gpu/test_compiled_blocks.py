"""A program whose blocks torch compiles trains under `aorta run` as without, to the bit."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("compiled_blocks.py")
RUN = [sys.executable, "-m", "aorta", "run", "--no-report", "-o"]
RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
one_gpu, two_gpus = pytest.mark.gpu(1), pytest.mark.gpu(2)


def trained(file: Path, launch: list[str], wraps: str) -> dict[str, Any]:
    command = [*launch, str(PROGRAM), wraps, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(file.read_text()))


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
    plain, again = (trained(tmp_path / name, launch, wraps) for name in ("plain", "again"))
    attached = trained(tmp_path / "attached", [*RUN, str(tmp_path / "run"), "--", *launch], wraps)
    assert plain == again, "the program does not repeat itself"
    assert attached == plain
    lines = (tmp_path / "run" / "rank_0_metrics.jsonl").read_text().splitlines()
    assert len(lines) >= 60
