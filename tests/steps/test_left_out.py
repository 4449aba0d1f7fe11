"""Records of many left-out steps are those of each alone."""

import pytest
from msgspec.structs import replace

from aorta.records.schema import DeviceRecord
from aorta.steps.left_out import left_out_records
from aorta.steps.notes import HostNote, LeftOutStep, LeftOutSteps, ResolverSettings

SETTINGS = ResolverSettings(
    rank=1, world_size=2, on_device=False, clock_lower_ns=0, clock_upper_ns=0,
    unix_minus_monotonic_ns=1_700_000_000_000_000_000, run_id='a "run" of 100 %d', attempt=2,
)  # fmt: skip


def step(number, rollbacks=0, ready_ns=None, notes=(), process_ns=None):
    start_ns = 1_000_000 * number
    return LeftOutStep(
        number,
        rollbacks,
        start_ns,
        start_ns + 299_999,
        start_ns + 345_678,
        333_333,
        ready_ns,
        process_ns,
        8_765,
        list(notes),
    )


def block(*steps, device=None, reason="not recorded"):
    return LeftOutSteps(list(steps), reason, device, {} if device else {"device": "no GPU"})


SAMPLE = DeviceRecord(sample_unix_ns=1, temperature_c=50.5)
NOTES = [
    HostNote("data", 2_000_100, 2_050_123, ""),
    HostNote("optimizer", 2_200_000, 2_290_001, 'AdamW (100 %s, "fused")', 4096),
]


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(
            [block(step(1), step(2), step(3, notes=NOTES), step(4, ready_ns=12_345, process_ns=987_012))],
            id="one-block",
        ),
        pytest.param([block(step(1)), block(step(2, rollbacks=1), step(3, rollbacks=2))], id="rolled-back"),
        pytest.param([block(step(1)), block(step(2), device=SAMPLE), block(step(3))], id="telemetry"),
        pytest.param([block(step(1), reason="100 % <step>"), block(step(2))], id="reasons"),
        pytest.param([block(LeftOutStep(0, 0, 5, 5, 5, 0, 0, 0, 0, []))], id="no-time-at-all"),
    ],
)
def test_neighbours_are_what_each_would_be_alone(blocks):
    """But for what the first of them has told: reasons, and the sample of the device."""
    for steps in blocks:
        found = list(left_out_records(steps, SETTINGS, "host"))
        alone = [next(left_out_records(replace(steps, steps=[one]), SETTINGS, "host")) for one in steps.steps]
        assert found == [alone[0], *(replace(one, not_measured={}, device=None) for one in alone[1:])]
