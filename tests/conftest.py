"""Skips what this machine or this run is not for: tests marked gpu(count) and slow."""

import hypothesis
import pytest

# A machine that is busy with something else must not fail a property test.
hypothesis.settings.register_profile("aorta", deadline=None, max_examples=50)
hypothesis.settings.load_profile("aorta")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


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
