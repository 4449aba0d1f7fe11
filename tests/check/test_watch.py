"""The check in loops as users write them: one gloo rank in this process, whose collectives run on threads of
their own."""

import ctypes
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Work
from torch.utils import _python_dispatch
from torch.utils.flop_counter import FlopCounterMode

from aorta.check.device_order import Queries, _own_pool, completed, trace_flag
from aorta.check.names import names_of
from aorta.check.operators import OperatorMode, accessed
from aorta.check.watch import HazardWatch
from aorta.check.works import Works
from aorta.hazards.check import HOST, HazardCheck, play, without_events
from aorta.hazards.exceptions import Exceptions
from aorta.hazards.findings import Checked, merged, read_checked
from aorta.hazards.text import checked_text
from aorta.record.interception.works import TimedWork
from tests.check.rank_programs import checked_loop
from tests.dist.launch import run_ranks

SHIPPED = Exceptions.shipped()


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def watched(step, folder: Path, num_steps: int = 4, **options) -> Checked:
    """What the check finds in a loop of this step; steps 2 and 3 are its window."""
    watch = HazardWatch(every=100, confirm=False, **options)
    watch.opened(SimpleNamespace(output_dir=folder, rank=0, world_size=1, store_prefix=""))
    for number in range(num_steps):
        watch.step_begins(number)
        step()
    watch.closing(None)
    return read_checked(folder)[0]


def edges(checked: Checked) -> set[tuple[str, str, str]]:
    return {(f.later.site.operation, f.rule, f.earlier.site.operation) for f in checked.findings}


def test_a_buffer_used_before_its_collective_was_waited_for(tmp_path):
    x = torch.ones(64)

    def step():
        work = dist.all_reduce(x, async_op=True)
        x.mul_(0.5)
        work.wait()

    checked = watched(step, tmp_path)
    assert edges(checked) == {("aten::mul_", "overwrites what is still being written", "c10d::allreduce_")}
    finding = checked.findings[0]
    assert (finding.count, finding.first_step, finding.num_bytes) == (2, 2, 256)
    assert finding.later.site.where.endswith(f"test_watch.py:{step.__code__.co_firstlineno + 2}")
    assert finding.missing == "work.wait() on host before aten::mul_"
    assert checked.steps == [2, 3]


def test_the_same_with_the_wait_in_its_place(tmp_path):
    x = torch.ones(64)

    def step():
        work = dist.all_reduce(x, async_op=True)
        torch.ones(8).sum()
        work.wait()
        x.mul_(0.5)

    assert edges(watched(step, tmp_path)) == set()


def test_a_part_of_a_buffer_that_the_collective_does_not_touch_may_be_used(tmp_path):
    x = torch.ones(64)

    def step():
        work = dist.all_reduce(x[:32], async_op=True)
        x[32:].mul_(0.5)
        work.wait()

    assert edges(watched(step, tmp_path)) == set()


def test_reading_the_input_of_a_gather_is_no_race_and_reading_its_output_is(tmp_path):
    x, out = torch.ones(8), torch.zeros(8)

    def step():
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        x.sum()
        out.sum()
        work.wait()

    assert edges(watched(step, tmp_path)) == {
        ("aten::sum", "reads what is still being written", "c10d::_allgather_base_")
    }


def test_cpp_can_tell_that_a_replaced_method_called_it():
    """pybind11 asks a work that was made in Python for its wait(), unless the caller's code has that name."""
    works = Works([], print, print)
    works.listen()
    try:
        for owner in (Work, TimedWork):
            for name in ("wait", "synchronize", "is_completed", "get_future"):
                code = vars(owner)[name].__code__
                assert (code.co_name, code.co_varnames[0]) == (name, "work")
    finally:
        works.stop()


def test_a_work_that_was_seen_to_be_completed_needs_no_wait(tmp_path):
    x = torch.ones(8)

    def step():
        work = dist.all_reduce(x, async_op=True)
        while not work.is_completed():
            pass
        x.mul_(0.5)

    assert edges(watched(step, tmp_path)) == set()


@pytest.mark.parametrize("waits", [True, False])
def test_functional_collectives_are_waited_for_by_their_output(tmp_path, waits):
    ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name

    def step():
        out = ops.all_reduce(torch.ones(8), "sum", group)
        if waits:
            out = ops.wait_tensor(out)
        out.sum()
        ops.wait_tensor(out)

    found = edges(watched(step, tmp_path))
    assert bool(found) == (not waits)


def test_the_checked_program_computes_the_same(tmp_path):
    def losses(check):
        torch.manual_seed(0)
        model, seen = nn.Linear(16, 16), []

        def step():
            loss = model(torch.ones(4, 16)).square().sum()
            loss.backward()
            dist.all_reduce(model.weight.grad)
            with torch.no_grad():
                model.weight -= 0.01 * model.weight.grad
            seen.append(loss.item())

        if check:
            watched(step, tmp_path, num_steps=8)
        else:
            for _ in range(8):
                step()
        return seen

    assert losses(check=True) == losses(check=False)


def test_a_gradient_that_is_used_early_has_its_name_and_the_cpu_is_said(tmp_path):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))

    def step():
        model(torch.ones(2, 16)).sum().backward()
        work = dist.all_reduce(model[1].weight.grad, async_op=True)
        model[1].weight.grad.mul_(0.5)
        work.wait()

    checked = watched(step, tmp_path)
    assert [finding.parameter for finding in checked.findings] == ["gradient of 1.weight"]
    text = checked_text([checked])
    assert "256 bytes of float32[4, 16], gradient of 1.weight" in text
    assert "not seen: streams and memory of a device, which the process has not used" in text


def test_a_users_exception_makes_a_finding_known(tmp_path):
    path = tmp_path / "known.yaml"
    path.write_text("- {operation: 'aten::mul_', reason: the factor is one}\n")
    x = torch.ones(64)

    def step():
        work = dist.all_reduce(x, async_op=True)
        x.mul_(1)
        work.wait()

    checked = watched(step, tmp_path, exceptions=Exceptions.shipped(path))
    assert [(f.status, f.reason) for f in checked.findings] == [("known", "the factor is one")]
    assert "1 known exception: the factor is one" in checked_text([checked])


def test_findings_of_ranks_are_one_and_the_text_says_what_is_missing(tmp_path):
    x = torch.ones(64)

    def step():
        work = dist.all_reduce(x, async_op=True)
        x.sum()
        work.wait()

    checked = watched(step, tmp_path)
    other = Checked(rank=1, steps=[2, 3], findings=checked.findings)
    assert [(f.count, f.ranks) for f in merged([checked, other])] == [(4, [0, 0])]
    text = checked_text([checked])
    assert text.startswith("1 possible in 2 checked steps of 1 rank\n")
    assert "missing  work.wait() on host before aten::sum" in text


class Accumulator(nn.Module):
    def forward(self, x):
        work = dist.all_reduce(x, async_op=True)
        x.add_(1)
        work.wait()
        return x


class Thing:
    pass


def test_the_module_whose_code_issued_an_operation_is_named(tmp_path):
    model = nn.Sequential(nn.Identity(), nn.Sequential(Accumulator()))
    x = torch.ones(64)
    (found,) = watched(lambda: model(x), tmp_path).findings
    assert found.later.site.module == found.earlier.site.module == "1.0"


def test_things_have_the_names_of_what_holds_them():
    class Loader:
        def __init__(self) -> None:
            self.copy_stream = Thing()

    loader, local_stream, by_key = Loader(), Thing(), {"side_stream": Thing()}
    names = names_of([loader.copy_stream, by_key["side_stream"], local_stream])
    assert set(names.values()) == {"copy_stream", "side_stream", "local_stream"}


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 8), Accumulator())
        self.num_alive = 0

    def train(self, begins) -> None:
        """Steps in one method, which says before it ends how many outputs are still alive."""
        outputs = []
        for number in range(6):
            begins(number)
            output = self.model(torch.ones(4, 8))
            outputs.append(weakref.ref(output))
            output.sum()  # the check looks for who issued it
        del output
        until_s = time.monotonic() + 10.0  # a window is read in another thread, which has them meanwhile
        while any(reference() is not None for reference in outputs) and time.monotonic() < until_s:
            time.sleep(0.01)
        self.num_alive = sum(reference() is not None for reference in outputs)


def test_the_check_keeps_no_tensor_of_the_program_alive(tmp_path):
    watch, trainer = HazardWatch(every=100, confirm=False), Trainer()
    watch.opened(SimpleNamespace(output_dir=tmp_path, rank=0, world_size=1, store_prefix=""))
    with torch.no_grad():
        trainer.train(watch.step_begins)
    watch.closing(None)
    assert edges(read_checked(tmp_path)[0])  # so that it looked for names, in all frames
    assert trainer.num_alive == 0


def test_a_frame_that_was_asked_for_names_holds_nothing_but_what_the_program_asked_for():
    thing = Thing()
    reference = weakref.ref(thing)
    assert names_of([thing]) == {id(thing): "thing"}
    del thing
    assert reference() is None
    kept, mine = Thing(), locals()
    assert names_of([kept]) == {id(kept): "kept"}
    assert mine["reference"] is reference


def test_of_a_long_run_the_first_and_the_last_fingerprints_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("aorta.check.watch.MAX_NUMBERED", 4)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = HazardWatch(every=2)
    watch.opened(SimpleNamespace(output_dir=tmp_path, rank=0, world_size=1, store_prefix=""))
    for number in range(12):
        watch.step_begins(number)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    watch.closing(None)
    assert {parameter.step for parameter in watch.checked.parameters} == {2, 3, 10, 11}
    assert any("in the middle of the run" in text for text in watch.checked.blind)


@pytest.mark.parametrize(
    ("tensor", "size", "has_gaps"),
    [
        pytest.param(torch.zeros(4, 6), 96, False, id="contiguous"),
        pytest.param(torch.zeros(4, 6).T, 96, False, id="transposed"),
        pytest.param(torch.zeros(4, 6)[:, 2:4], 3 * 24 + 8, True, id="columns"),
        pytest.param(torch.zeros(4).expand(3, 4), 16, True, id="expanded"),
    ],
)
def test_bytes_of_a_tensor(tensor, size, has_gaps):
    access = accessed(tensor)
    assert access[:2] == (tensor.data_ptr(), size)
    assert (len(access) == 3) == has_gaps


class Pool:
    def __init__(self, allocator=None) -> None:
        self.is_shared = False


class SharedPool(Pool):
    def __init__(self, allocator=None, use_on_oom: bool = False) -> None:
        self.is_shared = use_on_oom


@pytest.mark.parametrize("kind", [Pool, SharedPool])
def test_a_program_that_runs_out_of_memory_gets_the_checks_where_torch_can_do_that(monkeypatch, kind):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "MemPool", kind)
    assert _own_pool.__wrapped__(0).is_shared == (kind is SharedPool)


def test_modes_of_the_program_that_end_or_begin_within_a_window_stay_its_own():
    seen, x = [], torch.ones(4, 4)
    none = lambda *_: None  # noqa: E731
    mode = OperatorMode(lambda issued, run: [seen.append(issued.name), run()][1], none, none, none)
    with FlopCounterMode(display=False) as first:
        mode.begin()
        x @ x
    x @ x
    with FlopCounterMode(display=False) as second:
        mode.end()
        x @ x
    assert seen == ["aten::mm"] * 2
    assert first.get_total_flops() == second.get_total_flops() == 2 * 4**3
    assert _python_dispatch._get_current_dispatch_mode() is None
    assert not _python_dispatch.is_in_torch_dispatch_mode()


def test_a_query_that_says_done_is_a_wait_of_the_host(monkeypatch):
    answers = iter([False, True])

    class Event:
        cuda_event = 7

        def query(self):
            return next(answers)

    class Stream:
        cuda_stream = 3

        def query(self):
            return True

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    log = [["record", 7, 3]]
    queries = Queries(log)
    queries.listen()
    assert (Event().query(), Event().query(), Stream().query()) == (False, True, True)
    queries.stop()
    Stream().query()
    assert log == [["record", 7, 3], ["synchronize_event", 7], ["synchronize", 3]]
    play(log, HazardCheck())


def test_sizes_streams_and_deferred_frees_come_from_the_allocators_trace():
    log = [["allocate", 64, 0, 0, 1], ["free", 64, 2, None, False], ["free", 32, 3, None, False]]
    log.append(["allocate", 99, 0, 0, 1])  # not in the trace
    pinned = ["allocate", 77, 8, HOST]  # of another allocator
    dropped = ["free", 128, 4, None, True]  # in a collective's call
    log += [pinned, dropped]
    trace = [
        {"action": "segment_alloc", "addr": 64, "size": 2048, "stream": 7},
        {"action": "alloc", "addr": 64, "size": 512, "stream": 7},
        {"action": "free_requested", "addr": 64, "size": 512, "stream": 7},
        {"action": "free_completed", "addr": 64, "size": 512, "stream": 7},
        {"action": "free_requested", "addr": 32, "size": 512, "stream": 7},
        {"action": "alloc", "addr": 128, "size": 512, "stream": 7},
        {"action": "free_requested", "addr": 128, "size": 512, "stream": 7},
        {"action": "free_completed", "addr": 128, "size": 512, "stream": 7},
    ]
    of_the_check = [{"action": "alloc", "addr": 256, "size": 64, "stream": 7}]
    assert completed(log, [*of_the_check, *trace]) == completed(log, trace)
    assert completed(log, trace) == [
        ["allocate", 64, 512, 7, 1],
        ["free", 64, 2, 7, False],
        ["free", 32, 3, 7, True],
        pinned,
        ["free", 128, 4, 7, True],
    ]
    assert play(completed(log, trace), HazardCheck()).hazards == {}


def test_two_ranks_confirm_a_race_and_leave_ddp_alone(tmp_path):
    """One rank is late on purpose, so that the other's collective is still under way where it is not
    awaited."""
    run_ranks(checked_loop, 2, str(tmp_path))
    found = merged(read_checked(tmp_path))
    assert sorted((f.status, f.kind, f.later.site.operation) for f in found) == [
        ("confirmed", "race", "aten::add_"),
        ("confirmed", "race", "aten::mul_"),
    ]


def test_torch_has_the_flag_that_is_put_back_behind_a_window():
    """A torch without it goes on to call Python for each event and allocation between windows."""
    assert ctypes.addressof(trace_flag()) == ctypes.addressof(trace_flag())


@pytest.mark.parametrize("is_alike", [True, False])
def test_a_window_like_one_before_is_not_looked_through_again(tmp_path, monkeypatch, is_alike):
    played = []
    monkeypatch.setattr(
        "aorta.check.watch.play", lambda entries, check: played.append(1) or play(entries, check)
    )
    buffers = [torch.ones(64) for _ in range(12)]
    watch = HazardWatch(every=2, confirm=False)
    watch.opened(SimpleNamespace(output_dir=tmp_path, rank=0, world_size=1, store_prefix=""))
    for number in range(12):
        watch.step_begins(number)
        buffers[0 if is_alike else number].mul_(0.5)
    watch.closing(None)
    assert len(played) == (1 if is_alike else 5)
    assert read_checked(tmp_path)[0].num_operations == 10


def test_logs_are_alike_where_events_have_other_handles():
    def log(event, step, address=64):
        forgotten = [["forget_event", 3]] if step == 1 else []
        return [
            *forgotten,
            ["begin_step", step],
            ("launch", 1, [], [(address, 8)], 0),
            ["record", event, 1, 0],
            ["wait", 2, event, 0],
            ["forget_event", event],
        ]

    assert without_events(log(5, 1)) == without_events(log(9, 7))
    assert without_events(log(5, 1)) != without_events(log(5, 1, address=72))


def test_what_changes_nothing_is_not_written_in_every_window(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr("aorta.check.watch.write_checked", lambda folder, checked: written.append(1))
    watch = HazardWatch(every=2, confirm=False)
    watch.opened(SimpleNamespace(output_dir=tmp_path, rank=0, world_size=1, store_prefix=""))
    for number in range(12):
        watch.step_begins(number)
        torch.ones(8).mul_(2)
    watch.closing(None)
    assert len(written) == 2  # behind the first window, and in the end
