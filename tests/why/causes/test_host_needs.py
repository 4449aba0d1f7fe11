"""By how much a device's work can shorten a step before its host is what the step waits for."""

from types import SimpleNamespace

import numpy as np
import pytest

from aorta.records.stacks import StackFrame
from aorta.why.causes.finding import CauseFinding
from aorta.why.causes.losses import host_needs as module
from aorta.why.causes.losses.host_needs import host_needs, within_host_needs
from aorta.why.causes.rank import _least_beside_host


def run(host_ms, step_ms=20.0, waits_ms=0.0):
    """Steps of each rank, whose bodies take host_ms on the host, waits_ms of them for the device."""
    host = np.atleast_2d(np.array(host_ms, dtype=float))
    made = SimpleNamespace(
        ranks=[],
        judged_steps=slice(None),
        metrics={"host_ms": host, "step_ms": np.zeros(host.shape) + step_ms},
        host_parts={"host.synchronisation": np.full(host.shape, waits_ms)},
    )
    made.whole = made
    return made


def account(launch=0.0, on_device=True, step_ms=20.0):
    return SimpleNamespace(on_device=on_device, share=lambda name: launch, mean_step_ms=step_ms)


MOSTLY_HELD_UP = [12.0] * 3 + [20.0] * 17
"""A full queue holds the host up in all steps but three."""

REFILLED = [2.0] * 6 + [20.0] * 14
"""The host launches six steps ahead, and then as fast as its device works."""

DRAINED = ([20.0] * 36 + [46.0, 7.0, 8.0]) * 4
"""In one of 39 steps a value is read: the host waits until the queue is empty, and the next two are free."""

BESIDE = ([20.0] * 38 + [34.0]) * 4
"""The same with a read behind the step's body: the step takes that much longer."""
FREE_ONCE = [8.0] + ([20.0] * 38 + [8.0]) * 3 + [20.0] * 38


@pytest.mark.parametrize(
    ("judged", "state", "room_ms"),
    [
        pytest.param(run(MOSTLY_HELD_UP), account(), 8.0, id="shortest-steps"),
        pytest.param(run([20.0] * 20, waits_ms=9.0), account(), 9.0, id="waits-are-no-need"),
        pytest.param(run([19.0] * 20), account(), np.inf, id="always-held-up"),
        pytest.param(run([19.0] * 20), account(launch=0.5), 1.0, id="never-held-up"),
        pytest.param(run([12.0] * 5), account(), None, id="few-steps"),
        pytest.param(run(REFILLED, step_ms=REFILLED), account(), 18.0, id="fills-an-empty-queue-first"),
        pytest.param(run([20.0, 28.0, 12.0] * 7), account(), np.inf, id="made-up-for-stalls"),
        pytest.param(run([20.0, 28.0, 12.0, 12.0] * 5), account(), 8.0, id="free-behind-stalls"),
        pytest.param(run(DRAINED), account(), 12.0, id="behind-reads-that-are-few"),
        pytest.param(run(([20.0] * 30 + [28.0, 11.0, 21.0]) * 4), account(), np.inf, id="a-queue-that-jumps"),
        pytest.param(run(FREE_ONCE, step_ms=BESIDE), account(), 12.0, id="one-step-behind-each-read"),
        pytest.param(run(FREE_ONCE), account(), np.inf, id="one-step-behind-nothing"),
        pytest.param(run([20.0] * 90 + [8.0]), account(), np.inf, id="one-short-step"),
        pytest.param(run(MOSTLY_HELD_UP), account(on_device=False), None, id="of-a-CPU"),
        pytest.param(run([[12.0] * 20, [15.0] * 20]), account(), 5.0, id="the-rank-with-least"),
        pytest.param(run(MOSTLY_HELD_UP), account(step_ms=19.0), 7.0, id="of-the-step-that-is-told"),
    ],
)
def test_room_is_what_a_step_has_beyond_the_need_of_its_host(judged, state, room_ms):
    found = host_needs(judged, state)
    assert (None if found is None else found.room_ms) == (room_ms and pytest.approx(room_ms))


@pytest.mark.parametrize("noted_ms", [0.0, 5.0], ids=["not-noted", "a-part-is-noted"])
@pytest.mark.parametrize("leaf", [("", "item"), ("torch", "_Orthogonal.forward"), ("", "torch.linalg.solve")])
def test_reads_within_a_model_are_no_need_of_its_host(monkeypatch, leaf, noted_ms):
    """Of 18 of 20 ms in each step 14 are in item(), by samples, or in a solve, whose error code is read."""
    leaves = StackFrame(leaf[0], 0, leaf[1], False), StackFrame("torch", 0, "Linear.forward", False)
    samples = SimpleNamespace(
        ms=np.array([14.0, 6.0]),
        is_judged=np.array([True, True]),
        leaf_is=lambda test: np.array([test(leaf) for leaf in leaves]),
    )
    monkeypatch.setattr(module, "samples_of_ranks", lambda judged: [samples])
    found = host_needs(run([18.0] * 20, waits_ms=noted_ms), account())
    assert (found.need_ms, found.room_ms) == pytest.approx((4.0, 16.0))


def test_work_of_a_device_saves_no_more_than_the_room_and_might_save_all():
    """8 ms of room: of 14 ms, 6 may come with launches that go, too. What else is lost stays."""
    losses = [CauseFinding(kind, np.full(20, 14.0), {("compute",): 1.0}) for kind in ("compute", "late_rank")]
    needless, late = within_host_needs(run(MOSTLY_HELD_UP), account(), losses)
    assert (needless.mean_ms, needless.more_ms) == pytest.approx((8.0, 6.0))
    assert "the host needs 12.0 ms" in needless.evidence[0]
    assert "more only where the host has less to do as well" in needless.evidence[0]  # as more_ms allows
    assert (late.mean_ms, late.more_ms, late.evidence) == (14.0, 0.0, [])


@pytest.mark.parametrize(("launched", "saved_ms"), [(0.0, 8.0), (0.25, 11.0), (0.5, 14.0)])
def test_operators_that_are_left_out_need_no_launch(launched, saved_ms):
    """8 ms of room, and of the 12 that the host needs what these take it: 14 ms are computed for them."""
    finding = CauseFinding("compute", np.full(20, 14.0), {("compute",): 1.0}, facts={"launched": launched})
    [found] = within_host_needs(run(MOSTLY_HELD_UP), account(), [finding])
    assert found.mean_ms == pytest.approx(saved_ms)


def test_the_steps_that_show_what_a_host_needs_are_told():
    """A device that waits for launches in a fifth of the loss computes the rest of it."""
    told = []
    for judged in (run(MOSTLY_HELD_UP), run(DRAINED)):
        takes = {("compute",): 0.8, ("launch",): 0.2}
        [found] = within_host_needs(judged, account(), [CauseFinding("compute", np.full(20, 20.0), takes)])
        told += found.evidence
    assert all("the device computes 16.0 ms for it" in text for text in told)
    assert "12.0 ms for its own part of a step (it takes less in 1 of 20 steps)" in told[0]
    assert "8.00 ms for its own part of a step (as in steps in which no full queue" in told[1]


def test_what_work_of_a_device_saves_is_the_most_where_its_host_waits_in_every_step():
    losses = [CauseFinding(kind, np.full(20, 14.0), {("compute",): 1.0}) for kind in ("compute", "late_rank")]
    needless, late = within_host_needs(run([19.0] * 20), account(), losses)
    assert (needless.mean_ms, needless.facts, late.facts) == (14.0, {"is_most": True}, {})
    assert "no step shows how long" in needless.evidence[0]


def test_of_what_nobody_knows_a_bound_its_host_gives_none():
    finding = CauseFinding("compute", np.full(20, 14.0), {("compute",): 1.0}, facts={"unbounded": "?"})
    (found,) = within_host_needs(run([19.0] * 20), account(), [finding])
    assert not found.facts["is_most"]


def test_what_is_launched_for_each_image_spares_its_host_too():
    columns = CauseFinding("compute", np.full(20, 14.0), {("compute",): 1.0}, facts={"op": "columns"})
    (found,) = within_host_needs(run([19.0] * 20), account(), [columns])
    assert (found.mean_ms, found.facts) == (14.0, {"op": "columns"})


@pytest.mark.parametrize(
    ("least", "device_ms", "kept"),
    [
        pytest.param(0.25, None, 0.25, id="no-room-missing"),
        pytest.param(0.25, 20.0, 0.125, id="half-of-it"),
        pytest.param(0.25, 200.0, 0.05, id="next-to-nothing"),
        pytest.param(0.02, 200.0, 0.02, id="small-already"),
    ],
)
def test_work_is_named_from_the_part_that_all_of_it_would_be(least, device_ms, kept):
    """10 ms of it are left: of 20 ms half as much is asked for, but 5 % of the step."""
    finding = CauseFinding("compute", np.full(20, 10.0), {("compute",): 1.0})
    finding.facts |= {} if device_ms is None else {"device_ms": device_ms}
    assert _least_beside_host(least, finding) == kept
