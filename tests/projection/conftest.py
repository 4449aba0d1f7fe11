import json
import shutil
from pathlib import Path

import pytest

from aorta.hardware import load_hardware
from aorta.projection.model import load_model
from aorta.projection.plan import Plan
from aorta.projection.prices import Pricer
from aorta.projection.step import project


@pytest.fixture(scope="session")
def h200():
    return load_hardware("h200")


@pytest.fixture(scope="session")
def price(h200):
    """Projects a model by name under a plan; hardware and switched-off terms can be given."""

    def run(name, hardware=h200, off=(), model=None, **plan):
        plan = Plan(**plan)
        return project(model or load_model(name), plan, Pricer(hardware, plan, disabled_terms=frozenset(off)))

    return run


@pytest.fixture
def h200_run(tmp_path):
    """A run of two ranks as aorta.training leaves it, said to have been on H200."""
    folder = tmp_path / "runs" / "fsdp"
    shutil.copytree(Path(__file__).resolve().parents[2] / "docs" / "example" / "fsdp", folder)
    run = json.loads((folder / "run.json").read_text())
    for device in run["devices"]:
        device["name"] = "NVIDIA H200"
    (folder / "run.json").write_text(json.dumps(run))
    return folder
