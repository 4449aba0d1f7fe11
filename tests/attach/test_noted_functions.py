"""Functions whose calls are noted for a step, in programs that do more than call them."""

import copy
import os
import pickle
import threading

import pytest
import torch

from aorta.attach.noted_functions import NotedFunctions

METHODS, TRANSFORMS = ("contiguous", "reshape", "flatten", "to", "float"), ("fft", "rfft", "irfft")
ORIGINALS = {name: getattr(torch.fft, name) for name in TRANSFORMS}
PLAIN = torch.rand(4, 6)


class Step:
    """Names of calls that were noted."""

    def __init__(self):
        self.names = []
        self.of = [
            NotedFunctions(torch.Tensor, METHODS, self._note),
            NotedFunctions(torch.fft, TRANSFORMS, self._note),
        ]

    def _note(self, name, args, named, found, ns, caller):
        self.names.append(name)
        assert caller.f_code.co_filename == __file__
        assert ns >= 0

    def __enter__(self):
        for one in self.of:
            one.begin()
        return self

    def __exit__(self, *_):
        for one in self.of:
            one.end()
        assert not set(METHODS) & set(vars(torch.Tensor))
        assert {name: getattr(torch.fft, name) for name in TRANSFORMS} == ORIGINALS


def test_calls_are_noted_while_a_step_lasts_and_give_what_they_give():
    before = PLAIN.t().contiguous(), torch.fft.rfft(PLAIN, n=8)
    with Step() as step:
        within = PLAIN.t().contiguous(), torch.fft.rfft(input=PLAIN, n=8)
    PLAIN.flatten()
    assert step.names == ["contiguous", "rfft"]
    assert all(torch.equal(one, other) for one, other in zip(before, within, strict=True))


def test_what_a_program_keeps_of_a_step_does_nothing_but_its_work_later():
    with Step() as step:
        from torch.fft import rfft

        method, bound = torch.Tensor.float, PLAIN.reshape
    assert torch.equal(rfft(PLAIN), torch.fft.rfft(PLAIN))
    assert method(PLAIN).dtype == torch.float32
    assert bound(-1).shape == (24,)
    assert step.names == []
    assert pickle.loads(pickle.dumps(rfft)) is torch.fft.rfft
    assert copy.deepcopy({"transform": rfft})["transform"] is torch.fft.rfft


def test_functions_are_pickled_as_what_they_stand_for():
    with Step():
        written = pickle.dumps([torch.fft.rfft, torch.Tensor.float])
    assert b"aorta" not in written
    assert pickle.loads(written) == [torch.fft.rfft, torch.Tensor.float]


def test_a_method_that_the_program_has_put_there_stays():
    def own(tensor):
        return torch.ones(3)

    torch.Tensor.float = own
    try:
        step = Step()
        for one in step.of:
            one.begin()
        assert PLAIN.float().tolist() == [1.0] * 3
        for one in step.of:
            one.end()
        assert vars(torch.Tensor)["float"] is own
    finally:
        del torch.Tensor.float


def test_a_method_that_the_program_puts_there_meanwhile_stays():
    step = Step()
    for one in step.of:
        one.begin()
    before, torch.Tensor.flatten = torch.Tensor.flatten, lambda tensor: "own"
    try:
        for one in step.of:
            one.end()
        assert PLAIN.flatten() == "own"
    finally:
        del torch.Tensor.flatten
    assert before(PLAIN).shape == (24,)


def test_what_a_program_keeps_and_puts_back_is_noted_once():
    with Step():
        kept, method = torch.fft.rfft, torch.Tensor.float
    torch.fft.rfft, torch.Tensor.float = kept, method
    try:
        step = Step()
        for one in step.of:
            one.begin()
        torch.fft.rfft(PLAIN)
        PLAIN.float()
        for one in step.of:
            one.end()
        assert step.names == ["rfft", "float"]
        assert torch.fft.rfft is ORIGINALS["rfft"]
    finally:
        del torch.Tensor.float


def test_functions_look_like_those_that_they_stand_for():
    original, method = torch.fft.rfft, torch.Tensor.float
    with Step():
        assert torch.fft.rfft.__module__ == original.__module__
        assert torch.Tensor.float.__objclass__ is method.__objclass__
        assert repr(torch.fft.rfft) == repr(original)
        assert not hasattr(torch.fft.rfft, "no_such_thing")


HANDLED = {torch.Tensor.float: "float", torch.Tensor.flatten: "flatten", torch.fft.rfft: "rfft"}


class Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in HANDLED:
            return HANDLED[func], func is getattr(torch.fft, HANDLED[func], func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_find_functions_in_their_tables():
    with Step() as step:
        one = PLAIN.as_subclass(Subclass)
        assert one.float() == ("float", True)
        assert one.flatten() == ("flatten", True)
        assert torch.fft.rfft(one) == ("rfft", True)
        assert torch.fft.rfft(PLAIN, out=one) == ("rfft", True)
        assert HANDLED[torch.Tensor.float] == "float"
        PLAIN.flatten()
    assert step.names == ["flatten"]


def test_a_mode_sees_the_calls_of_the_program_alone():
    class Mode(torch.overrides.TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    with Step(), Mode() as mode:
        torch.fft.rfft(PLAIN)
        PLAIN.flatten()
    assert mode.seen == [torch.fft.rfft, torch.Tensor.flatten]


def test_sparse_and_nested_tensors_pass():
    with Step():
        for layout in ("to_sparse", "to_sparse_csr"):
            assert getattr(PLAIN.double(), layout)().float().dtype == torch.float32
        assert torch.nested.nested_tensor([PLAIN.double()]).float().dtype == torch.float32


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_scripted_or_traced_is_as_without():
    def transformed(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x).abs().flatten()

    with Step() as step:
        scripted = torch.jit.script(transformed)
        traced = torch.jit.trace(transformed, PLAIN, check_trace=False)
        graph = torch.fx.symbolic_trace(transformed).graph
    functions = [node.target for node in graph.nodes if node.op == "call_function"]
    assert functions == [torch.fft.rfft]
    assert step.names == []
    assert torch.equal(scripted(PLAIN), transformed(PLAIN))
    assert torch.equal(traced(PLAIN), transformed(PLAIN))


def test_other_threads_and_forked_processes_are_not_noted():
    with Step() as step:
        thread = threading.Thread(target=PLAIN.flatten)
        thread.start()
        thread.join()
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            PLAIN.flatten()
            os.write(write, str(len(step.names)).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 8) == b"0"
    assert step.names == []


def test_errors_are_those_of_the_functions():
    with Step() as step:
        with pytest.raises(RuntimeError, match="invalid for input"):
            PLAIN.reshape(5)
        with pytest.raises(TypeError):
            torch.fft.rfft()
    assert step.names == []
