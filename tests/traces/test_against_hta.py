"""The same overlap as HolisticTraceAnalysis finds, where that is right.

HTA needs pandas below 3 and is no part of the development environment:
`pip install -e '.[hta]'` in one of its own.
"""

import json
import shutil
import tarfile

import pytest

from aorta.timeline.overlap import total
from aorta.traces.kineto import read_kineto
from tests.larger_data import TRACES, needs_data

pytest.importorskip("hta", reason="needs HolisticTraceAnalysis (extra hta)")

DLRM = TRACES / "v100_dlrm_8ranks_kineto.tar.gz"


@needs_data(DLRM)
def test_overlap_of_eight_ranks_is_that_of_hta(tmp_path):
    from hta.trace_analysis import TraceAnalysis

    with tarfile.open(DLRM) as archive:
        archive.extractall(tmp_path / "packed", filter="data")
    files = sorted(path for path in (tmp_path / "packed").rglob("*") if path.suffix in (".json", ".gz"))
    (tmp_path / "hta").mkdir()
    by_rank = {}
    for path in files:
        trace = read_kineto(path)
        by_rank[trace.rank] = trace
        shutil.copy(path, tmp_path / "hta" / path.name)
    theirs = TraceAnalysis(trace_dir=str(tmp_path / "hta")).get_comm_comp_overlap(visualize=False)
    percent = dict(zip(theirs["rank"], theirs["comp_comm_overlap_pctg"], strict=True))
    ours = {}
    for rank, trace in by_rank.items():
        sums = total(trace.timeline)
        ours[rank] = 100 * sums.hidden_ms / sums.comm_ms
    assert json.dumps(sorted(percent)) == json.dumps(sorted(ours))
    assert ours == pytest.approx(percent, abs=0.05)  # HTA rounds times to microseconds
