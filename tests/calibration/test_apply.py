"""Calibrated numbers in a run's own lines. Records say that an all-reduce runs from 2 to 6 ms of a step and
compute to 4 and from 6; kernels, that it begins at 2.4."""

import json
import logging
import pickle
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from torch.distributed import HashStore

from aorta.account.load.open import load_run
from aorta.calibration.after_run import UNKNOWN_STATE, check_run
from aorta.calibration.merge import merge
from aorta.calibration.peers import MOST_BYTES, Peers, packed, peers_of, some_of, unpacked
from aorta.records.files import steps_name
from aorta.records.reader import read_run, read_steps
from aorta.records.schema import StepRecord
from aorta.steps.calibration import TracedStep
from tests.calibration.traced_runs import ROUNDED_MS, write_records, write_trace
from tests.limits import AT_ONCE_S, LIMIT_S
from tests.records.run_folders import sealed_again


def lines_of(folder: Path, rank: int = 0) -> list[StepRecord]:
    return [line for line in read_steps(folder / steps_name(rank)) if line.source == "events"]


def test_steps_outside_the_window_get_the_kernels_numbers(tmp_path, caplog):
    write_records(tmp_path, 6)
    with caplog.at_level(logging.INFO):
        check_run(tmp_path, 0, [write_trace(tmp_path / "trace.json", 4)], profiled_steps=[0, 1, 2, 3])
    assert [line.overlap.calibrated is not None for line in lines_of(tmp_path)] == [False] * 4 + [True] * 2
    for line in lines_of(tmp_path)[4:]:
        calibrated = line.overlap.calibrated
        assert calibrated is not None
        assert calibrated.comm_ms == pytest.approx(3.6, abs=ROUNDED_MS)
        assert calibrated.hidden_ms == pytest.approx(1.6, abs=ROUNDED_MS)
        assert calibrated.exposed_ms == pytest.approx(2.0, abs=ROUNDED_MS)
        assert calibrated.compute_ms == pytest.approx(8.0, abs=ROUNDED_MS)
        assert (line.overlap.comm_ms, line.overlap.hidden_ms) == (4.0, 2.0)  # raw ones stay
    assert "began 0.400 ms after their records" in caplog.text
    assert "2 other steps have calibrated numbers" in caplog.text


def test_a_traced_step_is_never_judged_by_itself(tmp_path):
    """A trace that was not announced: its steps have kernel lines, and that is enough."""
    write_records(tmp_path, 4)
    check_run(tmp_path, 0, [write_trace(tmp_path / "trace.json", 4)])
    assert [line.overlap.calibrated is None for line in lines_of(tmp_path)] == [True, True, True, False]


def test_the_report_shows_them(tmp_path):
    write_records(tmp_path, 6)
    text = (tmp_path / steps_name(0)).read_text()
    (tmp_path / steps_name(1)).write_bytes(sealed_again(text.replace('"rank":0', '"rank":1').encode()))
    for rank in (0, 1):
        check_run(tmp_path, rank, [write_trace(tmp_path / "trace.json", 4)], profiled_steps=[0, 1, 2, 3])
    run = load_run(tmp_path, "run")
    assert run.metrics["calibrated.hidden_ms"] == pytest.approx(1.6, abs=ROUNDED_MS)
    assert run.metrics["hidden_ms"] == pytest.approx(2.0)


def test_lines_that_are_not_of_events_stay_as_they_are(tmp_path):
    write_records(tmp_path, 6)
    cut = b'{"schema":1,"rank":0,"world_'
    path = tmp_path / steps_name(0)
    check_run(tmp_path, 0, [write_trace(tmp_path / "trace.json", 4)])
    path.write_bytes(path.read_bytes() + cut)
    kernels = [line for line in path.read_bytes().splitlines() if b'"source":"kineto"' in line]
    assert len(kernels) == 3
    check_run(tmp_path, 0, [tmp_path / "trace.json"])
    after = path.read_bytes().splitlines()
    assert [line for line in after if b'"source":"kineto"' in line] == kernels
    assert cut not in after  # a part of a line is none, and the next line would stick to it


def test_communication_of_the_step_before_counts(tmp_path):
    """Step 4's all-reduce ends 1 ms into step 5, where nobody waits for it."""
    write_records(tmp_path, 6)
    path = tmp_path / steps_name(0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[4]["collectives"][0]["end_ms"] = 11.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    check_run(tmp_path, 0, [write_trace(tmp_path / "trace.json", 4)])
    last = lines_of(tmp_path)[5].overlap.calibrated
    assert last is not None
    assert last.comm_ms == pytest.approx(3.6 + 1.0, abs=ROUNDED_MS)
    assert last.exposed_ms == pytest.approx(2.0, abs=ROUNDED_MS)


def test_a_step_in_a_state_that_the_window_did_not_show_has_none_and_says_why(tmp_path):
    write_records(tmp_path, 6)
    path = tmp_path / steps_name(0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[5]["collectives"][0]["start_by"] = "launch"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    check_run(tmp_path, 0, [write_trace(tmp_path / "trace.json", 4)])
    *_, known, unknown = lines_of(tmp_path)
    assert known.overlap.calibrated is not None
    assert unknown.overlap.calibrated is None
    assert unknown.not_measured["overlap.calibrated"] == UNKNOWN_STATE


def test_only_steps_with_details_have_them(tmp_path):
    write_records(tmp_path, 6, detail_every=3)
    check_run(tmp_path, 0, [write_trace(tmp_path / "trace.json", 2)])
    calibrated = [line.global_step for line in lines_of(tmp_path) if line.overlap.calibrated is not None]
    assert calibrated == [3]


def test_a_disk_that_fails_leaves_the_lines_as_they_were(tmp_path, caplog, monkeypatch):
    write_records(tmp_path, 6)
    trace = write_trace(tmp_path / "trace.json", 4)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    check_run(tmp_path, 0, [trace])
    assert "no calibrated numbers" in caplog.text
    assert "No space left on device" in caplog.text
    assert len(lines_of(tmp_path)) == 6
    assert not list(tmp_path.glob(".*.tmp"))


def test_merging_calibrates_too_with_the_steps_of_all_ranks(tmp_path):
    write_records(tmp_path, 6)
    path = tmp_path / steps_name(0)
    text = path.read_text().replace('"rank":0', '"rank":1')
    (tmp_path / steps_name(1)).write_bytes(sealed_again(text.encode()))
    for rank in (0, 1):
        write_trace(tmp_path / f"torch_profiler/rank{rank}/rank{rank}.1.pt.trace.json", 4)
    merge(tmp_path)
    for rank in (0, 1):
        last = lines_of(tmp_path, rank)[-1].overlap.calibrated
        assert last is not None
        assert last.hidden_ms == pytest.approx(1.6, abs=ROUNDED_MS)
    calibration = read_run(tmp_path / "run.json").calibration
    assert calibration is not None
    assert calibration["steps"] == [0, 1, 2]
    before = [(tmp_path / steps_name(rank)).read_bytes() for rank in (0, 1)]
    merge(tmp_path)
    assert [(tmp_path / steps_name(rank)).read_bytes() for rank in (0, 1)] == before


def test_what_the_ranks_exchange_is_what_calibrates(tmp_path):
    """Rank 0 has lost its trace; its peer's steps serve."""
    write_records(tmp_path, 6)
    (tmp_path / "peer").mkdir()
    write_records(tmp_path / "peer", 6)
    given: list[list] = []
    check_run(
        tmp_path / "peer",
        1,
        [],
        exchange=lambda mine: given.append(mine) or [],
    )
    assert given == [[]]  # called even by a rank that has nothing

    def record(mine: list) -> list:
        given.append(mine)
        return mine

    check_run(tmp_path, 0, [write_trace(tmp_path / "trace.json", 4)], exchange=record)
    check_run(tmp_path / "peer", 0, [], profiled_steps=[0], exchange=lambda _: given[-1])
    assert [line.overlap.calibrated is not None for line in lines_of(tmp_path / "peer")] == [False] + [
        True
    ] * 5


def test_peers_are_blocks_of_eight():
    assert list(peers_of(3, 4)) == [0, 1, 2, 3]
    assert list(peers_of(9, 20)) == list(range(8, 16))
    assert list(peers_of(17, 20)) == [16, 17, 18, 19]


def test_of_many_traced_steps_some_are_taken_over_the_whole_run():
    assert some_of(list(range(12))) == list(range(12))
    taken = some_of(list(range(240)))
    assert taken == list(range(0, 240, 20))


def traced_steps_of(folder: Path) -> list[TracedStep]:
    folder.mkdir()
    write_records(folder, 4)
    given: list[list[TracedStep]] = []
    trace = write_trace(folder / "trace.json", 4)
    check_run(folder, 0, [trace], exchange=lambda mine: given.append(mine) or mine)
    return given[0]


def test_ranks_get_the_steps_of_their_peers_through_the_store(tmp_path):
    steps = [traced_steps_of(tmp_path / str(rank)) for rank in range(3)]
    store = HashStore()
    with ThreadPoolExecutor(3) as ranks:
        futures = [ranks.submit(Peers(store, rank, 3, LIMIT_S).traced_with, steps[rank]) for rank in range(3)]
        found = [future.result() for future in futures]
    for mine in found:
        assert [step.record.global_step for step in mine] == [0, 1, 2] * 3
        assert msgspec.json.encode(mine[8].record) == msgspec.json.encode(steps[2][2].record)
        assert mine[8].kernels.start_ms.tolist() == steps[2][2].kernels.start_ms.tolist()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pickle.dumps([1]),
        zlib.compress(pickle.dumps([1])),
        zlib.compress(b"\x91" * 5000),
        zlib.compress(bytes(MOST_BYTES + 1), 9),
    ],
    ids=["nothing", "a-pickle", "a-packed-pickle", "deep", "a-bomb"],
)
def test_what_is_no_list_of_traced_steps_is_refused(data):
    with pytest.raises(ValueError, match=r".+"):
        unpacked(data)


def test_steps_that_point_outside_of_their_tables_are_refused(tmp_path):
    step = traced_steps_of(tmp_path / "0")[0]
    step.kernels.name[:] = 10_000
    with pytest.raises(ValueError, match="not in its table"):
        unpacked(packed([step]))


def test_a_peer_that_is_gone_costs_a_while_and_not_the_run(tmp_path, caplog):
    steps = traced_steps_of(tmp_path / "0")
    start = time.monotonic()
    found = Peers(HashStore(), 0, 2, patience_s=0.3).traced_with(steps)
    assert time.monotonic() - start < AT_ONCE_S
    assert [step.record.global_step for step in found] == [0, 1, 2]
    assert "rank 1 has not given its traced steps" in caplog.text


def test_in_the_largest_jobs_each_rank_calibrates_by_its_own_steps(tmp_path):
    steps = traced_steps_of(tmp_path / "0")
    store = HashStore()
    assert Peers(store, 0, 4096).traced_with(steps) == steps
    assert store.num_keys() == 0
