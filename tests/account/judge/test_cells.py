"""The account: cells exclude each other and add up to the step, on devices and on CPUs."""

import msgspec
import numpy as np
import pytest

from aorta.account.judge.cells import CELLS, EXPOSED_CELLS, account_of
from aorta.account.judge.judged import judge
from aorta.account.load.open import load_run
from aorta.records.schema import HostUse
from aorta.timeline.types import OverlapRecord
from tests.records.plain_records import step as plain_step
from tests.records.run_folders import run_record
from tests.why.causes.runs import Host, run_of

KINDS = ("work", "comm", "idle", "data", "optimizer", "synchronisation")


def account(folder, make, **settings):
    return account_of(judge(load_run(run_of(folder, make, **settings), "run"), 1))


def cells_of(found):
    return {row.name: row.mean_ms for row in found.rows()}


def test_a_step_on_a_device_is_cut_by_what_device_and_host_did(tmp_path):
    """30 ms compute, 5 ms communication; the device idles for 4 ms of data, 3 of the optimizer, 2 of which
    nothing is known, and 6 behind the body."""

    def make(rank, step, noise):
        host = Host().work(30.0).comm(5.0).idle(4.0, "data").idle(3.0, "optimizer").idle(2.0).after(6.0)
        return host, {"source": "kernels"}

    found = cells_of(account(tmp_path / "run", make))
    expected = {
        "compute": 30.0,
        "transfer": 5.0,
        "data": 4.0,
        "optimizer": 3.0,
        "launch": 2.0,
        "between_steps": 6.0,
    }
    assert found == pytest.approx(expected)


def test_the_rank_that_does_not_come_costs_the_other_its_wait(tmp_path):
    """Rank 1 computes 8 ms longer; both leave the collective together."""

    def make(rank, step, noise):
        late = 8.0 if rank == 1 else 0.0
        return Host().work(20.0 + late).comm(12.0 - late)

    found = account(tmp_path / "run", make)
    assert found.by_rank_ms("wait").tolist() == pytest.approx([8.0, 0.0])
    assert found.by_rank_ms("transfer").tolist() == pytest.approx([4.0, 4.0])
    assert found.by_rank_ms("compute").tolist() == pytest.approx([20.0, 28.0])
    assert found.mean_step_ms == pytest.approx(32.0)


def test_a_thread_that_neither_runs_nor_asks_for_a_core_is_blocked(tmp_path):
    """Of 50 ms without communication its thread runs 25 and is ready for 5: it sleeps 20."""

    def make(rank, step, noise):
        return Host().work(50.0).comm(10.0), {"host_use": HostUse(25.0, 5.0)}

    found = cells_of(account(tmp_path / "run", make))
    assert found == pytest.approx({"compute": 25.0, "core_taken": 5.0, "blocked": 20.0, "transfer": 10.0})


def test_of_time_that_a_loader_may_have_slept_nothing_is_called_blocked(tmp_path):
    def make(rank, step, noise):
        return Host().work(20.0, "data").work(30.0).comm(10.0), {"host_use": HostUse(30.0, 0.0)}

    found = cells_of(account(tmp_path / "run", make))
    assert found == pytest.approx({"compute": 30.0, "data": 20.0, "transfer": 10.0})


def test_one_process_has_no_cells_of_communication(tmp_path):
    found = account(
        tmp_path / "run", lambda rank, step, noise: (Host().work(40.0), {"world_size": 1}), width=1
    )
    assert set(EXPOSED_CELLS).isdisjoint(cells_of(found))
    assert cells_of(found) == pytest.approx({"compute": 40.0})


def test_a_last_step_that_holds_the_programs_end_is_outside(tmp_path):
    def make(rank, step, noise):
        host = Host().work(20.0).comm(2.0)
        return host.after(900.0, "checkpoint") if step == 23 else host

    found = account(tmp_path / "run", make)
    assert found.mean_step_ms == pytest.approx(22.0)
    assert (found.step_ms.shape[1], found.num_judged) == (22, 23)


@pytest.mark.parametrize(("behind_ms", "overlap_ms"), [(25, 0), (-5, 0), (25, 4)])
def test_parts_of_a_runs_wall_time_add_up_to_it(tmp_path, behind_ms, overlap_ms):
    """24 steps of 22 ms, of which the last has no times of its parts; 50 ms before them, and some behind, or
    the run is closed before its last step ends. That step begins before the one in front of it ends."""
    last_ns = 10**18 + 23 * 22_000_000 - overlap_ms * 1_000_000
    end_ns = last_ns + (22 + behind_ms) * 1_000_000
    record = run_record(2, started_unix_ns=10**18 - 50_000_000, finished_unix_ns=end_ns)

    def make(rank, step, noise):
        host = Host().work(20.0).comm(2.0)
        parts = dict.fromkeys(("comm_ms", "compute_ms", "hidden_ms", "exposed_ms", "idle_ms"))
        bare = msgspec.structs.replace(plain_step().overlap, **parts)
        return (host, {"overlap": bare, "start_unix_ns": last_ns}) if step == 23 else host

    found = account(tmp_path / "run", make, run=record)
    assert found.step_ms.shape[1] == 22
    after = max(behind_ms, 0)
    assert found.wall_ms == pytest.approx(50.0 + 24 * 22.0 - overlap_ms + after, abs=0.01)
    judged = 23 * 22.0 - overlap_ms
    assert found.outside == pytest.approx(
        {"judged": judged, "start_up": 50.0, "warm_up": 22.0, "between": 0.0, "after": after},
        abs=0.01,  # Unix times in float64 ms
    )


@pytest.mark.parametrize("seed", range(12))
def test_cells_add_up_to_every_step_of_every_rank(tmp_path, seed):
    """Of steps made at random, on devices and on CPUs."""
    random = np.random.default_rng(seed)
    source = "kernels" if seed % 2 else "host"

    def make(rank, step, noise):
        host = Host()
        for kind in map(str, random.permutation(KINDS)):
            ms = float(random.exponential(10.0))
            if kind == "comm":
                host.comm(ms)
            elif kind == "work" or source == "host":
                host.work(ms, None if kind in ("work", "idle") else kind)
            else:
                host.idle(ms, None if kind == "idle" else kind)
        host.after(float(random.exponential(5.0)), [None, "data", "checkpoint"][random.integers(3)])
        use = HostUse(float(random.uniform(0, host.at)), float(random.uniform(0, 5)))
        return host, {"host_use": use, "source": source}

    found = account(tmp_path / "run", make)
    total = sum(found.cells.values())
    np.testing.assert_allclose(total, found.step_ms, rtol=1e-9)
    assert all((values >= 0).all() for values in found.cells.values())
    assert set(found.cells) <= set(CELLS)
    assert sum(row.share for row in found.rows()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("cpu_ms", "ready_ms", "expected"),
    [
        # Ready for three quarters of the step, and so of the 8 ms behind the body.
        pytest.param(2.5, 7.5, {"between_steps": 2.0, "core_taken": 6.0, "compute": 2.0}, id="throughout"),
        pytest.param(2.0, 0.0, {"between_steps": 8.0, "compute": 2.0}, id="none"),
    ],
)
def test_a_wait_for_a_core_behind_the_body_is_no_time_between_steps(tmp_path, cpu_ms, ready_ms, expected):
    found = account(
        tmp_path / "run",
        lambda rank, step, noise: (Host().work(2.0).after(8.0), {"host_use": HostUse(cpu_ms, ready_ms)}),
    )
    assert {name: ms for name, ms in cells_of(found).items() if ms} == pytest.approx(expected)


def told_what_aorta_cost(folder, step_ms, interval_ms, every=8.0):
    """run.json of a run whose recorded steps were found to take longer."""
    run = msgspec.json.decode((folder / "run.json").read_bytes()) if (folder / "run.json").exists() else {}
    run = msgspec.to_builtins(run_record()) | run
    run["overhead"] = {
        "limit": 0.01, "cost": 0.01, "interval": [0.0, 0.02], "step_ms": step_ms, "always_on": 0.0,
        "step_interval_ms": interval_ms, "every": every, "num_steps": 100, "num_recorded": 20,
    }  # fmt: skip
    (folder / "run.json").write_bytes(msgspec.json.encode(run))
    return account_of(judge(load_run(folder, "run"), 1))


def test_what_recording_takes_is_aortas_own_and_no_launch_of_the_program(tmp_path):
    """Of 9 ms in which the device has nothing to do and the host is in no span, 4 are the recorder's."""

    def make(rank, step, noise):
        return Host().work(30.0).comm(5.0).idle(4.0, "data").idle(9.0), {"source": "kernels"}

    found = told_what_aorta_cost(run_of(tmp_path / "run", make), 4.0, [3.0, 5.0])
    expected = {"compute": 30.0, "transfer": 5.0, "data": 4.0, "instrument": 4.0, "launch": 5.0}
    assert cells_of(found) == pytest.approx(expected)
    assert "instrument" not in found.reasons


def test_on_a_cpu_it_is_taken_from_the_work(tmp_path):
    found = told_what_aorta_cost(
        run_of(tmp_path / "run", lambda rank, step, noise: Host().work(30.0).comm(5.0)), 2.0, [1.0, 3.0]
    )
    assert cells_of(found) == pytest.approx({"compute": 28.0, "instrument": 2.0, "transfer": 5.0})


def test_what_recorded_steps_are_longer_by_goes_from_all_but_what_the_device_computes(tmp_path):
    """Steps 16 to 47 were left out and take 13 ms; the first ones 18, 10 of which are kernels."""

    def make(rank, step, noise):
        host = Host().idle(5.0).work(10.0).comm(3.0) if rank == 0 else Host().work(10.0).comm(8.0)
        start = 10**18 + 20 * 10**6 * step
        if step < 16:
            return host, {"source": "kernels", "start_unix_ns": start}
        left_out = {"overlap": OverlapRecord(), "is_recorded": False}
        return Host().work(13.0), {"source": "kernels", "start_unix_ns": start, **left_out}

    folder = run_of(tmp_path / "run", make, steps=48)
    found = told_what_aorta_cost(folder, 6.0, [-1.0, 13.0], every=None)
    # 3 of 8: of rank 0's launches 5, of rank 1's wait 5, of both ranks' transfer 3.
    part = 3.0 / 8.0
    expected = {"compute": 10.0, "transfer": 3.0 * part, "launch": 2.5 * part, "wait": 2.5 * part}
    assert cells_of(found) == pytest.approx(expected)
    assert found.exposed.wait_ms.mean() == pytest.approx(2.5 * part)
    assert (found.own_step_ms, found.recorded_ms) == pytest.approx((13.0, 18.0))
    np.testing.assert_allclose(sum(found.cells.values()), found.step_ms)


@pytest.mark.parametrize("longer", [1.0, 1.4])
def test_few_recorded_steps_tell_the_account_of_all(tmp_path, longer):
    """160 steps of 10 ms of kernels, and 10 of waits and launches that vary by a tenth. One in eight is
    recorded; where recording makes the host slower, by 40 % of what it launches, the account stays."""

    def make_of(few):
        def make(rank, step, noise):
            recorded = not few or step % 8 == 3
            part = noise.gauss(1.0, 0.1) * (longer if few and recorded else 1.0)
            host = Host().work(10.0).comm(4.0 * part).idle(6.0 * part)
            left_out = {} if recorded else {"overlap": OverlapRecord(), "is_recorded": False}
            return host, {"source": "kernels", **left_out}

        return make

    of_all, of_few = (account(tmp_path / str(few), make_of(few), steps=160) for few in (False, True))
    assert (of_all.usual, of_few.step_ms.shape[1]) == (None, 20)
    assert of_few.mean_step_ms == pytest.approx(of_all.mean_step_ms, rel=0.02)
    for name in ("compute", "launch", "transfer"):
        assert of_few.mean_ms(name) == pytest.approx(of_all.mean_ms(name), rel=0.05)


def test_first_steps_alone_do_not_tell_what_recording_takes(tmp_path):
    for source, reason in (("kernels", "first steps are longer"), ("host", "first steps are longer")):
        step = Host().work(30.0).comm(5.0), {"source": source}
        folder = run_of(tmp_path / source, lambda *_, step=step: step)
        found = told_what_aorta_cost(folder, 20.0, [10.0, 30.0], every=None)
        assert cells_of(found) == pytest.approx({"compute": 30.0, "transfer": 5.0})
        assert reason in found.reasons["instrument"]


def test_a_cost_within_the_scatter_of_steps_has_no_cell(tmp_path):
    found = told_what_aorta_cost(
        run_of(tmp_path / "run", lambda rank, step, noise: Host().work(30.0).comm(5.0)), 0.4, [-0.5, 1.3]
    )
    assert "instrument" not in cells_of(found)
    assert found.reasons["instrument"] == "within the scatter of steps, at most 1.3 ms a step"


def test_gaps_behind_steps_that_were_not_timed_count_as_well(tmp_path):
    """Every eighth of 24 steps is followed by 80 ms in no step; a step in two was timed."""

    def make(rank, step, noise):
        start = 10**18 + int((22.0 * step + 80.0 * (step // 8)) * 1e6)
        left_out = {"overlap": OverlapRecord(), "is_recorded": False} if step % 2 else {}
        return Host().work(20.0).comm(2.0), {"start_unix_ns": start, **left_out}

    found = account(tmp_path / "run", make)
    assert found.step_ms.shape[1] == 11
    gaps = dict(zip(found.gap_step.tolist(), found.gaps_ms.tolist(), strict=True))
    assert {step for step, ms in gaps.items() if ms > 1} == {7, 15}
    assert gaps[7] == pytest.approx(80.0, abs=0.01)
    assert found.judged_ms == pytest.approx(23 * 22.0)


def test_what_a_host_is_ahead_where_steps_go_on_by_its_clock_is_no_gap_where_they_go_back(tmp_path):
    """Steps of 22 ms. Rank 1's begin 60 ms earlier from step 8 on, 70 from 12 on, and as rank 0's again in
    step 16; behind step 19 come 80 ms in no step."""

    def make(rank, step, noise):
        ahead_ms = 60.0 * (8 <= step < 16) + 10.0 * (12 <= step < 16)
        start_ms = 22.0 * step + 80.0 * (step > 19) - rank * ahead_ms
        return Host().work(20.0).comm(2.0), {"start_unix_ns": 10**18 + int(start_ms * 1e6)}

    gaps = account(tmp_path / "run", make).gaps_ms
    assert gaps[np.isfinite(gaps)].round(2).tolist() == [0.0] * 18 + [80.0] + [0.0] * 3
