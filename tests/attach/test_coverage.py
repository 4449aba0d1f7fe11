"""Lines that `aorta run` prints of what is missing."""

from types import SimpleNamespace

from aorta.attach.coverage import coverage_lines


def lines(tmp_path, **matched):
    (tmp_path / "rank_0_metrics.jsonl").write_bytes(b'{"global_step":0}\n')
    faults = ["times end early (mended in 13.1; from the release notes, not tried)"]
    coverage = {"kernel_records": {"matched": matched, "known_faults": faults}}
    return list(
        coverage_lines(SimpleNamespace(coverage=coverage, finished_unix_ns=1, overhead=None), tmp_path)
    )


def test_a_run_whose_kernels_are_all_there_has_one_line(tmp_path):
    assert len(lines(tmp_path, num_no_time=0, num_lost=0)) == 1


def test_records_without_times_are_said_with_what_is_known_of_their_tracer(tmp_path):
    _, missing, fault = lines(tmp_path, num_no_time=7)
    assert missing == "aorta: 7 records of kernels came without times, and no step's numbers have them"
    assert fault.startswith("aorta: known of this CUPTI: times end early")
