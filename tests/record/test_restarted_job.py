"""A job that its launcher starts again, with as many ranks or others, is one run."""

from pathlib import Path

import msgspec
import pytest

from aorta.account.load.open import load_run
from aorta.record.run_folder import _earlier_run
from aorta.records.reader import read_run
from aorta.records.run_identity import RunLaunch, continues
from aorta.records.schema import AttemptRecord
from aorta.records.writer import write_json
from tests.dist.launch import RankFailure, run_ranks
from tests.record.restarted_ranks import some_steps
from tests.records.plain_records import run


def attempts_of(folder: Path) -> list[tuple[int, str | None, list[int | None]]]:
    attempts = read_run(folder).attempts
    return [(a.world_size, None if a.ending is None else a.ending.kind, a.last_steps) for a in attempts]


def start(folder: Path, num_ranks: int, first: int, last: int, raises: bool, **environment: str) -> None:
    arguments = (some_steps, num_ranks, str(folder), first, last, raises)
    if raises:
        with pytest.raises(RankFailure, match="planted"):
            run_ranks(*arguments, environment=environment)
    else:
        run_ranks(*arguments, environment=environment)


def test_an_elastic_job_of_four_then_two_then_four_ranks_is_one_run(tmp_path: Path) -> None:
    for number, (num_ranks, first, last) in enumerate(((4, 0, 2), (2, 2, 3), (4, 4, 5))):
        count = str(number)
        start(
            tmp_path, num_ranks, first, last, number < 2,
            TORCHELASTIC_RUN_ID="job", TORCHELASTIC_RESTART_COUNT=count,
        )  # fmt: skip
    assert attempts_of(tmp_path) == [
        (4, "crashed", [2] * 4),
        (2, "crashed", [3] * 2),
        (4, "finished", [5] * 4),
    ]
    assert [attempt.first_step for attempt in read_run(tmp_path).attempts] == [0, 2, 4]
    assert not list(tmp_path.glob("previous-*"))
    joined = load_run(tmp_path, "joined")
    assert joined.global_step.tolist() == [0, 1, 4, 5]
    assert "steps 2 to 3 were done by 2 ranks and are left out: the others by 4" in joined.notes
    assert not any("none says why" in note for note in joined.notes)


def test_a_job_that_slurm_queues_again_is_one_run_and_the_next_job_another(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train"}
    start(tmp_path, 2, 0, 2, True, **job)
    start(tmp_path, 2, 2, 4, False, SLURM_RESTART_COUNT="1", **job)
    assert attempts_of(tmp_path) == [(2, "crashed", [2, 2]), (2, "finished", [4, 4])]
    joined = load_run(tmp_path, "joined")
    assert joined.global_step.tolist() == [0, 1, 2, 3, 4]
    assert any("step 2 was done in attempt 0 and again in attempt 1" in note for note in joined.notes)
    start(tmp_path, 2, 0, 0, False, SLURM_JOB_ID="78")
    assert [attempt[1] for attempt in attempts_of(tmp_path)] == ["finished"]
    assert len(list(tmp_path.glob("previous-*/run.json"))) == 1


def test_a_rank_0_of_an_agent_that_is_new_goes_on_with_the_others_run(tmp_path: Path) -> None:
    """A change of the number of agents is not counted as a restart; the other ranks' agent is the old one."""
    launch = RunLaunch(job="torchrun job", num_restarts=1, agent="host-a 5")
    attempt = AttemptRecord(attempt=0, world_size=2, started_unix_ns=1)
    record = run(run_id="r", launch=msgspec.to_builtins(launch), attempts=[attempt])
    write_json(tmp_path / "run.json", record)
    new = RunLaunch(job="torchrun job", agent="host-c 9")
    assert _earlier_run(tmp_path, new, lambda: {"host-a 5"}) is not None
    assert _earlier_run(tmp_path, new, lambda: {"host-d 2"}) is None
    other = RunLaunch(job="torchrun other", agent="host-c 9")
    assert _earlier_run(tmp_path, other, lambda: pytest.fail("nobody is asked")) is None


def test_of_two_agents_the_job_and_its_restarts_tell() -> None:
    def launch(restarts: int, agent: str, job: str = "torchrun job") -> RunLaunch:
        return RunLaunch(run_id=None, job=job, num_restarts=restarts, agent=agent)

    assert continues(launch(1, "host-b 7"), launch(0, "host-a 5"))
    assert not continues(launch(0, "host-b 7"), launch(0, "host-a 5"))
    assert not continues(launch(1, "host-b 7", "torchrun other"), launch(0, "host-a 5"))
