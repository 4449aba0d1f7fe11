"""Values that step.log takes, as the host reads them. Copies on a device are in tests/gpu."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from aorta.record.scalars import read_scalars, scalar


@pytest.mark.parametrize(
    "value",
    [
        2.5,
        torch.tensor(2.5),
        torch.tensor([2.5]),
        torch.tensor([[2.5]], dtype=torch.bfloat16),
        torch.tensor(2.5, requires_grad=True),
        torch.tensor(1.25, requires_grad=True) * 2,
        torch.nn.Parameter(torch.tensor(2.5)),
    ],
)
def test_a_number_or_a_tensor_of_one_element_is_a_scalar(value):
    assert read_scalars({"loss": scalar(value)}) == {"loss": 2.5}


def test_a_distributed_tensor_gives_its_local_value():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        norm = DTensor.from_local(torch.tensor(1.25), mesh, [Replicate()])
        assert scalar(norm) == 1.25
    finally:
        dist.destroy_process_group()


def test_a_tensor_of_several_elements_is_refused():
    with pytest.raises(ValueError, match=r"one-element tensors, got shape \(2,\)"):
        scalar(torch.ones(2))
