"""Fingerprints of tensors, and wrong numbers planted in DDP on gloo ranks."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aorta.check.fingerprints import fingerprints, numbers
from aorta.check.numbering import Numbering, _Pending, _unseen
from aorta.hazards.findings import read_checked
from aorta.hazards.numbers import Call, Numbered
from tests.check.rank_programs import bucket_loops, reducer_on_a_device, spoilt_loops
from tests.dist.launch import run_ranks


def printed(tensors, num_parts: int = 1) -> torch.Tensor:
    return torch.tensor(
        [row or [math.nan] * 9 for row in numbers([fingerprints(tensors, num_parts)])], dtype=torch.float32
    )


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    return printed([tensor])[0]


@pytest.mark.parametrize("size", [3, 64, 1000, 70_001, 4_300_000])
def test_the_fingerprint_of_a_sum_is_the_sum_of_fingerprints(size):
    generator = torch.Generator().manual_seed(size)
    a, b = torch.randn(2, size, generator=generator)
    both = fingerprint(a)[1:] + fingerprint(b)[1:]
    assert torch.allclose(fingerprint(a + b)[1:], both, atol=2e-2)
    assert math.isclose(fingerprint(a)[0], a.double().square().sum(), rel_tol=1e-3)


@pytest.mark.parametrize("share", [1.0, 2**-4])
def test_differences_of_fingerprints_measure_the_norm_of_the_difference(share):
    generator = torch.Generator().manual_seed(5)
    a, noise = torch.randn(2, 5000, generator=generator)
    change = share * noise * a.norm() / noise.norm()
    measured = (fingerprint(a + change) - fingerprint(a))[1:].square().mean().sqrt()
    assert 0.4 < measured / change.norm() < 2


def test_a_tensors_layout_and_type_do_not_matter_and_short_ones_count_too():
    x = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(fingerprint(x.T.contiguous().T), fingerprint(x))
    assert torch.allclose(fingerprint(x.double()), fingerprint(x))
    assert fingerprint(torch.zeros(0)).tolist() == [0.0] * 9


def test_a_tensor_with_a_nan_has_no_numbers():
    assert numbers([fingerprints([torch.tensor([1.0, math.nan]), torch.ones(2)])])[0] == []


@pytest.mark.parametrize("sizes", [[4096], [70_000], [4_300_000], [100, 1000]])
@pytest.mark.parametrize("value", [1e20, 3.4e38])
def test_a_tensor_whose_values_are_finite_has_numbers_whatever_overflows_in_their_squares_and_sums(
    sizes, value
):
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.rand(size, generator=generator).add_(1).mul_(value / 2) for size in sizes]
    for tensor, found in zip(tensors, numbers([fingerprints(tensors)]), strict=True):
        assert 0.3 < math.sqrt(found[0]) / tensor.double().norm() < 3
    spoilt = [tensor.index_fill(0, torch.tensor([7]), math.inf) for tensor in tensors]
    assert not any(numbers([fingerprints(spoilt)]))


@pytest.mark.parametrize("size", [3 * 64 * 40, 3 * 1000])
def test_parts_of_a_tensor_have_the_fingerprints_of_tensors(size):
    whole = torch.randn(size)
    alone = torch.stack([fingerprint(part) for part in whole.chunk(3)])
    torch.testing.assert_close(printed([whole], 3), alone, rtol=1e-4, atol=1e-4)


def test_buckets_that_are_filled_again_and_clipped_are_right(tmp_path):
    run_ranks(bucket_loops, 2, str(tmp_path))
    found = read_checked(tmp_path)
    assert [d for checked in found for d in checked.differences] == []
    assert all(checked.num_compared > 40 for checked in found)


def test_wrong_numbers_of_one_rank_are_named_and_right_ones_are_not(tmp_path):
    run_ranks(spoilt_loops, 2, str(tmp_path))
    for kind, what in (("zeros", "sum"), ("weights", "ranks"), ("nan", "nan"), ("clean", None)):
        found = [d for checked in read_checked(tmp_path / kind) for d in checked.differences]
        first = min(found, key=lambda d: (d.step, d.place), default=None)
        if what is None:
            assert first is None
        else:
            assert (first.rank, first.step) == (1, 3), kind
            assert what in {d.what for d in found if d.rank == 1}, kind


def test_what_a_reducer_gets_on_a_device_is_compared_with_what_it_sends(tmp_path):
    run_ranks(reducer_on_a_device, 2, str(tmp_path))
    found = [d for checked in read_checked(tmp_path) for d in checked.differences]
    assert [(d.rank, d.step) for d in found if d.what == "sum"] == [(1, 3)]


def test_tensors_printed_together_have_the_fingerprints_that_each_has_alone():
    sizes = [1, 63, 64, 65, 511, 512, 513, 4096, 10_000, 0]
    tensors = [torch.randn(size) for size in sizes]
    tensors += [torch.randn(7, 9).t(), torch.randn(33, 5).half(), torch.randn(8, dtype=torch.float64)]
    alone = torch.stack([fingerprint(tensor) for tensor in tensors])
    torch.testing.assert_close(printed(tensors), alone, rtol=1e-4, atol=1e-4)


def test_the_programs_default_type_is_not_that_of_fingerprints():
    tensors = [torch.ones(100), torch.ones(70)]
    alone = printed(tensors)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(printed(tensors), alone)
    finally:
        torch.set_default_dtype(torch.float32)


def test_large_tensors_are_printed_in_several_layouts(monkeypatch):
    tensors = [torch.randn(size) for size in (300, 700, 200, 900)]
    together = printed(tensors)
    monkeypatch.setattr("aorta.check.fingerprints.MOST_ROWS", 16)
    torch.testing.assert_close(printed(tensors), together, rtol=1e-4, atol=1e-4)


class Largest(TorchDispatchMode):
    """The most elements that an operator made memory for, beside what a tensor has."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.known, self.numel = tensor.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() != self.known:
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("shape", [(37, 300), (2, 5550), (5550, 2), (3, 37, 100)])
def test_a_tensor_whose_memory_is_in_another_order_is_copied_in_parts(monkeypatch, shape):
    fingerprint(torch.ones(1))  # so that signs are there, for as many rows as in other tests
    monkeypatch.setattr("aorta.check.fingerprints.MOST_ROWS", 16)
    tensor = torch.randn(*reversed(shape)).permute(*reversed(range(len(shape))))
    expected = fingerprint(tensor.contiguous())
    with Largest(tensor) as largest:
        found = fingerprints([tensor])
    assert largest.numel <= 16 * 64
    assert torch.equal(torch.tensor(numbers([found])[0]), expected)


def test_parts_of_such_a_tensor_have_their_fingerprints_too():
    tensor = torch.randn(640, 3 * 7).t()
    assert not tensor.is_contiguous()
    assert torch.equal(printed([tensor], 3), printed([tensor.contiguous()], 3))


def test_what_the_program_has_switched_on_does_not_reach_fingerprints():
    numbering, x = Numbering(str), torch.randn(100, 64, requires_grad=True)

    @_unseen
    def look(_: Numbering) -> torch.Tensor:
        return fingerprints([x]).sums

    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = look(numbering)
    assert sums.dtype == torch.float32
    assert not sums.requires_grad
    torch.testing.assert_close(sums, fingerprints([x.detach()]).sums)


@pytest.fixture
def numbering() -> Numbering:
    """In a window, with a collective whose output is not there yet."""
    given = Numbering(str)
    call = Call(
        step=0, group="0,1", number=0, place=1, op="all_reduce", reduction="sum", name="", epsilon=0.0
    )
    given._pending.append(_Pending(call, fingerprints([torch.ones(64)]), [torch.ones(64)]))
    return given


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError


def test_where_fingerprints_cannot_be_brought_together_a_window_has_none(numbering, monkeypatch):
    with monkeypatch.context() as short:
        short.setattr("aorta.check.numbering.numbers", out_of_memory)
        assert numbering.take(3) == Numbered(rank=3)
    assert numbering.is_short
    assert numbering.take(3).calls == []


def test_where_memory_is_short_no_output_of_the_program_is_kept(numbering):
    _unseen(out_of_memory)(numbering)
    assert numbering.is_short
    assert [pending.outputs for pending in numbering._pending] == [[]]
    assert len(numbering.take(0).calls) == 1
