"""What a program's traceback looks like under `aorta run`: as it would without."""

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

import aorta
from aorta.attach.hooks import without_frames_of_aorta

PASSING_ON = "def call(function):\n    function()\n"


def passed_on(place: str) -> Callable[[Callable[[], None]], None]:
    """A function of a file below aorta/ that calls what it is given, as replaced functions do."""
    names: dict[str, Callable[[Callable[[], None]], None]] = {}
    exec(compile(PASSING_ON, str(Path(aorta.__file__).parent / place), "exec"), names)
    return names["call"]


def fails() -> None:
    raise ValueError("planted")


def fails_behind_another() -> None:
    try:
        passed_on("record/host.py")(fails)
    except ValueError as error:
        raise RuntimeError("behind it") from error


def files(error: BaseException | None) -> list[str]:
    """Of the frames of an exception and those behind it."""
    if error is None:
        return []
    names = [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]
    return [*names, *files(error.__cause__)]


@pytest.mark.parametrize(("function", "num_own"), [(fails, 3), (fails_behind_another, 5)])
def test_frames_of_the_recorder_are_not_shown(function: Callable[[], None], num_own: int) -> None:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        passed_on("attach/hooks.py")(lambda: passed_on("record/host.py")(function))
    assert {"hooks.py", "host.py"} <= set(files(caught.value))
    without_frames_of_aorta(caught.value)
    assert files(caught.value) == ["test_tracebacks.py"] * num_own


def test_frames_of_training_code_in_aorta_stay() -> None:
    with pytest.raises(ValueError, match="planted") as caught:
        passed_on("training/trainer.py")(fails)
    without_frames_of_aorta(caught.value)
    assert "trainer.py" in files(caught.value)
