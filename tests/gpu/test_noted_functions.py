"""A program whose transforms, casts and copies are noted trains under `aorta run` as without, to the bit."""

import json
import sys
from pathlib import Path

import pytest

from tests.gpu.outcomes import RANKS, outcomes

PROGRAM = Path(__file__).with_name("noted_functions.py")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "num_ranks",
    [
        pytest.param(0, id="of-a-CPU"),
        pytest.param(1, marks=pytest.mark.gpu(1), id="of-a-GPU"),
        pytest.param(2, marks=pytest.mark.gpu(2), id="of-two"),
    ],
)
def test_functions_that_are_noted_train_as_without(
    num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if num_ranks == 0:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launch = [*RANKS, str(num_ranks)] if num_ranks > 1 else [sys.executable]
    assert outcomes(tmp_path, launch, PROGRAM)["are_own"]
    work = json.loads((tmp_path / "run" / "run.json").read_text())["work"]
    assert work["transforms"]["length"] == 2_311
    assert work["narrowed_bytes"] == 8 * 8 * 2_311 * 4
    assert work["copies"] > 0
    assert work["hoisted_bytes"] > 0
