"""What is said of a program that died of too little memory, and that nothing is said of others."""

import gc

import pytest
import torch
from torch import nn

from aorta.record.shortage import memory_error, shortage_of
from aorta.steps.notes import RecordedStep

GPU_TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.11 GiB of which 1.50"
    " GiB is free. Including non-PyTorch memory, this process has 77.61 GiB memory in use. 40.00 GiB allowed;"
    " Of the allocated memory 31.25 GiB is allocated by PyTorch, and 8.00 GiB is reserved by PyTorch but"
    " unallocated."
)
HOST_TEXT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 512 bytes."
GIB = 1 << 30


@pytest.fixture(autouse=True)
def _none_but_the_tests_objects(monkeypatch):
    """Those of pytest and of earlier tests stay frozen: they need not be asked."""
    gc.freeze()
    monkeypatch.setattr("gc.unfreeze", lambda: None)


def caught(function):
    try:
        function()
    except Exception as error:
        return error


class Failing(nn.Module):
    def forward(self, x):
        raise torch.OutOfMemoryError(GPU_TEXT)


def test_the_allocators_sentence_is_read_with_the_limit_of_the_process():
    found = shortage_of(caught(lambda: Failing()(1)), None)
    assert (found.device, found.asked_bytes, found.limit_bytes) == ("cuda:3", 2 * GIB, 40 * GIB)
    assert (found.allocated_bytes, found.unused_bytes) == (31.25 * GIB, 8 * GIB)
    assert found.free_bytes == 1.5 * GIB


def test_the_innermost_module_and_line_are_named_and_an_evaluation_is_called_so():
    model = nn.Sequential(nn.Identity(), Failing())
    found = shortage_of(caught(lambda: model(1)), None)
    assert (found.module, found.phase) == ("1", "forward")
    assert found.place.startswith("Failing.forward(), test_shortage.py:")
    assert shortage_of(caught(lambda: model.eval()(1)), None).phase == "evaluation"


def test_a_loss_of_an_evaluated_model_is_of_an_evaluation():
    def evaluated(model, loss_of):
        raise RuntimeError(HOST_TEXT)

    criterion = nn.CrossEntropyLoss()  # nobody puts it into its mode of evaluation
    assert (
        shortage_of(caught(lambda: evaluated(nn.Linear(2, 2).eval(), criterion)), None).phase == "evaluation"
    )
    assert shortage_of(caught(lambda: evaluated(nn.Linear(2, 2), criterion)), None).phase == "rest"


def test_what_a_loop_does_before_its_backward_pass_counts_as_forward():
    def loss():
        raise RuntimeError(HOST_TEXT)

    step = RecordedStep(7, 7, 0, None)
    found = shortage_of(caught(loss), step)
    assert (found.device, found.phase, found.global_step, found.asked_bytes) == ("cpu", "forward", 7, 512)


@pytest.mark.parametrize(
    ("error", "is_of_memory"),
    [
        (torch.OutOfMemoryError("HIP out of memory."), True),
        (RuntimeError(HOST_TEXT), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
        (None, False),
    ],
)
def test_which_errors_are_of_memory(error, is_of_memory):
    assert (memory_error(error) is error and error is not None) == is_of_memory


def test_the_error_that_another_one_came_from_counts():
    first = torch.OutOfMemoryError("CUDA out of memory.")
    last = SystemExit(1)
    last.__context__ = first
    assert memory_error(last) is first
