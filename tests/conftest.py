"""Skips what this machine or this run is not for: tests marked gpu(count) and slow."""

import os
from pathlib import Path

import hypothesis
import pytest

# The tests' tensors are small: threads within an operation only take cores from other processes. Set before
# anything imports torch, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A machine that is busy with something else must not fail a property test.
hypothesis.settings.register_profile("aorta", deadline=None, max_examples=50)
hypothesis.settings.load_profile("aorta")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the cache of the user."""
    monkeypatch.setenv("AORTA_CACHE_DIR", str(tmp_path_factory.mktemp("cache", numbered=True)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Workers of -n auto. Many tests have two ranks of their own, and tests must not meet on a GPU."""
    has_gpu = Path("/dev/kfd").exists() or Path("/dev/nvidiactl").exists()
    return 0 if has_gpu else min(2, os.cpu_count() or 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        if gpu := item.get_closest_marker("gpu"):
            needed = gpu.args[0] if gpu.args else 1
            if (present := _num_gpus()) < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, {present} present"))


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()
