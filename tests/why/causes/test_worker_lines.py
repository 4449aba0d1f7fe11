"""Causes of data loading name the work of the workers, or say that workers are not what a loop waits for."""

import os

import msgspec
import pytest

from aorta.account.judge.judged import judge
from aorta.account.judge.workers import loader_work
from aorta.account.load.open import load_run
from aorta.records.files import workers_name
from aorta.records.seal import encoded, sealed
from aorta.records.stacks import DOING, StackFrame
from aorta.records.workers import AWAITED, EVALUATES, NOT_AWAITED, WORKER_STATES, WorkerChunk, WorkerSample
from tests.records.run_folders import run_record
from tests.why.causes.runs import Host, causes, run_of, slow_loader
from tests.why.causes.stacks import COMMON, write_stacks

GET = StackFrame("/data/rows.py", 31, "Rows.__getitem__", True)
TURN = StackFrame("/data/rows.py", 9, "Rows.turn", True)
CALL = StackFrame("graphs", 0, "Transform.__call__", False)
WALK = StackFrame("graphs", 0, "Walk.forward", False)
PRODUCT = StackFrame("torch", 0, "spmm", False)
LOAD = StackFrame("numpy", 0, "load", False)
ROW = StackFrame("torch", 0, "TensorDataset.__getitem__", False)
JOIN = StackFrame("torch", 0, "collate", False)
LOADER = {"num_batches": 99, "num_epochs": 1, "site": "train.py:41", "dataset": "Rows"}


def write_workers(folder, *samples, num_workers=6, rank=0, draws=False, dataset="Rows", iterator=1):
    """samples: (state, part of the time, frames, and what differs)."""
    lines = []
    for worker in range(num_workers):
        frames = [*dict.fromkeys(frame for _, _, some, *_ in samples for frame in some)]
        nodes, rows = [], []
        for state, part, some, *more in samples:
            told = {"awaited": AWAITED, "doing": "runs"} | (more[0] if more else {})
            node = -1
            for frame in some:
                nodes.append((node, frames.index(frame)))
                node = len(nodes) - 1
            doing = DOING.index(told["doing"])
            of_time = WORKER_STATES.index(state), told["awaited"], doing, node, int(1e6 * part)
            rows.append(WorkerSample(*of_time, max(int(20 * part), 1)))
        chunk = WorkerChunk(
            run_id=None,
            iterator=iterator,
            worker=worker,
            num_workers=num_workers,
            dataset=dataset,
            frames=frames,
            nodes=nodes,
            samples=rows,
            num_batches=9,
            draws=draws,
        )
        lines.append(sealed(encoded(chunk), 0))
    with open(folder / workers_name(rank), "ab") as file:
        file.write(b"".join(lines))


def folder_with(tmp_path, *samples, modes=None, make=slow_loader, script=None, loader=(), **told):
    loader = LOADER | {"num_workers": told.get("num_workers", 6), **dict(loader)}
    run = msgspec.structs.replace(run_record(2), program={"loaders": [loader], "modes": modes or {}})
    if script is not None:
        run = msgspec.structs.replace(run, command=[str(script)], started_unix_ns=10**18)
    folder = run_of(tmp_path / "run", make, run)
    for rank in (0, 1):
        write_stacks(folder, rank, COMMON, ("getitem", "data", "sleeps", 9.0))
        write_workers(folder, *samples, rank=rank, **told)
    return folder


def first_of(folder):
    (first, *_) = causes(judge(load_run(folder, "run")))
    assert first.kind == "data_loading"
    return first, "\n".join(first.evidence)


BUSY = (
    ("fetches", 0.8, [GET, CALL, WALK, PRODUCT]),
    ("fetches", 0.1, [GET]),
    ("waits", 0.1, []),
)


def test_the_function_of_a_library_that_a_line_of_the_data_set_calls_is_named(tmp_path):
    first, evidence = first_of(folder_with(tmp_path, *BUSY))
    assert first.line.text == "Rows.__getitem__(), rows.py:31"
    assert first.subject.endswith("in Rows.__getitem__(), rows.py:31")
    assert (
        "the loader's 6 workers make batches in 90 % of the time in which the loop waits for one" in evidence
    )
    assert "89 % of that is in Walk.forward of graphs, called from Rows.__getitem__(), rows.py:31" in evidence
    assert first.change.startswith("compute once for each sample what Walk.forward of graphs gives")
    assert "no random numbers" in first.change
    assert (
        "at Rows.__getitem__(), rows.py:31; or set more workers than num_workers=6 at train.py:41"
        in first.change
    )


def test_work_that_draws_at_random_is_not_to_be_kept(tmp_path):
    first, _ = first_of(folder_with(tmp_path, *BUSY, draws=True))
    assert "compute before training what of Walk.forward of graphs draws nothing at random" in first.change


def test_the_programs_own_line_is_named_with_its_caller(tmp_path):
    samples = ("fetches", 0.9, [GET, TURN]), ("waits", 0.1, [])
    first, evidence = first_of(folder_with(tmp_path, *samples))
    assert first.line.text == "Rows.turn(), rows.py:9"
    assert (
        "100 % of that is in Rows.turn(), rows.py:9, called from Rows.__getitem__(), rows.py:31" in evidence
    )
    assert first.change.count("Rows.turn(), rows.py:9") == 1


@pytest.mark.parametrize(("batch_size", "is_told"), [(16384, True), (4, False)])
def test_rows_of_tensors_that_workers_fetch_one_by_one_need_no_more_of_them(tmp_path, batch_size, is_told):
    samples = ("fetches", 0.9, [ROW]), ("waits", 0.1, [])
    loader = {"dataset": "TensorDataset", "batch_size": batch_size}
    first, evidence = first_of(folder_with(tmp_path, *samples, loader=loader, dataset="TensorDataset"))
    assert "100 % of that is in TensorDataset.__getitem__ of torch" in evidence
    assert first.change.startswith("make whole batches at once")
    joined = folder_with(
        tmp_path / "joined", ("fetches", 0.9, [JOIN]), loader=loader, dataset="TensorDataset"
    )
    assert first_of(joined)[0].change.startswith("make whole batches at once") == is_told
    nowhere = folder_with(tmp_path / "nowhere", ("fetches", 0.9, []), ("waits", 0.1, []), loader=loader)
    assert "; most of that is in no single function" in first_of(nowhere)[1]


def test_a_line_that_makes_what_workers_call_is_named(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import graphs\n\nrows = Rows(turn=graphs.Walk(3))\n")
    os.utime(script, (1, 1))
    folder = folder_with(tmp_path, ("fetches", 0.9, [CALL, WALK, PRODUCT]), ("waits", 0.1, []), script=script)
    first, evidence = first_of(folder)
    assert "in Walk.forward of graphs, named in train.py:3" in evidence
    assert first.line.text == "train.py:3"


def test_what_to_do_instead_of_a_known_function_is_said(tmp_path):
    samples = ("fetches", 0.9, [GET, LOAD]), ("waits", 0.1, [])
    first, _ = first_of(folder_with(tmp_path, *samples))
    assert first.change.startswith("load it once, before training, and keep it")


def test_where_no_core_is_free_more_workers_are_not_offered(tmp_path):
    first, _ = first_of(folder_with(tmp_path, *BUSY, modes={"num_cores": 2}))
    assert first.change.startswith("compute once for each sample what Walk.forward of graphs gives")
    assert "none of the 2 is free" in first.change


@pytest.mark.parametrize(
    ("samples", "begins", "told"),
    [
        pytest.param(
            [("fetches", 0.03, [GET]), ("waits", 0.97, [])],
            "leave num_workers=6 at train.py:41",
            "waiting for work in 97 %",
            id="idle",
        ),
        pytest.param(
            [("fetches", 0.03, [GET]), ("waits", 0.57, []), ("hands_over", 0.4, [])],
            "put a batch together in the worker: at train.py:41",
            "pickling or sending one in 40 %",
            id="handing-over",
        ),
        pytest.param(
            [("fetches", 0.2, [GET, TURN]), ("waits", 0.8, [])],
            "set prefetch_factor at train.py:41 higher",
            "make batches in 20 %",
            id="one-batch-takes-long",
        ),
    ],
)
def test_workers_that_are_not_the_limit_are_said_to_be_none(tmp_path, samples, begins, told):
    first, evidence = first_of(folder_with(tmp_path, *samples))
    assert first.change.startswith(begins)
    assert told in evidence
    assert "set more" not in first.change


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([], id="none"),
        pytest.param([("fetches", 0.9, [GET, TURN], {"awaited": NOT_AWAITED})], id="while-nobody-waits"),
        pytest.param([("fetches", 0.9, [GET, TURN], {"awaited": EVALUATES})], id="of-an-evaluation"),
        pytest.param([("fetches", 0.08, [GET, TURN]), ("waits", 0.92, [])], id="between-both"),
    ],
)
def test_without_samples_that_tell_the_general_remedy_stays(tmp_path, samples):
    first, _ = first_of(folder_with(tmp_path, *samples))
    assert first.change.startswith("num_workers=6 at train.py:41 do not keep up")


def test_few_samples_tell_nothing(tmp_path):
    first, _ = first_of(folder_with(tmp_path, ("fetches", 0.01, [GET, TURN]), num_workers=2))
    assert first.change.startswith("num_workers=2 at train.py:41 do not keep up")


def test_workers_of_another_loader_do_not_count(tmp_path):
    folder = folder_with(tmp_path, *BUSY)
    for rank in (0, 1):  # as many, and idle
        write_workers(folder, ("waits", 1.0, []), rank=rank, dataset="Held", num_workers=2, iterator=2)
        write_workers(folder, ("waits", 1.0, []), rank=rank, iterator=3)
    work = loader_work(judge(load_run(folder, "run")))
    assert (work.num_workers, round(work.fetches, 2)) == (6, 0.9)


def test_workers_without_cores_are_said_to_have_none(tmp_path):
    samples = ("fetches", 0.5, [GET, TURN], {"doing": "ready"}), ("fetches", 0.5, [GET, TURN])
    _, evidence = first_of(folder_with(tmp_path, *samples))
    assert "in 50 % of that they could run and have no core" in evidence


def test_of_workers_that_wait_themselves_more_are_offered_first(tmp_path):
    folder = folder_with(tmp_path, ("fetches", 1.0, [GET], {"doing": "sleeps"}), modes={"num_cores": 2})
    first, evidence = first_of(folder)
    assert first.change.startswith("num_workers=6 at train.py:41 do not keep up: set more, which wait")
    assert "in 100 % of that they wait" in evidence


def test_a_run_that_does_not_wait_for_its_loader_names_no_worker(tmp_path):
    def make(rank, step, noise):
        return Host().work(0.1, "data").work(30.0 * noise.gauss(1, 0.01)).comm(2.0)

    assert causes(judge(load_run(folder_with(tmp_path, *BUSY, make=make), "run"))) == []
