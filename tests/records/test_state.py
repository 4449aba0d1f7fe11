"""How an attempt ended, from what its ranks say of themselves."""

import os
import socket

import pytest

from aorta.records.endings import attempt_ending
from aorta.records.run_identity import RunLaunch, continues, launch_of, process_start
from aorta.records.schema import Ending
from aorta.records.state import LinesState, ProcessState, RankState


def rank(number, ending=None, closed_unix_ns=None, alive=False):
    process = ProcessState(
        run_id="a", attempt=0, rank=number, world_size=3, host=socket.gethostname(),
        pid=os.getpid() if alive else 2**22 + number, process_start=process_start(os.getpid()),
        started_unix_ns=0, written_unix_ns=0, ending=ending,
    )  # fmt: skip
    return RankState(process=process, lines=LinesState(attempt=0, closed_unix_ns=closed_unix_ns))


def crashed(why, at=5):
    return Ending(kind="crashed", why=why, unix_ns=at)


OWN = "ValueError: planted"
PEER = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:49"
STOPPED = Ending(kind="stopped", why="SIGTERM", unix_ns=9)
FINISHED = Ending(kind="finished", unix_ns=9)


@pytest.mark.parametrize(
    ("states", "kind", "ranks"),
    [
        pytest.param([FINISHED] * 3, "finished", [], id="finished"),
        pytest.param([STOPPED] * 3, "stopped", [], id="stopped"),
        pytest.param([crashed(PEER, 3), crashed(OWN, 4), STOPPED], "crashed", [1], id="own-error-first"),
        pytest.param([crashed(PEER), None, STOPPED], "killed", [1], id="a-lost-peer-is-a-consequence"),
        pytest.param([crashed(PEER, 7), crashed(PEER, 6), STOPPED], "crashed", [1], id="the-earliest"),
        pytest.param(
            [Ending(kind="hung", why="x", ranks=[2], unix_ns=8), None, None], "hung", [2], id="hung"
        ),
        pytest.param(
            [Ending(kind="hung", why="x", ranks=[1], unix_ns=8), crashed(OWN, 4), None],
            "crashed", [1], id="a-hang-after-a-crash",
        ),
    ],
)  # fmt: skip
def test_who_ended_an_attempt(states, kind, ranks):
    found = attempt_ending([rank(i, one) for i, one in enumerate(states)], 3)
    assert (found.kind, found.ranks) == (kind, ranks)


@pytest.mark.parametrize(("closed_unix_ns", "kind"), [(3, "killed"), (9, "hung"), (None, "hung")])
def test_a_rank_that_had_gone_before_the_hang_was_killed(closed_unix_ns, kind):
    hung = Ending(kind="hung", why="rank 0 is behind", ranks=[0], unix_ns=8)
    ending = attempt_ending([rank(0, None, closed_unix_ns), rank(1, hung, 8)], 2)
    assert (ending.kind, ending.ranks) == (kind, [0])


def test_of_killed_ranks_the_one_is_named_whose_end_was_seen_first():
    found = attempt_ending([rank(0, None, 30), rank(1, None, 10), rank(2, None, 20)], 3)
    assert (found.kind, found.ranks) == ("killed", [1])


def test_a_run_that_goes_on_has_not_ended():
    assert attempt_ending([rank(0, alive=True), rank(1, alive=True), rank(2, alive=True)], 3) is None


@pytest.mark.parametrize(
    ("now", "earlier", "same"),
    [
        (RunLaunch(job="torchrun 5", num_restarts=1), RunLaunch(job="torchrun 5"), True),
        (RunLaunch(job="torchrun 5"), RunLaunch(job="torchrun 5"), False),
        (RunLaunch(job="torchrun 5", num_restarts=1), RunLaunch(job="torchrun 6"), False),
        (RunLaunch(job="slurm 5", num_requeues=1), RunLaunch(job="slurm 5", num_restarts=3), True),
        (RunLaunch(agent="h 1 2.0"), RunLaunch(agent="h 1 2.0"), True),
        (RunLaunch(), RunLaunch(), False),
        (RunLaunch(run_id="x"), RunLaunch(run_id="x"), True),
        (RunLaunch(run_id="x", agent="h 1 2.0"), RunLaunch(run_id="y", agent="h 1 2.0"), False),
    ],
)
def test_a_restart_goes_on_with_its_run_and_another_start_does_not(now, earlier, same):
    assert continues(now, earlier) is same


def test_a_job_of_slurm_keeps_its_name_where_torchrun_draws_another_one_each_time():
    drawn = {"TORCHELASTIC_RUN_ID": "146d55c7-9c4a-48d2-8edf-2d927b1801a8"}
    slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_RESTART_COUNT": "1"}
    assert launch_of(drawn).job == f"torchrun {drawn['TORCHELASTIC_RUN_ID']}"
    assert launch_of(drawn | slurm).job == "slurm 77 train"
    assert launch_of(drawn | slurm).num_requeues == 1
    assert launch_of({"TORCHELASTIC_RUN_ID": "mine"} | slurm).job == "torchrun mine"
