"""Waiting and transfer of the collectives of step records, worked out by hand."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from aorta.account.judge.cells import account_of
from aorta.account.judge.judged import judge
from aorta.account.load.open import load_run
from aorta.account.load.waits import _exposed_of_calls, behind_ms
from aorta.errors import RecordError
from aorta.page.write import make_report
from aorta.records.files import state_name
from aorta.records.schema import Ending
from aorta.records.state import ProcessState, StateFile
from aorta.timeline.matching import UNKNOWN_END, RankCalls
from tests.account.load.late_ranks import SIZE, step_of
from tests.records.run_folders import run_record, write_run


def run_of(tmp_path, steps, num_ranks=2):
    return load_run(write_run(tmp_path / "run", steps, run_record(num_ranks)), "x")


def test_the_early_rank_waits_and_the_late_one_does_not(tmp_path):
    """Rank 0 arrives at 5 ms, a ms before its compute ends; rank 1 at 8 ms; both end at 10 ms."""
    run = run_of(tmp_path, [step_of(r, i, (5, 8)[r], 10) for i in range(12) for r in range(2)])
    by_rank = {name: values[:, 3].tolist() for name, values in run.metrics.items()}
    assert by_rank["duration_ms.all_gather"] == pytest.approx([5.0, 2.0])
    assert by_rank["wait_ms.all_gather"] == pytest.approx([3.0, 0.0])
    assert by_rank["transfer_ms.all_gather"] == pytest.approx([2.0, 2.0])
    assert by_rank["exposed_ms"] == pytest.approx([4.0, 2.0])
    assert by_rank["exposed_wait_ms"] == pytest.approx([2.0, 0.0])
    assert by_rank["exposed_transfer_ms"] == pytest.approx([2.0, 2.0])
    # 1 MiB in 2 ms, all-gather of two ranks: half.
    assert by_rank["busbw_gb_s.all_gather"] == pytest.approx([SIZE / 2e6 / 2] * 2)
    [row] = judge(run).collective_rows
    assert (row.wait_ms, row.transfer_ms) == pytest.approx((1.5, 2.0))
    assert any(note.startswith("rank 1 arrived last in 12 of 12 collectives") for note in run.notes)


@pytest.mark.parametrize(("hosts", "wait_ms"), [(("a", "a"), 3.0), (("a", "b"), 1.0), (("", ""), 1.0)])
def test_ranks_of_one_host_have_one_clock(tmp_path, hosts, wait_ms):
    """Rank 1 arrives 3 ms behind rank 0 and is woken 2 ms behind it: an offset only where clocks are two, or
    nobody knows."""
    folder = write_run(
        tmp_path / "run",
        [
            msgspec.structs.replace(step_of(rank, i, (5, 8)[rank], (10, 12)[rank]), source="host")
            for i in range(12)
            for rank in range(2)
        ],
        run_record(2),
    )
    for rank, host in enumerate(hosts):
        state = ProcessState(
            run_id="one", attempt=0, rank=rank, world_size=2, host=host, pid=1, process_start=None,
            started_unix_ns=0, written_unix_ns=0, ending=Ending(kind="finished"),
        )  # fmt: skip
        StateFile(folder / state_name(rank), 0).write(state)
    run = load_run(folder, "x")
    assert run.metrics["wait_ms.all_gather"][:, 3].tolist() == pytest.approx([wait_ms, 0.0])


def test_collectives_are_those_of_the_judged_steps(tmp_path):
    """Three steps of warm-up with a barrier each and gathers of 10 ms, then two with gathers of 4 ms."""
    steps = []
    for step in range(5):
        for rank in range(2):
            slow = step < 3
            one = step_of(rank, step, 5, 15 if slow else 9)
            barrier = msgspec.structs.replace(one.collectives[0], op="barrier", bytes=0, group="all")
            steps.append(
                msgspec.structs.replace(one, collectives=one.collectives + ([barrier] if slow else []))
            )
    judged = judge(run_of(tmp_path, steps), 3)
    [row] = judged.collective_rows
    assert (row.op, row.count_per_step, row.duration_ms) == ("all_gather", 1.0, pytest.approx(4.0))
    assert judged.statistics["duration_ms.all_gather"].median == pytest.approx(4.0)
    assert (row.wait_ms, row.transfer_ms) == pytest.approx((0.0, 4.0))
    # 1 MiB in 4 ms, all-gather of two ranks: half.
    assert row.busbw_gb_s == pytest.approx(SIZE / 4e6 / 2)
    everything = judge(judged, 0).collective_rows
    assert {row.op: row.count_per_step for row in everything} == {"all_gather": 1.0, "barrier": 0.6}


def test_sizes_share_a_row_on_the_rank_that_has_many(tmp_path):
    """Rank 0 gathers another size in each of 30 steps, rank 1 always the same; rank 0 waits 3 of 5 ms."""
    steps = [step_of(r, i, (5, 8)[r], 10, bytes=SIZE if r else SIZE + i) for i in range(30) for r in range(2)]
    rows = {row.bytes: row for row in judge(run_of(tmp_path, steps), 0).collective_rows}
    assert {size: (row.wait_ms, row.transfer_ms) for size, row in rows.items()} == {
        None: pytest.approx((3.0, 2.0)),
        SIZE: pytest.approx((0.0, 2.0)),
    }
    assert [row.duration_ms for row in rows.values()] == pytest.approx([5.0, 2.0])


def test_clocks_that_differ_are_brought_together(tmp_path):
    """The same, with rank 1's clock 50 ms ahead."""
    steps = [
        step_of(r, i, (5, 8)[r] + 0.001 * (i % 3), 10, offset_ms=50.0 * r)
        for i in range(12)
        for r in range(2)
    ]
    run = run_of(tmp_path, steps)
    assert run.metrics["wait_ms.all_gather"][:, 3] == pytest.approx([3.0, 0.0], abs=1e-3)
    assert run.metrics["exposed_wait_ms"][:, 3] == pytest.approx([2.0, 0.0], abs=1e-3)
    assert run.clock_offset_ns == {1: pytest.approx(-50e6, abs=1e3)}


@pytest.mark.parametrize(
    ("changes", "is_one_group"),
    [
        pytest.param({"op": "broadcast"}, True, id="rooted"),
        pytest.param({"op": "send"}, False, id="point-to-point"),
        pytest.param({"ranks": [0, 1, 2]}, False, id="a-rank-of-the-group-is-not-there"),
        pytest.param({"start_ms": None, "end_ms": None}, True, id="not-timed"),
    ],
)
def test_what_cannot_be_matched_has_no_waits(tmp_path, changes, is_one_group):
    """But ranks that leave together wait for what they are exposed beyond the least exposed one: rank 0 for 2
    of 4 ms."""
    steps = [step_of(r, i, (5, 8)[r], 10) for i in range(10) for r in range(2)]
    steps = [
        msgspec.structs.replace(
            one, collectives=[msgspec.structs.replace(call, **changes) for call in one.collectives]
        )
        for one in steps
    ]
    run = run_of(tmp_path, steps)
    assert not any(name.startswith(("wait_ms", "transfer_ms")) for name in run.metrics)
    assert ("exposed_wait_ms" in run.metrics) == is_one_group
    if is_one_group:
        assert run.metrics["exposed_wait_ms"][:, 3] == pytest.approx([2.0, 0.0])


@pytest.mark.parametrize("changes", [{}, {"op": "broadcast"}, {"op": "send"}, {"ranks": [0, 1, 2]}])
def test_the_metric_is_the_cell_of_the_account(tmp_path, changes):
    steps = [step_of(r, i, (5, 8)[r] + i % 2, 10 + i % 3, **changes) for i in range(10) for r in range(2)]
    run = judge(run_of(tmp_path, steps))
    cells = account_of(run).cells
    if "exposed_wait_ms" not in run.metrics:
        assert not cells["wait"].any()
        assert cells["communication"] == pytest.approx(run.values("exposed_ms"))
    else:
        assert cells["wait"] == pytest.approx(run.values("exposed_wait_ms"))
        assert cells["transfer"] == pytest.approx(run.values("exposed_transfer_ms"))


def test_a_collective_that_one_rank_lacks_has_no_waits(tmp_path):
    steps = [step_of(r, i, (5, 8)[r], 10) for i in range(10) for r in range(2)]
    steps[-1] = msgspec.structs.replace(steps[-1], collectives=[], num_collectives=0)
    run = run_of(tmp_path, steps)
    wait_ms = run.metrics["wait_ms.all_gather"]
    assert wait_ms[0, :-1] == pytest.approx([3.0] * 9)
    assert np.isnan(wait_ms[:, -1]).all()
    assert (
        "1 of 19 records of collectives were not matched on all ranks: their waits are unknown" in run.notes
    )


@pytest.mark.heavy
def test_exposed_time_is_split_in_the_comparison(tmp_path):
    """In b rank 1 arrives 1 ms later and everything ends 1 ms later: all of it is waiting of rank 0, and
    compute that is idle of rank 1."""
    for label, late in (("a", 0), ("b", 1)):
        steps = [step_of(r, i, (5, 8 + late)[r], 10 + late) for i in range(20) for r in range(2)]
        write_run(tmp_path / label, steps, run_record(2))
    found = make_report([tmp_path / "a", tmp_path / "b"], ["a", "b"]).comparison
    parts = {part.name: part.difference_ms for part in found.decomposition.parts}
    assert parts == pytest.approx(
        {"compute": 0, "hidden": 0, "wait": 0.5, "transfer": 0, "idle": -0.5}, abs=1e-6
    )
    assert not any("is not split" in note for note in found.decomposition.notes)
    assert found.metrics["transfer_ms.all_gather"].verdict in ("same", "cannot tell")
    assert "duration_ms.all_gather" in found.metrics


def test_waits_are_withheld_where_ends_are_too_far_apart(tmp_path):
    """Collectives of 5 and 2 ms that end up to 4 ms apart, now on one rank and now on the other. What a rank
    is exposed beyond the other, 6 ms, needs no clock."""
    steps = [step_of(r, i, (5, 8)[r], 10 + 4 * (r == i % 2)) for i in range(12) for r in range(2)]
    run = run_of(tmp_path, steps)
    assert "wait_ms.all_gather" not in run.metrics
    assert run.metrics["exposed_wait_ms"][:, 0] == pytest.approx([6.0, 0.0])
    assert any(
        note.startswith("clocks cannot tell who came when: ranks see the same collective end")
        for note in run.notes
    )


@pytest.mark.heavy
def test_steps_without_details_do_not_decide_what_is_compared(tmp_path):
    """Details of every 4th step alone: all ranks leave together, so that what rank 0 is exposed beyond rank 1
    is waiting in every step."""
    for label in "ab":
        steps = [step_of(r, i, (5, 8)[r], 10) for i in range(40) for r in range(2)]
        steps = [
            one
            if one.global_step % 4 == 0
            else msgspec.structs.replace(one, collectives=None, active_segments=None)
            for one in steps
        ]
        write_run(tmp_path / label, steps, run_record(2))
    found = make_report([tmp_path / "a", tmp_path / "b"], ["a", "b"]).comparison.decomposition
    assert {part.name: part.reference_ms for part in found.parts} == pytest.approx(
        {"compute": 5.5, "hidden": 0.5, "wait": 1.0, "transfer": 2.0, "idle": 11.0}
    )
    assert all(part.interval is not None for part in found.parts)


def test_stretches_split_exposed_communication_as_segments_do(tmp_path):
    """Rank 0 arrives at 5 ms and rank 1 at 8, both end at 10, compute ends at 6: of rank 0's 4 exposed ms it
    waits for 2. One step in six keeps its segments."""
    steps = []
    for i in range(12):
        for rank, start_ms in enumerate((5, 8)):
            one = step_of(rank, i, start_ms, 10)
            first_ms = max(6, start_ms)
            stretches = [first_ms * 1_000_000, (10 - first_ms) * 1_000_000]
            segments = one.active_segments if i % 6 == 0 else None
            steps.append(
                msgspec.structs.replace(
                    one, active_segments=segments, exposed_run_lengths_ns=stretches, source="kernels"
                )
            )
    run = run_of(tmp_path, steps)
    by_rank = {name: values[:, 3].tolist() for name, values in run.metrics.items()}
    assert by_rank["exposed_wait_ms"] == pytest.approx([2.0, 0.0])
    assert by_rank["exposed_transfer_ms"] == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        pytest.param([1], "pairs", id="half-a-pair"),
        pytest.param([-1, 2], "below 0", id="negative"),
        pytest.param([2**70, 1], "64 bits", id="too-large"),
    ],
)
def test_stretches_that_no_run_writes_are_named(tmp_path, lengths, reason):
    good = [step_of(r, i, 5, 10) for i in range(12) for r in range(2)]
    bad = msgspec.structs.replace(good[6], active_segments=None, exposed_run_lengths_ns=lengths)
    with pytest.raises(RecordError, match=f"impossible record of global step 3: .*{reason}"):
        run_of(tmp_path, [*good[:6], bad, *good[7:]])


def test_what_a_rank_would_be_ahead_by_if_none_were_late():
    """Step 0: 4 ms waited; the next collective was launched 2 ms before it began, so that 2 ms are gained;
    3 ms more before a third one, launched long before. Step 1 waits in its last collective. Of step 2 no
    launches are known."""
    known = [(0, 10, 5.0, 4.0), (0, 20, 2.0, 0.0), (0, 30, 9.0, 3.0), (1, 40, 0.0, 6.0), (2, 50, np.nan, 1.0)]
    row, start_ms, lead, wait = (np.array(column) for column in zip(*known, strict=True))
    nothing = np.zeros(5, dtype=np.int64)
    calls = RankCalls(
        kinds=[],
        groups=[],
        row=row.astype(np.int32),
        kind=nothing,
        group=nothing,
        seq=nothing,
        start_ns=start_ms * 10**6,
        end_ns=nothing,
        lead_ms=lead,
        exposed_ns=np.zeros((0, 2), dtype=np.int64),
    )
    np.testing.assert_array_equal(behind_ms(calls, wait, 4), [5.0, 6.0, np.nan, np.nan])


def test_what_a_call_is_exposed_for_is_known_where_its_waits_are_not():
    """Broadcasts are not matched: 4 of 5 ms stick out. Of a matched call its wait is exposed, wherever it
    lies; without its end nothing is known."""
    nothing = np.zeros(3, dtype=np.int64)
    calls = RankCalls(
        kinds=[],
        groups=[],
        row=nothing.astype(np.int32),
        kind=nothing,
        group=nothing,
        seq=nothing,
        start_ns=np.array([10, 20, 30]) * 10**6,
        end_ns=np.array([15 * 10**6, 22 * 10**6, UNKNOWN_END]),
        lead_ms=np.full(3, 9.0),
        exposed_ns=np.array([[11, 15], [21, 22]]) * 10**6,
    )
    waits = SimpleNamespace(wait_ms=np.array([np.nan, 1.5, np.nan]))
    np.testing.assert_allclose(_exposed_of_calls(calls, waits), [4.0, 1.5, np.nan])
