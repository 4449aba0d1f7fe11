"""A library's warning names the program's line under `aorta run`, as it would without."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from aorta.attach import hooks
from aorta.attach.importlib_bootstrap import call_after, call_after_save, call_before
from aorta.attach.settings import AttachSettings


class Library:
    def __init__(self, **named: Any) -> None:
        warnings.warn("planted", FutureWarning, stacklevel=2)


def save(obj: object, f: object) -> None:
    warnings.warn("planted", FutureWarning, stacklevel=2)


@contextmanager
def hooked(folder: Path) -> Iterator[None]:
    attachment = hooks.Attachment(AttachSettings(output=str(folder / "run")))
    attachment.imported("torch", torch)
    try:
        yield
    finally:
        attachment.take_off(None)


@pytest.mark.parametrize(
    "replaced",
    [
        pytest.param(lambda hook: call_after(Library, hook), id="after"),
        pytest.param(lambda hook: call_before(Library, hook), id="before"),
        pytest.param(lambda hook: lambda: call_after_save(save, hook, ())("weights", "file"), id="file"),
    ],
)
def test_a_warning_passes_over_what_calls_a_hook_as_well(replaced: Callable[..., Any]) -> None:
    seen: list[Any] = []
    with pytest.warns(FutureWarning, match="planted") as caught:
        replaced(seen.append)()
    assert caught[0].filename == __file__
    assert seen in ([()], ["file"])


def test_a_warning_that_is_an_error_is_raised_and_no_hook_is_called_behind_it() -> None:
    seen: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FutureWarning, match="planted"):
            call_after(Library, seen.append)()
    assert not seen


@pytest.mark.heavy
def test_ddps_warning_of_an_option_names_the_line_that_sets_it(tmp_path: Path) -> None:
    """torch 2.13 calls broadcast_buffers another name, and says so once for each line."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model, told = torch.nn.Linear(2, 2), {}
    line = sys._getframe().f_lineno
    for name, folder in (("without", None), ("with", tmp_path)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if folder is None:
                DistributedDataParallel(model, broadcast_buffers=False)
            else:
                with hooked(folder):
                    DistributedDataParallel(model, broadcast_buffers=False)
        told[name] = [(str(one.message), one.filename, one.lineno - line) for one in caught]
    dist.destroy_process_group()
    if not told["without"]:
        pytest.skip("this torch has no such warning")
    text = told["without"][0][0]
    assert told == {"without": [(text, __file__, 5)], "with": [(text, __file__, 8)]}
