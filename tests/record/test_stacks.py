"""What is sampled of the thread that trains; it stays small, and holds nothing of the program's data."""

import asyncio
import gc
import json
import os
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from aorta.record import stack_tree
from aorta.record import stacks as sampling
from aorta.record.called_names import calls_of
from aorta.record.journal import Journal
from aorta.record.lock_holder import LockWatch
from aorta.record.stack_tree import StackTree, frames_of
from aorta.record.stacks import StackSampler
from aorta.records.libraries import library_of
from aorta.records.stacks import DOING, STACK_PHASES, StackFrame, joined, read_stacks
from aorta.steps.notes import RecordedStep

SECRET = "not to be kept"


def stack_of(function, tree=None):
    """Frames and phase of a stack that is taken where `function` calls what it is given."""
    tree, found = tree or StackTree(), []

    def look(*_):
        if not found:
            found.append(tree.add(frames_of(threading.get_ident(), tree)))

    function(look)
    frames, nodes = tree.taken()
    (node, phase), path = found[0], []
    while node >= 0:
        node, frame = nodes[node]
        path.append(frames[frame])
    return path[::-1], STACK_PHASES[phase]


class Called(nn.Module):
    def __init__(self, look):
        super().__init__()
        self.look = look

    def forward(self, x):
        self.look()
        return x


class Rows(torch.utils.data.Dataset):
    def __init__(self, look):
        self.look = look

    def __len__(self):
        return 1

    def __getitem__(self, index):
        self.look()
        return index


def in_a_module(look):
    nn.Sequential(Called(look))(torch.zeros(1))


def in_a_loader(look):
    list(torch.utils.data.DataLoader(Rows(lambda: in_a_module(look))))


def in_backward(look):
    x = torch.zeros(1, requires_grad=True)
    (x * 2).register_hook(lambda grad: look())
    y = x * 2
    y.register_hook(lambda grad: in_a_module(look))
    y.sum().backward()


def in_an_optimizer(look):
    class Looking(torch.optim.SGD):
        @torch.optim.Optimizer.profile_hook_step
        def step(self, closure=None):
            look()

    Looking([torch.zeros(1, requires_grad=True)], lr=0.1).step()


def in_the_closure_of_an_optimizer(look):
    """As Lightning has the whole training step in one."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step(look)


def in_a_module_of_a_closure(look):
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step(lambda: in_a_module(look))


def in_no_phase(look):
    json.loads("{}", object_hook=look)


@pytest.mark.parametrize(
    ("function", "phase"),
    [
        pytest.param(in_a_module, "forward", id="module"),
        pytest.param(in_a_loader, "data", id="a-module-that-a-data-set-runs-is-data"),
        pytest.param(in_backward, "backward", id="a-module-that-a-hook-runs-is-backward"),
        pytest.param(in_an_optimizer, "optimizer", id="optimizer"),
        pytest.param(in_the_closure_of_an_optimizer, "rest", id="a-closure-is-the-program-s"),
        pytest.param(in_a_module_of_a_closure, "forward", id="a-module-of-a-closure"),
        pytest.param(in_no_phase, "rest", id="rest"),
    ],
)
def test_functions_of_a_stack_tell_the_phase(function, phase):
    assert stack_of(function)[1] == phase


def test_frames_of_libraries_are_folded_to_what_the_program_called():
    frames, _ = stack_of(in_a_module)
    place = next(i for i, frame in enumerate(frames) if frame.function == "in_a_module")
    assert frames[place].line == in_a_module.__code__.co_firstlineno + 1
    assert [(frame.file, frame.function, frame.line) for frame in frames[place + 1 : place + 2]] == [
        ("torch", "Module._wrapped_call_impl", 0)
    ]
    assert frames[place + 2].function == "Called.forward"


def calls_of_all_kinds(x, lines, pattern):
    np.sort(lines)
    np.random.standard_normal(3)
    pattern.findall(lines[0])
    ",".join(sorted(lines))
    x.add_(1).mul_(2)
    self.weight.copy_(x)  # noqa: F821
    torch.cat([x, x])
    torch.nn.functional.scaled_dot_product_attention(x, x, x)
    [one.lerp_(x, 0.5) for one in lines]


def test_names_of_what_has_no_frame_are_those_of_the_code():
    """Methods of tensors by their names, where tensors alone have them; no text of the program."""
    names = [*calls_of(calls_of_all_kinds.__code__).values()]
    for one in calls_of_all_kinds.__code__.co_consts:
        names += calls_of(one).values() if hasattr(one, "co_code") else []
    assert sorted(set(names)) == sorted(
        (
            "np.sort",
            "np.standard_normal",
            "findall",
            "join",
            "sorted",
            "torch.cat",
            "torch.scaled_dot_product_attention",
        )
        + tuple(f"Tensor.{name}" for name in ("add_", "mul_", "copy_", "lerp_"))
    )


def test_a_stack_ends_with_what_is_called_and_has_no_frame():
    tree, waiting = StackTree(), threading.Lock()
    waiting.acquire()
    thread = threading.Thread(target=lambda: waiting.acquire())
    thread.start()
    while not (frames := frames_of(thread.ident, tree)) or frames[0][0].name != "acquire":
        assert thread.is_alive()
    waiting.release()
    thread.join()
    tree.add(frames)
    assert [frame.text for frame in tree.taken()[0]][-1] == "acquire"


def test_what_compiling_goes_through_is_compiling():
    def backend(graph, _):
        looked.append(stack_of(lambda look: look()))
        return graph

    looked = []
    torch.compile(torch.tanh, backend=backend)(torch.ones(3))
    ((frames, phase),) = looked
    assert [frame.text for frame in frames[-1:]] == ["_compile of torch"]
    assert phase == "rest"


def test_what_c_does_without_letting_go_of_the_lock_has_its_name():
    tree, text, over = StackTree(), "a b " * 20_000, threading.Event()

    def splits():
        while not over.is_set():
            text.split()

    thread, seen = threading.Thread(target=splits), Counter()
    thread.start()
    for _ in range(40):
        time.sleep(0.002)
        frames = frames_of(thread.ident, tree)
        seen[frames[0][0].name if frames else ""] += 1
    over.set()
    thread.join()
    assert seen.most_common(1)[0][0] == "split"


def test_arguments_and_locals_are_in_no_line(tmp_path):
    def works(argument):
        local = argument * 2
        return sampled(tmp_path, lambda: time.sleep(0.2 if local else 0))

    works(SECRET)
    assert SECRET not in (tmp_path / "stacks").read_text()


def sampled(folder, work):
    """The stacks of a piece of work on this thread."""
    sampler = StackSampler(Journal())
    sampler._trains = threading.get_ident()
    sampler.write_to(folder / "stacks", attempt=0)
    sampler.start()
    work()
    sampler.stop()
    return joined(read_stacks(folder / "stacks"))


def total_us(stacks, doing, function):
    return sum(
        sample.us
        for sample in stacks.samples
        if DOING[sample.doing] == doing
        and any(function in frame.function for frame in stacks.path(sample.node))
    )


def sleeps():
    time.sleep(0.3)


def works():
    end_s = time.thread_time() + 0.3
    while time.thread_time() < end_s:
        pass


def test_sleep_and_work_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "BURST_CPU_S", 0.1)  # on a machine with much else to do a sample is dear
    stacks = sampled(tmp_path, lambda: (sleeps(), works()))
    assert total_us(stacks, "sleeps", "sleeps") > 4 * total_us(stacks, "runs", "sleeps")
    busy_us = total_us(stacks, "runs", "works") + total_us(stacks, "ready", "works")
    assert busy_us > 4 * total_us(stacks, "sleeps", "works")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, whose kernel tells how long threads waited")
def test_a_thread_that_holds_the_lock_is_told_from_one_that_lets_go_of_it(tmp_path, monkeypatch):
    """A thread that trains needs the lock for each operator; whatever waits otherwise does not count."""
    monkeypatch.setattr(sampling, "BURST_CPU_S", 0.1)  # on a machine with much else to do a sample is dear
    stopped, linear, x = threading.Event(), nn.Linear(8, 8), torch.zeros(4, 8)

    def holds():
        while not stopped.is_set():
            sum(number * number for number in range(1000))

    def trains(work):
        sampler = StackSampler(Journal())
        sampler._trains = threading.get_ident()
        sampler.write_to(tmp_path / work.__name__)
        sampler.start()
        for _ in range(40):
            end_s = time.monotonic() + 0.05
            while time.monotonic() < end_s:
                work()
            if sampler._sums and any(DOING[key[3]] == "locked_out" for key in list(sampler._sums)):
                break
        sampler.stop()
        return joined(read_stacks(tmp_path / work.__name__))

    def model():
        linear(x)

    def wait():
        time.sleep(0.01)

    thread = threading.Thread(target=holds)
    thread.start()
    try:
        assert total_us(trains(model), "locked_out", "holds") > 0
    finally:
        stopped.set()
        thread.join()
    assert not total_us(sampled(tmp_path, wait), "locked_out", "")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, whose kernel tells how long threads waited")
def test_a_thread_waits_for_the_lock_no_longer_than_the_others_run(monkeypatch):
    """It sleeps for 0.5 s, as in a backward pass, beside a thread that runs for 0.1 s of them."""
    begins, ran, looked = threading.Event(), threading.Event(), threading.Event()
    run_ns = []

    def holds():
        begins.wait()
        while time.thread_time() < 0.1:
            pass
        run_ns.append(time.thread_time_ns())
        ran.set()
        looked.wait()

    thread = threading.Thread(target=holds)
    thread.start()
    watch, began_ns = LockWatch(threading.get_ident()), time.monotonic_ns()
    monkeypatch.setattr(watch, "_use", lambda place: (0, 0))
    watch.sleep_begins()
    begins.set()
    ran.wait()
    time.sleep(0.5)
    assert watch.holder(time.monotonic_ns() - began_ns - int(1e7)) == thread.ident
    taken_ns = watch.taken_ns(int(1e9))
    watch.close()
    looked.set()
    thread.join()
    assert run_ns[0] / 2 <= taken_ns <= 1.5 * run_ns[0]


def test_a_local_lives_no_longer_for_having_been_sampled(tmp_path):
    class Large:
        pass

    alive = []

    def holds():
        large = Large()
        alive.append(weakref.ref(large))
        time.sleep(0.1)

    def work():
        for _ in range(3):
            holds()
        gc.collect()
        alive.append(sum(ref() is not None for ref in alive))

    sampled(tmp_path, work)
    assert alive[-1] == 0


def deep(depth):
    return time.sleep(0.1) if depth == 0 else deep(depth - 1)


def generated():
    yield time.sleep(0.1)


async def awaited():
    await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda: deep(800), id="deep-recursion"),
        pytest.param(lambda: list(generated()), id="generator"),
        pytest.param(lambda: asyncio.run(awaited()), id="asyncio"),
        pytest.param(lambda: torch.zeros(1 << 22).sort(), id="c-extension"),
        pytest.param(lambda: exec(compile("import time; time.sleep(.1)", "<string>", "exec")), id="exec"),
    ],
)
def test_any_thread_survives(tmp_path, work):
    def repeated():
        end_s = time.monotonic() + 0.15
        while time.monotonic() < end_s:
            work()

    assert sampled(tmp_path, repeated).samples


def test_a_thread_that_trains_and_ends_is_survived(tmp_path):
    sampler = StackSampler(Journal())
    sampler.write_to(tmp_path / "stacks", attempt=0)
    thread = threading.Thread(target=lambda: time.sleep(0.1))
    thread.start()
    sampler._trains = thread.ident
    sampler.start()
    thread.join()
    time.sleep(0.1)
    sampler.stop()
    assert sampler._thread is None


def test_a_forked_child_has_no_sampler_and_stops_it_at_once(tmp_path):
    sampler = StackSampler(Journal())
    sampler.write_to(tmp_path / "stacks", attempt=0)
    sampler.start()
    child = os.fork()
    if child == 0:
        sampler.stop()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    sampler.stop()


def test_distinct_stacks_are_bounded(monkeypatch):
    monkeypatch.setattr(stack_tree, "MOST_NODES", 1000)
    tree = StackTree()
    code = deep.__code__
    nodes = {tree.add([(tree.known(code), line), (tree.known(code), 1)])[0] for line in range(5000)}
    assert len(tree.nodes) == 1000
    assert len(nodes) <= 1000


def test_first_steps_have_samples_that_are_evenly_apart():
    """0.35 ms of CPU each, 0.12 % of a core: what may be taken at once is for those that are judged."""
    journal = Journal()
    journal.current = RecordedStep(sampling.NUM_WARM - 1, 0, 0, None)
    sampler = StackSampler(journal)
    sampler._num_samples, sampler._cpu_s, sampler._elapsed_s = 4, 1.4e-3, 0.1
    assert sampler._period_s() == pytest.approx(0.35e-3 / sampling.EARLY_SHARE)


def test_a_wait_that_first_uses_made_long_ends_with_them():
    journal, waits_s = Journal(), []
    journal.current = RecordedStep(sampling.NUM_WARM - 1, 0, 0, None)
    sampler = StackSampler(journal)
    sampler._num_samples, sampler._cpu_s, sampler._elapsed_s = 4, 4e-3, 0.1  # 1 ms of CPU each

    class Stopping:
        def acquire(self, *, timeout):
            waits_s.append(timeout)
            if len(waits_s) == 2:
                journal.current = RecordedStep(sampling.NUM_WARM, 0, 0, None)
            return False

    assert sampler._first_uses_pass(0.83, Stopping()) == pytest.approx(sampling.FIRST_PERIOD_S)
    assert waits_s == [sampling.GLANCE_S] * 2


def test_one_dear_sample_keeps_no_later_ones_from_being_taken():
    """6 ms of a collection of garbage that was due in it; the others take 0.35 ms."""
    sampler = StackSampler(Journal())
    sampler._num_samples, sampler._cpu_s, sampler._elapsed_s = 3, 6.7e-3, 0.1
    sampler._dearest_s = 6e-3
    assert sampler._period_s() == pytest.approx(sampling.FIRST_PERIOD_S)


def test_where_sampling_is_dear_it_comes_more_rarely():
    sampler = StackSampler(Journal())
    sampler._num_samples, sampler._cpu_s, sampler._elapsed_s = 1000, 1.02, 60.0  # 1 ms a sample
    assert sampler._period_s() == pytest.approx(2.04)
    sampler._num_samples, sampler._cpu_s, sampler._elapsed_s = 10, 0.0035, 0.5  # a short run has lines, too
    assert sampler._period_s() == pytest.approx(sampling.FIRST_PERIOD_S)
    sampler._num_samples = 1000
    sampler._cpu_s, sampler._elapsed_s = 0.05, 60.0
    assert sampler._period_s() == pytest.approx(sampling.PERIOD_S)
    sampler._elapsed_s = 36_000.0
    assert sampler._period_s() == pytest.approx(1.0)


def test_samples_of_a_short_run_are_of_all_of_it():
    """0.35 ms of CPU each: in ten seconds they tell as much as 35 that are evenly apart."""
    sampler, waits_s = StackSampler(Journal()), []
    while sampler._elapsed_s < 10:
        waits_s.append(sampler._period_s())
        sampler._elapsed_s += waits_s[-1]
        sampler._num_samples += 1
        sampler._cpu_s += 0.35e-3
    assert sampler._cpu_s == pytest.approx(0.02, rel=0.1)
    assert sum(waits_s) ** 2 / sum(wait_s**2 for wait_s in waits_s) > 35


def steps_of(folder, journal, lengths_s):
    """Samples of the steps after the first ten, by step; a step's thread sleeps."""
    sampler = StackSampler(journal)
    sampler._trains = threading.get_ident()
    sampler.write_to(folder / "stacks")
    began_s = time.monotonic()
    sampler.start()
    for number, length_s in enumerate(lengths_s):
        start_ns = time.monotonic_ns()
        journal.current = SimpleNamespace(
            global_step=number, host_start_ns=start_ns, thread=threading.get_ident(), body_end=None,
            host_notes=[],
        )  # fmt: skip
        time.sleep(length_s)
    sampler.stop()
    return joined(read_stacks(folder / "stacks")).samples, time.monotonic() - began_s, sampler


def test_a_step_that_goes_on_for_longer_than_others_is_looked_at_again(tmp_path, monkeypatch):
    """Every 0.4 s once. Of a step of 2 s one of the first two samples comes after 0.1 to 0.8 s, and the next
    look is due after half as long."""
    monkeypatch.setattr(sampling, "FIRST_PERIOD_S", 0.4)
    monkeypatch.setattr(sampling.random.Random, "uniform", lambda *_: 1.0)
    monkeypatch.setattr(sampling, "AGAIN_SHARE", 1.0)
    looks = []
    sample = StackSampler._sample
    monkeypatch.setattr(
        StackSampler,
        "_sample",
        lambda *args, is_again=False: looks.append(is_again) or sample(*args, is_again),
    )
    samples, elapsed_s, sampler = steps_of(tmp_path, Journal(), [0.02] * 60 + [2.0])
    assert sum(looks) >= 1
    assert {one.global_step for one in samples} > {60}
    of_long_us = sum(one.us for one in samples if one.global_step == 60)
    assert of_long_us == pytest.approx(2.0e6, abs=0.8e6)
    # They share the time of the sample that is due, and add none.
    assert sum(one.us for one in samples) < 1e6 * elapsed_s
    assert sampler._again_cpu_s > 0


def test_steps_of_one_length_are_looked_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "FIRST_PERIOD_S", 0.1)
    monkeypatch.setattr(sampling, "LONG_STEP", 4.0)
    _, _, sampler = steps_of(tmp_path, Journal(), [0.05] * 40)
    assert sampler._again_cpu_s == 0.0


def test_what_looking_again_costs_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "FIRST_PERIOD_S", 0.4)
    monkeypatch.setattr(sampling, "AGAIN_SHARE", -1.0)
    _, _, sampler = steps_of(tmp_path, Journal(), [0.02] * 60 + [1.0])
    assert sampler._again_cpu_s == 0.0


@pytest.mark.parametrize(("reaches_to_ns", "phases"), [(2**62, {"evaluation"}), (1, {"forward"})])
def test_what_went_on_until_the_last_batch_of_an_evaluation_is_of_it(tmp_path, reaches_to_ns, phases):
    """Told when the next batch comes, or training goes on: until then the samples wait."""
    journal = Journal()
    sampler = StackSampler(journal)
    sampler._trains, journal.may_evaluate_ns = threading.get_ident(), 1
    sampler.write_to(tmp_path / "stacks")
    sampler.start()
    in_a_module(lambda: time.sleep(0.2))
    assert not sampler._sums
    journal.evaluations.append((0, reaches_to_ns))
    journal.may_evaluate_ns = 0
    sampler.stop()
    samples = joined(read_stacks(tmp_path / "stacks")).samples
    assert {STACK_PHASES[one.phase] for one in samples} == phases


def test_off_is_off(tmp_path):
    sampler = StackSampler(Journal(), is_wanted=False)
    sampler.write_to(tmp_path / "stacks", attempt=0)
    sampler.start()
    assert sampler._thread is None
    assert os.listdir(tmp_path) == []


def test_the_program_is_what_is_in_no_library():
    frames, _ = stack_of(in_no_phase)
    own = [frame for frame in frames if frame.is_program]
    line = in_no_phase.__code__.co_firstlineno + 1
    assert StackFrame(__file__, line, "in_no_phase", is_program=True) in own


def test_of_aorta_its_training_loop_alone_is_the_program(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="aorta.training.__main__"))
    package = Path(sampling.__file__).parents[1]
    assert library_of(str(package / "training" / "trainer.py")) == ""
    assert library_of(sampling.__file__) == "aorta"


@pytest.mark.skipif(not stack_tree.COLLECTS_IN_WALKS, reason="needs a Python before 3.12")
def test_a_thread_is_walked_without_garbage_collection():
    """In Python 3.11 a finalizer that runs within the walk lets the thread go on, and its frame is gone."""

    class Tree(StackTree):
        def known(self, code):
            collected.append(gc.isenabled())
            return super().known(code)

    collected = []
    assert frames_of(threading.get_ident(), Tree())
    assert not any(collected)
    assert gc.isenabled()
