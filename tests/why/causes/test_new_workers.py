"""What a loader's workers cost that start anew at each epoch, in whichever of its steps it is."""

import msgspec
import pytest

from aorta.account.judge.judged import judge
from aorta.account.load.open import load_run
from aorta.why.causes.program import loader_of
from tests.records.run_folders import run_record
from tests.why.causes.runs import Host, causes, run_of

STEPS, EPOCH = 42, 7
ANEW = {"num_workers": 2, "num_batches": STEPS, "num_epochs": STEPS // EPOCH, "site": "train.py:41"}


def told(folder, make, **loader):
    run = msgspec.structs.replace(run_record(2), program={"loaders": [ANEW | loader]})
    found = causes(judge(load_run(run_of(folder, make, run, steps=STEPS), "run"), 1))
    return [one for one in found if "start anew" in one.change]


def body(noise, data=0.5, compute=30.0):
    return Host().work(data, "data").work(compute * noise.gauss(1, 0.01)).work(1.0, "optimizer", "SGD")


def is_first(step):
    return step % EPOCH == 3


def is_last(step):
    return step % EPOCH == 2


def in_own_loop(rank, step, noise):
    """The last request of an epoch ends its workers; the first of the next one waits for new ones."""
    return body(noise, 30.5, 35.0) if is_first(step) else body(noise)


def a_batch_ahead(rank, step, noise):
    host = body(
        noise, 12.5 if is_last(step) else 8.5 if is_first(step) else 0.5, 35.0 if is_first(step) else 30.0
    )
    return host.after(10.0, "data") if is_last(step) else host


def let_go_of(rank, step, noise):
    """The next iterator is made before the last one goes, which ends its workers."""
    host = body(noise, 8.5 if is_first(step) else 0.5, 35.0 if is_first(step) else 30.0)
    return host.after(12.0, "data").after(10.0, "data") if is_last(step) else host


@pytest.mark.parametrize(
    ("make", "first_ms"),
    [
        pytest.param(in_own_loop, 0.0, id="one-request-has-all"),
        pytest.param(a_batch_ahead, 8.0, id="a-batch-ahead"),
        pytest.param(let_go_of, 8.0, id="let-go-of"),
    ],
)
def test_all_that_comes_with_new_workers_is_one_loss(tmp_path, make, first_ms):
    """30 ms in the loader and 5 beside it, in one of seven steps: 5 ms a step, of which loading is sure, but
    for what the first batch takes that stays."""
    (cause,) = told(tmp_path / "run", make)
    assert cause.ms == pytest.approx((35 - first_ms / 2) / EPOCH, rel=0.1)
    assert "every seventh step" in cause.subject
    assert "persistent_workers=True at train.py:41" in cause.change
    assert "num_workers=0" in cause.change
    low, high = cause.interval_ms
    assert low < 30 / EPOCH < high
    assert "start anew in each epoch" in cause.evidence[0]


@pytest.mark.parametrize(
    ("first_ms", "stays_ms"),
    [
        pytest.param(30.0, 30.0, id="within-what-workers-have-for-one"),
        pytest.param(300.0, 2 * (31.5 + 300 / EPOCH), id="two-workers-have-149-ms-for-one"),
    ],
)
def test_workers_that_stay_make_the_first_batch_as_well(tmp_path, first_ms, stays_ms):
    """100 ms until the workers run are lost for sure; of the wait for their first batch half is told."""

    def make(rank, step, noise):
        host = Host()
        if is_first(step):  # the last request, and the iterator
            host.work(20.0, "data").work(80.0, "data")
        host.work(first_ms if is_first(step) else 0.5, "data")
        return host.work(30.5 * noise.gauss(1, 0.01)).work(0.5, "optimizer", "SGD")

    (cause,) = told(tmp_path / "run", make)
    all_ms = 100 + first_ms
    assert cause.ms == pytest.approx((all_ms - stays_ms / 2) / EPOCH, rel=0.05)
    low, high = cause.interval_ms
    assert low < (all_ms - stays_ms) / EPOCH < all_ms / EPOCH < high
    assert "workers that stay need not start for it, but have to make it" in cause.evidence[1]


def evaluated(rank, step, noise):
    """An epoch ends with an evaluation, and its first step is slower for it."""
    host = body(noise, compute=60.0 if is_first(step) else 30.0)
    return host.after(40.0, "pause").after(3.0, "data") if is_last(step) else host


def logged(rank, step, noise):
    """What the program does at the end of an epoch is its own."""
    host = body(noise, 20.5 if is_first(step) else 0.5)
    return host.after(60.0) if is_last(step) else host


def test_what_else_an_epoch_ends_with_is_no_loss_of_its_workers(tmp_path):
    assert told(tmp_path / "evaluated", evaluated) == []
    (cause,) = told(tmp_path / "logged", logged)
    assert cause.ms == pytest.approx(20 / EPOCH, rel=0.1)


@pytest.mark.parametrize(
    "loader",
    [
        pytest.param({"persistent_workers": True}, id="they-stay"),
        pytest.param({"num_workers": 0}, id="none"),
        pytest.param({"num_epochs": 1}, id="one-epoch"),
    ],
)
def test_workers_that_do_not_start_anew_are_not_named(tmp_path, loader):
    assert told(tmp_path / "run", in_own_loop, **loader) == []


def test_a_loader_that_is_slow_in_every_step_is_another_loss(tmp_path):
    def slow(rank, step, noise):
        return body(noise, 60.0 if is_first(step) else 20.0)

    (cause,) = told(tmp_path / "run", slow)
    assert cause.ms == pytest.approx(40 / EPOCH, rel=0.1)


def test_a_loader_that_accelerate_makes_of_the_programs_is_told_where_that_was_made():
    kept = {"dataset": "Tiles", "num_workers": 1, "persistent_workers": False, "prefetch_factor": 4}
    of_program = kept | {"batch_size": 8, "num_batches": 0, "site": "train.py:92"}
    validation = of_program | {"num_workers": 0, "site": "train.py:94"}
    prepared = kept | {"batch_size": None, "num_batches": 260, "site": "train.py:99"}
    found = loader_of({"loaders": [of_program, validation, prepared]})
    assert found == prepared | {"batch_size": 8, "site": "train.py:92"}
    assert loader_of({"loaders": [validation, prepared]}) == prepared


def test_of_loaders_that_accelerate_takes_in_one_line_the_first_is_meant():
    kept = {"dataset": "Tiles", "num_workers": 0, "persistent_workers": False, "prefetch_factor": None}
    made = [
        kept | {"batch_size": size, "num_batches": 0, "site": f"train.py:{line}"}
        for size, line in ((256, 64), (250, 65))
    ]
    prepared = kept | {"batch_size": None, "num_batches": 144, "site": "train.py:69", "times": 2}
    assert loader_of({"loaders": [*made, prepared]}) == prepared | {"batch_size": 256, "site": "train.py:64"}
    assert loader_of({"loaders": [*made, prepared | {"times": 1}]})["site"] == "train.py:69"
