"""A disk that fills while a checkpoint is written, a checkpoint that is damaged."""

import errno
import logging
import logging.handlers
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from aorta.training import AgreedError
from aorta.training.checkpoint import Disk, replace
from tests.dist.launch import run_ranks
from tests.training.tiny_runs import Settings, content, settings, train_all

RNG_BYTES, TENSORS_BYTES = 1_000, 20_000
"""Sizes of files at which the write of a rank's random state fails, and that of its tensors."""


def expect_agreed_error(run_settings: Settings, full: dict[int, int] | None = None) -> str:
    """What the run ends with. Files of the ranks in `full` cannot grow beyond so many bytes.

    Nothing else is said on the way: no line of a log, with or without a traceback.
    """
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if full and dist.get_rank() in full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (full[dist.get_rank()], unlimited[1]))
    handler = logging.handlers.BufferingHandler(10**6)
    logging.getLogger().addHandler(handler)
    with pytest.raises(AgreedError) as error:
        train_all([run_settings])
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    logging.getLogger().removeHandler(handler)
    assert [record.getMessage() for record in handler.buffer] == []
    return str(error.value)


FULL = {
    "random-state": ({1: RNG_BYTES}, "rank 1: "),
    "tensors": ({1: TENSORS_BYTES}, "rank 1: "),
    "tensors-of-all": ({0: TENSORS_BYTES, 1: TENSORS_BYTES}, ""),
}
"""At how many bytes which ranks' files stop growing, and who says so."""


def test_a_disk_without_room_is_one_line_and_leaves_the_checkpoint_before(tmp_path):
    def of(name: str, **training: object) -> Settings:
        return settings(tmp_path / name, training=training)

    run_ranks(train_all, 2, [of(name, max_steps=2, checkpoint_at_end=True) for name in FULL])
    folders = {name: tmp_path / name / "checkpoints" for name in FULL}
    before = {name: content(folder) for name, folder in folders.items()}
    longer = [of(name, max_steps=6, checkpoint_every=2, resume="latest") for name in FULL]
    said = run_ranks(expect_full_disks, 2, longer, [full for full, _ in FULL.values()])
    assert said == [[
        f"{said_by}checkpoint step_00000004 cannot be written to {folders[name]}: File too large; choose "
        "another training.output_dir or training.checkpoint_dir, and continue with "
        f"training.resume={folders[name] / 'step_00000002'}"
        for name, (_, said_by) in FULL.items()
    ]] * 2  # fmt: skip
    for name, folder in folders.items():
        assert content(folder) == before[name]
        assert [path.name for path in folder.iterdir()] == ["step_00000002"]
    for summary, _ in run_ranks(train_all, 2, longer)[0]:
        assert (summary.first_step, summary.num_steps) == (2, 6)


def expect_full_disks(runs: list[Settings], full: list[dict[int, int]]) -> list[str]:
    return [expect_agreed_error(*both) for both in zip(runs, full, strict=True)]


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        pytest.param(".step_00000002.partial", "File exists", id="at-the-start"),
        pytest.param(".step_00000002.old", "Not a directory", id="at-the-end"),
    ],
)
def test_a_checkpoint_that_cannot_take_its_place_leaves_the_one_there(obstacle, reason, tmp_path):
    """From step 1 the run writes step 2 again."""
    saved = settings(tmp_path, training={"max_steps": 2, "checkpoint_every": 1})
    run_ranks(train_all, 2, [saved])
    folder = tmp_path / "checkpoints"
    (folder / obstacle).touch()
    before = content(folder)
    again = settings(
        tmp_path,
        training={"max_steps": 2, "checkpoint_every": 1, "resume": str(folder / "step_00000001")},
    )
    said = run_ranks(expect_agreed_error, 2, again)
    assert said[0] == said[1]
    assert f"checkpoint step_00000002 cannot be written to {folder}: {reason}; choose another" in said[0]
    assert content(folder) == before


def test_the_checkpoint_that_is_not_replaced_keeps_its_name(tmp_path):
    path = tmp_path / "step_00000002"
    path.mkdir()
    (path / "aorta.json").write_text("whole")
    with pytest.raises(FileNotFoundError):
        replace(tmp_path / "missing", path)
    assert content(tmp_path) == {path / "aorta.json": b"whole"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a device of Linux")
@pytest.mark.parametrize("num_elements", [10, 100_000])
def test_the_system_s_reason_outlives_torch_save_and_the_file_does_not(num_elements, tmp_path):
    """torch.save ends with a RuntimeError about positions in its archive."""
    path = tmp_path / "full"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="full") as error, Disk().create_stream(path, "wb") as stream:
        torch.save(torch.zeros(num_elements), stream)
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(path))
    assert not path.is_symlink()


def test_a_damaged_checkpoint_is_one_line_that_names_it(tmp_path):
    saved = settings(tmp_path, training={"max_steps": 1, "checkpoint_at_end": True})
    run_ranks(train_all, 2, [saved])
    whole = tmp_path / "checkpoints" / "step_00000001"
    paths: list[Path] = []
    for name in ("__1_0.distcp", ".metadata", "rng_1.pt", "aorta.json"):
        for how, damage in DAMAGES.items():
            paths.append(tmp_path / f"{name}-{how}" / "step_00000001")
            shutil.copytree(whole, paths[-1])
            damage(paths[-1] / name)
    resumed = [settings(tmp_path, training={"max_steps": 2, "resume": str(path)}) for path in paths]
    said = run_ranks(expect_agreed_errors, 2, resumed)
    assert said[0] == said[1]
    for path, line in zip(paths, said[0], strict=True):
        assert f"training.resume: {path} is damaged or incomplete, give another step_<n> folder" in line
        assert "\n" not in line


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, 20),
    "unreadable": lambda path: path.write_bytes(path.read_bytes().replace(b"o", b"\xff")),
    "missing": lambda path: path.unlink(),
}


def expect_agreed_errors(runs: list[Settings]) -> list[str]:
    return [expect_agreed_error(run_settings) for run_settings in runs]
