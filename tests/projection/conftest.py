import pytest

from aorta.hardware.part import load_hardware
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
