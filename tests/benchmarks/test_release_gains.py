"""The table of releases that the package holds is what the tables of rows say."""

import sys
from pathlib import Path

import msgspec

from aorta.projection.software import measured_releases
from tests.larger_data import FOLDER, needs_data

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from projection.release_gains import JOB, gains, table


def test_gains_are_of_the_same_job_over_the_release_before(tmp_path):
    """Two jobs under three releases, one of them under two: 10 % faster, then half as fast."""
    head = ",".join([*JOB, "framework", "tok_s_gpu", "complete", "source"])
    layout = ["8", "pretrain", "llama3-8b", "bf16", "4096", "1", "64", "1", "1", "1", "1", "1", "ddp", "none"]
    job, other = (",".join([gpu, *layout]) for gpu in ("H100", "B200"))
    rows = [
        f"{job},megatron-bridge,1000,yes,summary 26.02",
        f"{job},megatron-bridge,1100,yes,summary 26.04",
        f"{job},megatron-bridge,550,yes,summary 26.04.01",
        f"{other},megatron-bridge,2000,no,summary 26.04.01",
    ]
    (tmp_path / "measured_throughput.csv").write_text("\n".join([head, *rows]) + "\n")
    _, found = gains(tmp_path)
    assert found["megatron-bridge", "26.04"] == [("26.02", 1.1)]
    assert found["megatron-bridge", "26.04.01"] == [("26.04", 0.5)]
    releases = table(tmp_path)["megatron-bridge"]
    assert releases["26.04.01"] == {"rows": 1, "jobs": 1, "gain": [0.5, 0.5, 0.5]}


@needs_data()
def test_the_packaged_table_is_of_the_rows_in_view():
    packaged = {
        name: {version: msgspec.to_builtins(rows) for version, rows in found.items()}
        for name, found in measured_releases().items()
    }
    for name, found in table(FOLDER / "public").items():
        for version, facts in found.items():
            assert packaged[name][version] == {"jobs": 0, "gain": None} | facts | (
                {"gain": tuple(facts["gain"])} if "gain" in facts else {}
            )
