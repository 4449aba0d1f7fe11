"""Dispatch and combine of a sheet beside the model's exchange, by hand."""

import sys
from pathlib import Path

import pytest

from aorta.hardware import load_hardware

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from projection.mixture_sheets import compared


def test_dispatch_sends_what_leaves_the_rank(tmp_path):
    """1 GiB to the only peer takes at least the link's own time, and no more than half as long again."""
    sheet = tmp_path / "dispatch.csv"
    sheet.write_text("kind,ranks,dispatch_ms,combine_ms,sent_bytes\ndirect,2,3.0,4.0,1073741824\n")
    (dispatch, combine) = compared(sheet, "h100")
    assert [name for name, _, _ in (dispatch, combine)] == ["direct dispatch", "direct combine"]
    assert [measured for _, _, measured in (dispatch, combine)] == [3.0, 4.0]
    assert dispatch[1] == combine[1]
    wire_ms = 1e3 * 2**30 / load_hardware("h100").scale_up.sustained_gpu_bytes_per_s
    assert dispatch[1] == pytest.approx(1.25 * wire_ms, rel=0.2)
