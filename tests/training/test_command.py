"""train.py as a user starts it."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

import train
from aorta.training import command
from tests.dist.launch import run_command, run_python, started_command
from tests.limits import LIMIT_S
from tests.training import troubled_ranks

TINY = [
    "model.hidden=16",
    "model.ffn=24",
    "model.num_layers=1",
    "model.vocab_size=32",
    "data.seq_len=8",
    "training.precision=fp32",
    "training.batch_size=1",
]


def test_a_mistake_is_one_line_and_exit_status_2():
    result = run_python("train.py", "--override", "training.grad_acum_steps=3")
    assert result.returncode == 2
    line = "train.py: training.grad_acum_steps is not a setting, did you mean 'grad_accum_steps'?"
    assert result.stderr.splitlines()[-1] == line
    assert "Traceback" not in result.stderr


def test_an_unknown_argument_is_one_line_and_exit_status_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--overide", "a=b"])
    with pytest.raises(SystemExit) as ended:
        train.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1] == "train.py: unrecognized arguments: --overide a=b"
    assert "Traceback" not in error


def test_the_default_settings_are_found_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--override", "training.max_step=3"])
    assert train.main() == 2
    error = capsys.readouterr().err
    assert error == "train.py: training.max_step is not a setting, did you mean 'max_steps'?\n"


def test_a_mistake_is_said_once_for_all_ranks():
    exit_codes, _, errors = run_command(command.main, ["--override", "parallel.dp=3"], 2)
    assert exit_codes[0] == 2
    assert errors.count("parallel.dp = 3") == 1


SECOND_MACHINE = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999",
}  # fmt: skip
NO_GPUS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        pytest.param("training.device=cuda", "training.device = cuda needs 1 GPUs", id="its-own"),
        pytest.param("parallel.dp=3", "parallel.dp = 3 x parallel.tp = 1 needs 3", id="its-settings"),
    ],
)
def test_a_mistake_on_another_machine_is_said_there(setting, message):
    arguments = ["--override", setting]
    exit_codes, _, errors = run_command(command.main, arguments, **SECOND_MACHINE, **NO_GPUS)
    assert exit_codes == [2]
    assert errors.startswith(f"train.py: rank 1: {message}")
    assert errors.count("\n") == 1


def test_a_rank_number_that_is_none_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "one")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert train.main() == 2
    error = capsys.readouterr().err
    assert error == "train.py: rank one: RANK must be a number, got 'one'; start with torchrun\n"


def test_a_mistake_is_said_where_the_first_rank_is_a_second_late():
    arguments = ["--override", "parallel.dp=3"]
    exit_codes, _, errors = run_command(troubled_ranks.first_rank_is_late, arguments, 2)
    assert errors.count("parallel.dp = 3") == 1
    assert exit_codes[0] == 2


def test_a_checkpoint_folder_that_is_none_is_said_once_before_anything_is_trained(tmp_path):
    file = tmp_path / "file"
    file.touch()
    arguments = [
        "--override", *TINY, f"training.output_dir={tmp_path / 'run'}", f"training.checkpoint_dir={file}",
        "training.checkpoint_at_end=true", "training.max_steps=2",
    ]  # fmt: skip
    exit_codes, _, errors = run_command(command.main, arguments, 2)
    assert [line for line in errors.splitlines() if line.startswith("train.py: ")] == [
        f"train.py: checkpoints cannot be written to {file}: File exists; "
        "choose another training.checkpoint_dir"
    ]
    assert 2 in exit_codes
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_is_said_once_and_leaves_the_records(tmp_path):
    folder = tmp_path / "checkpoints"
    arguments = [
        "--override", *TINY, f"training.output_dir={tmp_path / 'run'}", f"training.checkpoint_dir={folder}",
        "training.checkpoint_every=2", "training.max_steps=4",
    ]  # fmt: skip
    exit_codes, _, errors = run_command(troubled_ranks.disk_of_rank_1_is_full, arguments, 2)
    assert errors.splitlines() == [
        f"train.py: rank 1: checkpoint step_00000002 cannot be written to {folder}: File too large; "
        "choose another training.checkpoint_dir"
    ]
    assert 2 in exit_codes
    assert list(folder.iterdir()) == []
    for rank in range(2):
        lines = (tmp_path / "run" / f"rank_{rank}_metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["global_step"] for line in lines] == [0, 1]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["finished_unix_ns"] is not None


def test_a_damaged_checkpoint_is_said_once(tmp_path):
    settings = ["--override", *TINY, f"training.output_dir={tmp_path}", "training.max_steps=1"]
    assert run_command(command.main, [*settings, "training.checkpoint_at_end=true"])[0] == [0]
    path = tmp_path / "checkpoints" / "step_00000001"
    os.truncate(path / ".metadata", 100)
    exit_codes, _, errors = run_command(command.main, [*settings, "training.resume=latest"], 2)
    (line,) = errors.splitlines()
    assert line.startswith(f"train.py: training.resume: {path} is damaged or incomplete, give another")
    assert 2 in exit_codes


def test_two_ranks_train_and_leave_records(tmp_path):
    """Under torchrun, each rank an interpreter of its own."""
    result = run_python(
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        "train.py", "--config", "config/fsdp.yaml",
        "--override", *TINY, f"training.output_dir={tmp_path}",
        "--override", "training.max_steps=4", "training.max_steps=6",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "6 steps" in result.stdout
    for rank in range(2):
        lines = (tmp_path / f"rank_{rank}_metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["global_step"] for line in lines] == list(range(6))
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path):
    arguments = [
        "--config", "config/ddp.yaml",
        "--override", *TINY, f"training.output_dir={tmp_path}", "training.max_steps=1000000",
        "training.epochs=1000000", "training.checkpoint_at_end=true",
    ]  # fmt: skip
    with started_command(command.main, arguments, 2) as ranks:
        deadline_s = time.monotonic() + LIMIT_S
        while "step 1/" not in ranks.stdout:
            assert time.monotonic() < deadline_s, ranks.stderr
            assert ranks.exit_codes == [None, None], ranks.stderr
            time.sleep(0.05)
        os.kill(ranks.processes[1].pid, signal.SIGTERM)
        ranks.wait()
        assert ranks.exit_codes == [0, 0], ranks.stderr
        assert "stopped by SIGTERM" in ranks.stdout
    lengths = {
        len((Path(tmp_path) / f"rank_{rank}_metrics.jsonl").read_text().splitlines()) for rank in range(2)
    }
    assert len(lengths) == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step_{lengths.pop():08d}"]
