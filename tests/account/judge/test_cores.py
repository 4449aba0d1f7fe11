"""Cores that ranks, others and nobody had."""

import pytest

from aorta.account.judge.cores import CoresHad, cores_had
from aorta.account.judge.judged import dataset, judge, why_missing
from aorta.account.load.open import load_run
from aorta.page.table import dataset_table
from aorta.records.schema import HostUse
from tests.records.run_folders import run_record
from tests.why.causes.runs import Host, run_of

MODES = {"num_cores": 8, "num_local_ranks": 2, "shares_cores": True, "idle_cores": 3.0, "own_cores": 1.5}


def judged(folder, modes=MODES, use=lambda rank, step: HostUse(8.0, 0.0, 15.0 if rank < 2 else 5.0)):
    """Steps of 10 ms of four ranks on two machines."""

    def make(rank, step, noise):
        return Host().work(10.0), {"host_use": use(rank, step), "world_size": 4}

    run = run_record(4, program={"modes": modes})
    return judge(load_run(run_of(folder, make, run, width=4), "run"))


def test_ranks_have_what_their_processes_had_and_others_the_rest(tmp_path):
    """1.5 cores each on the busier machine. Of 8 over the run 3 idled and two ranks had 3: others 2."""
    had = cores_had(judged(tmp_path / "run"))
    assert had == CoresHad(8, pytest.approx(3.0), pytest.approx(0.2), pytest.approx(2.0))
    assert had.free == pytest.approx(3.0)


def test_others_have_what_unequal_ranks_leave(tmp_path):
    """Rank 0 counted its own 0.5; rank 1 has five times as many: both 3 of 8, of which 3 idle."""
    use = lambda rank, step: HostUse(4.0, 0.0, 25.0 if rank == 1 else 5.0)  # noqa: E731
    run = judged(tmp_path / "run", MODES | {"own_cores": 0.5}, use)
    assert cores_had(run).others == pytest.approx(2.0)
    assert "which 2 ranks share; other processes had 2.00" in dataset_table(dataset("run", [run]))


@pytest.mark.parametrize(
    ("modes", "use"),
    [
        pytest.param({}, None, id="nobody-counted-cores"),
        pytest.param({"num_cores": 8}, None, id="nobody-counted-idle-ones"),
        pytest.param(MODES, lambda rank, step: HostUse(8.0, 0.0), id="lines-of-an-earlier-version"),
        pytest.param(MODES, lambda rank, step: None, id="no-use-of-cores"),
        pytest.param(MODES, lambda rank, step: HostUse(8.0, 0.0, None if rank else 9.0), id="of-one-rank"),
    ],
)
def test_what_was_not_measured_is_not_known(tmp_path, modes, use):
    assert cores_had(judged(tmp_path / "run", modes, *([use] if use else []))) is None


def test_short_steps_without_a_reading_are_as_those_with_one(tmp_path):
    """Every second one has a reading: 12 ms of 10."""

    def use(rank, step):
        return HostUse(8.0, 0.0, 12.0 if step % 2 else None)

    run = judged(tmp_path / "run", use=use)
    assert cores_had(run).ranks == pytest.approx(2.4)
    assert run.statistics["cores_used"].median == pytest.approx(1.2)


def test_the_report_says_it_in_one_line(tmp_path):
    text = dataset_table(dataset("run", [judged(tmp_path / "run")]))
    (line,) = (line for line in text.splitlines() if line.startswith("cores of the host"))
    words = "cores of the host 1.00 0.500 to 1.50 of 8, which 2 ranks share; other processes had 2.00"
    assert line.split() == words.split()
    old = judged(tmp_path / "old", use=lambda rank, step: HostUse(8.0, 0.0))
    assert "cores of the host" not in dataset_table(dataset("old", [old]))
    reason = why_missing(dataset("old", [old]), "cores_used")
    assert reason == "the records tell no CPU time of whole processes"
