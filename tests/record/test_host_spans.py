"""Notes of the host's work in a step, and the phase of a collective."""

import gc
import pickle
import re
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import save as taken_save
from torch.distributed.checkpoint.state_dict_saver import save as taken_dcp_save
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, TensorDataset

import aorta
from aorta.device.backend import accelerator
from aorta.record.host import HostWatch, Phases, caller
from aorta.record.journal import Journal
from aorta.records.reader import read_steps
from aorta.steps.notes import LEFT_OUT, CollectiveCall, Group, HostNote, Mark, RecordedStep


@pytest.fixture
def journal():
    journal = Journal()
    journal.current = RecordedStep(0, 0, 0, None)
    watch = HostWatch(journal)
    watch.install()
    yield journal
    watch.uninstall()


def kinds(journal):
    return [note.kind for note in journal.current.host_notes]


def test_a_collection_that_comes_by_itself_is_at_no_line(journal):
    threshold = gc.get_threshold()
    gc.collect()  # so that nothing is left to be collected by it
    try:
        gc.set_threshold(1, 1, 1)
        kept = [[number] for number in range(50)]
    finally:
        gc.set_threshold(*threshold)
    own = [note for note in journal.current.host_notes if note.kind == "garbage_collection"]
    assert len(kept) == 50
    assert len([note for note in own if note.where]) == 1


@pytest.mark.heavy
def test_a_collection_amid_compiled_code_is_no_frame_of_it(journal):
    from torch._dynamo.utils import counters  # takes a second to load

    def collects(x):
        y = x + 1
        torch._dynamo.graph_break()
        gc.collect()
        return y + 1

    gc.collect()  # what other tests left, and who is told of it
    counters.clear()
    torch.compile(collects, backend="eager")(torch.zeros(1))
    own = [note for note in journal.current.host_notes if note.kind == "garbage_collection"]
    assert own
    assert counters["frames"]["total"] == 3  # what comes before each call of gc, and behind it


@pytest.mark.heavy
def test_parts_of_a_step_are_noted_in_order(journal, tmp_path):
    loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    (batch,) = next(iter(loader))
    model(batch).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    gc.collect()
    assert kinds(journal)[-1] == "garbage_collection"
    assert re.fullmatch(r"gc.collect in test_host_spans.py:\d+", journal.current.host_notes[-1].where)
    notes = [note for note in journal.current.host_notes if note.kind != "garbage_collection"]
    # Making the iterator, which starts the workers of an epoch, and taking a batch.
    assert [note.kind for note in notes] == ["data", "data", "backward", "optimizer", "checkpoint"]
    assert all(note.start_ns < note.end_ns for note in notes)
    assert "foreach=False" in notes[3].where
    assert notes[3].bytes == 4 * (16 + 4)
    assert re.fullmatch(r"save in test_host_spans.py:\d+", notes[4].where)


def test_an_iterator_that_is_let_go_of_is_noted_as_it_ends_its_workers(journal):
    iterator = object.__new__(torch.utils.data.dataloader._MultiProcessingDataLoaderIter)
    iterator._shutdown = True  # which they are already
    del iterator
    assert kinds(journal) == ["data"]


def test_a_batch_begins_no_earlier_than_the_step_that_it_begins(journal):
    """What the recorder does before, where a step begins as its batch is asked for, is no loading."""
    step = RecordedStep(1, 1, 0, None)

    class Batches(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, _):
            step.start = Mark(time.monotonic_ns())
            journal.current = step
            return torch.ones(1)

    next(iter(DataLoader(Batches())))
    (note,) = step.host_notes
    assert (note.kind, note.start_ns) == ("data", step.start.host_ns)


def test_a_backward_pass_is_noted_in_the_step_in_which_it_began(journal):
    """The step's object may have become that of the next one meanwhile, which has a list of its own."""
    weight = torch.ones(1, requires_grad=True)
    step, notes = journal.current, journal.current.host_notes

    def ends_the_step(_):
        step.host_notes = []

    weight.register_hook(ends_the_step)
    weight.sum().backward()
    assert [note.kind for note in notes] == ["backward"]
    assert step.host_notes == []


def test_a_step_with_a_closure_is_the_optimizers_only_after_the_backward_pass(journal):
    """As Lightning trains: forward and backward run within step()."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    backward, update = (note for note in journal.current.host_notes if note.kind != "garbage_collection")
    assert (backward.kind, update.kind) == ("backward", "optimizer")
    assert backward.end_ns <= update.start_ns < update.end_ns


@pytest.mark.heavy
@pytest.mark.parametrize(
    "save",
    [
        pytest.param(taken_save, id="torch.save"),
        pytest.param(lambda state, path: taken_dcp_save(state, checkpoint_id=path, no_dist=True), id="dcp"),
    ],
)
def test_a_save_that_was_imported_before_the_watch_is_noted_once(journal, tmp_path, save):
    save({"weight": torch.ones(64)}, tmp_path / "state")
    assert [kind for kind in kinds(journal) if kind != "garbage_collection"] == ["checkpoint"]


def test_a_tensor_in_an_object_that_is_sent_is_no_checkpoint(journal):
    """torch.distributed pickles objects, and pickle saves the storages of their tensors by torch.save."""
    sent = pickle.dumps({"scores": torch.ones(64)})
    assert kinds(journal) == []
    assert pickle.loads(sent)["scores"].sum() == 64


def test_nothing_is_noted_outside_of_a_step_or_by_another_thread(journal):
    thread = threading.Thread(target=lambda: torch.ones(1, requires_grad=True).sum().backward())
    thread.start()
    thread.join()
    assert kinds(journal) == []
    journal.current = None
    torch.ones(1, requires_grad=True).sum().backward()


def test_an_error_passes_and_what_was_replaced_is_put_back():
    before = torch.save, torch.autograd.graph._engine_run_backward, len(gc.callbacks)
    journal = Journal()
    journal.current = RecordedStep(0, 0, 0, None)
    watch = HostWatch(journal)
    watch.install()
    watch.watch_waits()
    with pytest.raises(RuntimeError):
        torch.ones(1).sum().backward()
    assert torch.ones(1).item() == 1.0
    assert kinds(journal) == ["backward"]
    watch.uninstall()
    assert (torch.save, torch.autograd.graph._engine_run_backward, len(gc.callbacks)) == before
    assert "item" not in vars(torch.Tensor)


def test_tensors_methods_are_switched_a_limited_number_of_times_and_then_stay_without_noting(monkeypatch):
    """From Python 3.13 on, attributes of a class that has changed a thousand times are slow for good."""
    monkeypatch.setattr("aorta.record.host.MOST_SWITCHES", 1)
    monkeypatch.setattr("aorta.record.host.NOTED_WAIT_NS", 0)
    monkeypatch.setattr(accelerator(), "holds", lambda _: True, raising=False)
    journal = Journal()
    journal.current = RecordedStep(0, 0, 0, None)
    watch = HostWatch(journal)
    for is_put_back in (True, False):
        watch.watch_waits()
        torch.ones(1).item()
        watch.leave_waits()
        assert ("item" not in vars(torch.Tensor)) is is_put_back
    assert kinds(journal) == ["synchronisation"] * 2
    journal.current = RecordedStep(1, 1, 0, None, left_out=LEFT_OUT)
    torch.ones(1).item()
    assert kinds(journal) == []
    watch.uninstall()
    assert "item" not in vars(torch.Tensor)


@pytest.mark.heavy
def test_a_graph_that_holds_a_wait_is_not_compiled_anew_for_steps_that_are_recorded(monkeypatch):
    from torch._dynamo.utils import counters  # takes a second to load

    class Device:
        @staticmethod
        def synchronize():
            """Nothing to wait for."""

    monkeypatch.setattr(accelerator(), "host_waits", lambda: [(Device, "synchronize")], raising=False)
    journal = Journal()
    journal.current = RecordedStep(0, 0, 0, None)
    watch = HostWatch(journal)

    @partial(torch.compile, backend="eager", fullgraph=True)
    def waits(x):
        Device.synchronize()
        return x + 1

    counters.clear()
    for _ in range(3):
        watch.watch_waits()
        waits(torch.zeros(2))
        watch.leave_waits()
        waits(torch.zeros(2))
    assert counters["stats"]["unique_graphs"] == 1
    watch.uninstall()


def test_phases_of_calls_follow_what_the_host_did():
    step = RecordedStep(0, 0, 0, None)
    step.host_notes = [
        HostNote("data", 0, 10, ""),
        HostNote("backward", 100, 200, ""),
        HostNote("optimizer", 300, 400, ""),
    ]
    phases = Phases(step)
    group = Group("0", "default", [0, 1], "gloo")

    def at(time_ns):
        call = CollectiveCall(group, "all_reduce", 4, "float32", False)
        call.launched_ns = time_ns
        return phases.of_call(call)

    assert [at(5), at(50), at(150), at(250), at(350)] == [
        "data",
        "forward",
        "backward",
        "optimizer",
        "optimizer",
    ]
    started = CollectiveCall(group, "all_reduce", 4, "float32", False, start=Mark(150))
    assert phases.of_call(started) == "backward"
    assert Phases(RecordedStep(0, 0, 0, None)).of_call(started) is None


@pytest.mark.parametrize(
    ("path", "place"),
    [("training/trainer.py", "trainer.py:1"), ("record/host.py", __file__), ("attach/flops.py", __file__)],
)
def test_a_place_is_the_programs_or_aortas_own_loops(path: str, place: str) -> None:
    names: dict[str, Any] = {"caller": caller}
    exec(compile("place = caller()", Path(aorta.__file__).parent / path, "exec"), names)
    assert names["place"].startswith(Path(place).name)


@pytest.fixture
def two_ranks(monkeypatch):
    """A process group whose calls do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_rank(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def lines(folder):
    return list(read_steps(folder / "rank_0_metrics.jsonl", []))


@pytest.mark.heavy
def test_collectives_of_fully_shard_name_their_unit_and_phase(two_ranks, tmp_path):
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    with aorta.instrument(tmp_path) as recorder:
        for _ in range(2):
            with recorder.step():
                model(torch.ones(2, 8)).sum().backward()
    record = lines(tmp_path)[1]
    named = {(call.op, record.module_of(call), call.phase) for call in record.collectives}
    assert {("all_gather", "0", "forward"), ("reduce_scatter", "1", "backward")} <= named


@pytest.mark.heavy
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_collectives_of_fsdp_name_their_unit_too(two_ranks, tmp_path, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel

    cpu = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    inner[2] = FullyShardedDataParallel(inner[2], **cpu)
    model = FullyShardedDataParallel(torch.nn.Sequential(inner, torch.nn.Linear(8, 8)), **cpu)
    with aorta.instrument(tmp_path) as recorder:
        for _ in range(2):
            with recorder.step():
                model(torch.ones(2, 8)).sum().backward()
    record = lines(tmp_path)[1]
    named = {(call.op, record.module_of(call), call.phase) for call in record.collectives}
    assert {("all_gather", "0.2", "forward"), ("reduce_scatter", "0.2", "backward")} <= named
    assert ("all_gather", "root", "forward") in named


@pytest.mark.heavy
def test_collectives_of_ddp_name_their_bucket(one_rank, tmp_path):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    replica = DistributedDataParallel(model, bucket_cap_mb=0.02)
    with aorta.instrument(tmp_path / "run") as recorder:
        for _ in range(5):
            with recorder.step():
                replica(torch.ones(2, 64)).sum().backward()
    record = lines(tmp_path / "run")[4]
    calls = [call for call in record.collectives if call.op == "all_reduce"]
    assert record.module_of(calls[0]).startswith("bucket 0: 3.")
    assert {call.phase for call in calls} == {"backward"}
    assert len({record.module_of(call) for call in calls}) == len(calls)


def evaluated(journal):
    """Kinds of the notes, and the number of evaluations that the samples of the stack are told by."""
    of_step = [note for note in journal.current.host_notes if note.kind != "garbage_collection"]
    return [note.kind for note in of_step], len(journal.evaluations)


def batches():
    return DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=4)


def test_an_evaluation_lasts_from_its_first_batch_to_its_last(journal):
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        for number, _ in enumerate(batches()):
            time.sleep(1e-3)
            gc.collect()
            if number == 2:
                break
    assert evaluated(journal) == (["data", "pause"], 1)
    (last,) = (note for note in journal.current.host_notes if note.kind == "pause")
    assert last.where == "evaluation"
    (span,) = journal.evaluations
    assert span == (last.start_ns, last.end_ns)
    assert last.end_ns - last.start_ns > 2e6
    assert journal.may_evaluate_ns == last.end_ns
    model(torch.ones(2, 4)).sum().backward()
    assert evaluated(journal) == (["data", "pause", "backward"], 1)
    assert journal.may_evaluate_ns == 0


def test_batches_that_are_fetched_ahead_without_gradients_are_data(journal):
    """From two loaders, or with a forward pass between two of one."""
    model, one, other = torch.nn.Linear(4, 4), iter(batches()), iter(batches())
    fetch = torch.no_grad()(next)
    fetch(one)
    time.sleep(1e-3)
    fetch(other)
    loss = model(torch.ones(2, 4)).sum()
    fetch(other)
    loss.backward()
    fetch(other)
    assert evaluated(journal) == (["data"] * 5 + ["backward", "data"], 0)
