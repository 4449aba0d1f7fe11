"""Tiers: what this machine or this run is not for (gpu(count), slow), and what the fast tier leaves out."""

import contextlib
import gc
import importlib
import itertools
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from tests.dist import launch
from tests.log_records import LogRecords
from tests.tiers import FIRST, ProcessWatch, leaves_the_process

# The tests' tensors are small: threads within an operation only take cores from other processes. Set before
# anything imports torch, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# In the background of a shell that is no terminal interrupts are ignored, here and in what tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all tests are collected: hundreds of thousands of objects, none of which goes away

# A machine that is busy with something else must not fail a property test.
WATCH = ProcessWatch()

hypothesis.settings.register_profile("aorta", deadline=None, max_examples=40)
hypothesis.settings.register_profile("deep", deadline=None, max_examples=500)  # --hypothesis-profile deep
hypothesis.settings.load_profile("aorta")


@pytest.fixture(scope="session")
def _cache_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders that are not there yet. Of their own: pytest reads its whole folder for each that it makes."""
    parent = tmp_path_factory.mktemp("caches")
    return (parent / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _own_cache(_cache_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the cache of the user."""
    folder = next(_cache_folders)
    folder.mkdir()
    monkeypatch.setenv("AORTA_CACHE_DIR", str(folder))


@pytest.fixture(scope="session", autouse=True)
def _nothing_waits_for_the_disk() -> Iterator[None]:
    """No file of a test has to outlive the machine; a descriptor that is closed is an error all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """A test that leaves its process group behind fails itself, and not those after it in its worker."""
    before = _has_group()
    yield
    if _has_group() and not before:
        sys.modules["torch.distributed"].destroy_process_group()
        pytest.fail("leaves its process group: destroy_process_group() at its end")


@pytest.fixture(autouse=True)
def _nothing_stays_compiled() -> Iterator[None]:
    """Where a test compiled something, recording would not name modules in those after it in its worker."""
    yield
    compiler = sys.modules.get("torch._dynamo.utils")
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    if compiler is not None and (compiler.counters or any(one is not None for one in backends.values())):
        sys.modules["torch._dynamo"].reset()
        compiler.counters.clear()


@pytest.fixture
def caplog() -> Iterator[LogRecords]:
    """What is logged. pytest's plugin, which has it else, looks through all loggers six times in every test:
    torch has hundreds of them, and a test in three took less than that."""
    handler = LogRecords()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


@pytest.fixture(autouse=True)
def _no_process_in_the_fast_tier(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test of the fast tier that starts a process all the same fails."""
    if not request.config.getoption("--fast"):
        yield
        return
    WATCH.start()
    before = len(WATCH.started)
    yield
    if started := WATCH.started[before:]:
        pytest.fail(f"starts a process, mark it pytest.mark.processes: {started[0]}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")
    parser.addoption("--fast", action="store_true", help="leave out the tests marked processes and heavy")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Workers of -n auto: one more than cores, since tests of hangs, browsers and processes mostly wait; few,
    since many tests have two ranks of their own; none on GPUs, where tests must not meet."""
    has_gpu = Path("/dev/kfd").exists() or Path("/dev/nvidiactl").exists()
    return 0 if has_gpu else min(3, (os.cpu_count() or 1) + 1)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hypothesis-profile") != "deep":
        # Six seconds of CPU in each worker of a clean clone, for constants of modules that it has by chance.
        providers._get_local_constants = lambda: providers._local_constants
    if hasattr(config, "workerinput"):
        launch.SHARED_BY_WORKERS.append(Path(config.getoption("basetemp")).parent)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import some modules of the tests before the others, in each worker its own: a clean clone is compiled
    once between the workers, not by each of them. What cannot be imported is told where it is collected."""
    worker = getattr(session.config, "workerinput", None)
    if worker is not None:
        modules = sorted(Path(__file__).parent.rglob("test_*.py"))
        for path in modules[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
            name = ".".join(path.relative_to(session.config.rootpath).with_suffix("").parts)
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    fast = config.getoption("--fast")
    is_asked = fast or config.getoption("markexpr")
    for item in items:
        if is_asked and item.get_closest_marker("processes") is None and leaves_the_process(_functions(item)):
            item.add_marker("processes")
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        if gpu := item.get_closest_marker("gpu"):
            needed = gpu.args[0] if gpu.args else 1
            if (present := _num_gpus()) < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, {present} present"))

    if fast:
        left_out = [item for item in items if _is_left_out(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not _is_left_out(item)]
    if config.getoption("dist", "no") != "no" or hasattr(config, "workerinput"):
        items.sort(key=_turn)


def pytest_collection_finish() -> None:
    """What collection made stays to the end: the collector need not go through it again and again."""
    gc.freeze()
    gc.enable()


def _functions(item: pytest.Item) -> list[Any]:
    """The test and its fixtures."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
    return [item.function, *(fixture.func for several in fixtures for fixture in several)]  # type: ignore[attr-defined]


def _is_left_out(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("processes", "heavy"))


def _turn(item: pytest.Item) -> int:
    """Of the item's module; those that are not in FIRST come last."""
    return FIRST.get(item.nodeid.partition("::")[0].removeprefix("tests/"), len(FIRST))


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")  # not imported where no test has
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()
