"""Files that a run without a process group moves aside before it writes."""

import os
import socket
import subprocess
import sys

import pytest

from aorta.errors import RecordError
from aorta.record import run_folder
from aorta.record.run_folder import claim_folder
from aorta.records.files import RUN_FILES, state_name, steps_name
from aorta.records.run_identity import process_start
from aorta.records.state import ProcessState, StateFile, read_states


def finished_run(folder, world_size):
    """As a run leaves it that hung and was traced; and a file of someone else."""
    for name in ("torch_profiler", "tensorboard", "hang"):
        (folder / name).mkdir()
        (folder / name / "old").write_text(name)
    for name in ("run.json", "notes.txt", *map(steps_name, range(world_size))):
        (folder / name).write_text("old")


def left(folder):
    """Without the state of a rank of this process, which tells whose the folder is."""
    own = {
        state_name(rank) for rank, state in read_states(folder).items() if state.process.pid == os.getpid()
    }
    return {path.name for path in folder.iterdir() if not path.name.startswith("previous-")} - own


def moved(folder):
    return {path.name for path in folder.glob("previous-*/*")}


def test_nothing_of_the_last_run_stays_beside_the_records_of_the_next(tmp_path):
    finished_run(tmp_path, world_size=1)
    claim_folder(tmp_path, rank=0, world_size=1)
    assert left(tmp_path) == {"notes.txt"}
    assert moved(tmp_path) == {"run.json", steps_name(0), "torch_profiler", "tensorboard", "hang"}
    assert (next(tmp_path.glob("previous-*")) / "hang" / "old").read_text() == "hang"


def test_a_rank_leaves_the_files_of_others_which_may_be_new(tmp_path):
    finished_run(tmp_path, world_size=3)
    claim_folder(tmp_path, rank=1, world_size=2)
    assert moved(tmp_path) == {steps_name(1)}
    claim_folder(tmp_path, rank=0, world_size=2)  # and what no rank of this run will write
    assert left(tmp_path) == {"notes.txt"}


@pytest.mark.parametrize("pattern", RUN_FILES)
def test_rank_0_leaves_nothing_that_a_run_writes(tmp_path, pattern):
    (tmp_path / pattern.replace("*", "0")).mkdir()
    claim_folder(tmp_path, rank=0, world_size=1)
    assert left(tmp_path) == set()


def test_the_next_attempt_waits_for_a_writer_that_has_not_opened_its_file_yet(tmp_path, monkeypatch):
    """The writer's rank was killed a moment after it had started the writer."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    writer = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    state = ProcessState(
        run_id="r", attempt=0, rank=0, world_size=1, host=socket.gethostname(), pid=gone.pid,
        process_start=1.0, started_unix_ns=0, written_unix_ns=0, writer_pid=writer.pid,
        writer_start=process_start(writer.pid),
    )  # fmt: skip
    file = StateFile(tmp_path / state_name(0), 0)
    file.write(state)
    file.close()
    monkeypatch.setattr(run_folder, "WRITERS_S", 0.0)
    with pytest.raises(RecordError, match=f"process {writer.pid} is still writing the lines of rank 0"):
        claim_folder(tmp_path, rank=0, world_size=1)
    writer.stdin.close()
    writer.wait()
    claim_folder(tmp_path, rank=0, world_size=1)
