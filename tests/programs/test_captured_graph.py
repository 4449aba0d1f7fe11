"""Which captured node a communication is, from what its waiting stream depends on."""

import sys
from pathlib import Path

import pytest

from aorta.programs.language.expr import HostProgramError

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from programs_apart import communication_node

MULTIPLY, KERNEL, AFTER = 1, 2, 3


@pytest.mark.parametrize(
    ("found", "new"),
    [
        pytest.param({MULTIPLY, KERNEL}, {KERNEL}, id="the wait brought it"),
        pytest.param({KERNEL}, set(), id="on the waiting stream itself"),
    ],
)
def test_the_awaited_node_is_found(found, new):
    assert communication_node(found, new, added={KERNEL, AFTER}) == KERNEL


def test_a_wait_that_shows_no_node_is_refused_with_the_counts():
    with pytest.raises(HostProgramError, match="added 0 dependencies, and 0 are of its own nodes"):
        communication_node({MULTIPLY}, set(), added={KERNEL})
