"""What is known to be wrong in a version of CUPTI."""

import pytest

from aorta.device.cupti_faults import FAULTS, known_faults, version_text


@pytest.mark.parametrize(
    ("version", "num_faults"),
    [
        pytest.param(21, 6, id="12.3"),
        pytest.param(24, 5, id="12.6"),
        pytest.param(130_000, 5, id="13.0"),
        pytest.param(130_001, 3, id="13.0.1"),
        pytest.param(130_101, 2, id="13.1.1"),
        pytest.param(130_401, 0, id="13.4.1"),
    ],
)
def test_a_version_has_the_faults_that_a_later_one_mends(version, num_faults):
    assert len(known_faults(version)) == num_faults


def test_each_fault_says_where_it_is_mended_and_that_nobody_tried_it_here():
    assert all("not tried" in text for text in known_faults(18))
    assert known_faults(130_100)[0].endswith("(mended in 13.1 update 1; from the release notes, not tried)")


def test_versions_are_shown_as_nvidia_writes_them():
    assert [version_text(fault.mended_in) for fault in FAULTS][:2] == ["12.4", "13.0 update 1"]
    assert version_text(130_100) == "13.1"
