import pytest

from aorta.config.structs import SchedulerConfig
from aorta.training.setup import LossScale, learning_rate


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.6, 0.2]),
        ("cosine", [0.5, 1.0, 1.0, 0.6, 0.2]),
    ],
)
def test_learning_rate_rises_then_follows_its_kind(kind, expected):
    scheduler = SchedulerConfig(kind=kind, warmup_steps=2, min_lr_ratio=0.2)
    assert [learning_rate(step, 5, 1.0, scheduler) for step in range(5)] == pytest.approx(expected)


def test_without_warmup_the_first_step_has_the_full_rate():
    assert learning_rate(0, 1, 0.1, SchedulerConfig(warmup_steps=0)) == 0.1


def test_loss_scale_halves_on_overflow_and_doubles_after_enough_good_steps():
    scale = LossScale(enabled=True, initial=8.0, growth_interval=2)
    values = []
    for finite in (False, True, True, True, False):
        scale.update(finite)
        values.append(scale.value)
    assert values == [4.0, 4.0, 8.0, 8.0, 4.0]


def test_a_disabled_loss_scale_stays_one():
    scale = LossScale(enabled=False)
    scale.update(False)
    assert scale.value == 1.0
