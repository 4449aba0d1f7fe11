"""Which module, expert group or optimizer a collective is named for; by hand, as the modules are written."""

import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import aorta
from aorta.config.structs import ModelConfig
from aorta.record.collective_names import LearnedNames
from aorta.records.reader import read_steps
from aorta.steps.notes import CollectiveCall, Group, RecordedStep
from aorta.training.model import MixtureOfExperts

pytestmark = pytest.mark.heavy


@pytest.fixture(autouse=True)
def two_ranks():
    """A process group whose calls do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    call_impl = nn.Module._call_impl
    yield
    assert nn.Module._call_impl is call_impl
    dist.destroy_process_group()


def named(folder, steps, body):
    """Return (operation, module, phase) of the collectives, by step. body: runs a step, given its number."""
    with aorta.instrument(folder) as recorder:
        for number in range(steps):
            with recorder.step():
                body(number)
    return [
        [(call.op, record.module_of(call), call.phase) for call in record.collectives]
        for record in read_steps(folder / "rank_0_metrics.jsonl", [])
    ]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def tensor_parallel_blocks():
    mesh = init_device_mesh("cpu", (2,))
    blocks = nn.Sequential(Block(), Block())
    for block in blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return blocks


def test_layers_of_tensor_parallelism_are_named_in_both_directions(tmp_path):
    """The output of a row-wise layer is reduced, and the gradient of a column-wise one's input: of the same
    size and in as large a number, so that no pairing by shape could tell them apart."""
    model = tensor_parallel_blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def body(number):
        model(torch.ones(4, 8, requires_grad=True)).sum().backward()
        optimizer.step()

    forward = [("all_reduce", f"{block}.down", "forward") for block in "01"]
    backward = [("all_reduce", f"{block}.up", "backward") for block in "10"]
    steps = named(tmp_path, 6, body)
    assert [name for _, name, _ in steps[0]] == [""] * 4
    assert steps[1:] == [forward + backward] * 5


def test_recomputed_layers_have_their_own_name(tmp_path):
    model = tensor_parallel_blocks()

    def body(number):
        x = torch.ones(4, 8, requires_grad=True)
        with set_checkpoint_early_stop(False):
            for block in model:
                x = checkpoint(block, x, use_reentrant=False)
        x.sum().backward()

    names = [name for _, name, _ in named(tmp_path, 4, body)[-1]]
    # Blocks are called one by one here: their names are those below them.
    assert names == ["down", "down", "down", "up", "down", "up"]


def test_a_mixture_names_its_exchanges_and_a_step_of_another_shape_keeps_the_names(tmp_path):
    config = ModelConfig(num_experts=4, hidden=8, ffn=8, num_active_experts=1, capacity_factor=1.0)
    model = nn.ModuleDict({"moe": MixtureOfExperts(config)})
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model["moe"].set_group(dist.group.WORLD)

    class Top(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([model])

        def forward(self, x):
            return self.layers[0]["moe"](x)[0]

    top = Top()
    model["moe"].experts.num_local = 4

    def body(number):
        top(torch.rand(2, 4 * (1 + number % 3), 8, requires_grad=True)).sum().backward()

    exchanges = [
        ("all_to_all", "layers.0.moe", phase) for phase in ("forward", "forward", "backward", "backward")
    ]
    assert named(tmp_path, 8, body)[1:] == [exchanges] * 7


class Update(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        if closure is not None:
            closure()
        dist.all_reduce(self.param_groups[0]["params"][0].grad)


def test_collectives_of_optimizers_have_their_names(tmp_path):
    model = nn.Linear(4, 4)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    plain = Update(model.parameters())

    def closure():
        total = model(torch.ones(1, 4)).sum()
        dist.all_reduce(total.detach())  # of nobody, before the backward pass
        total.backward()

    def body(number):
        plain.step(closure)
        dist.all_reduce(torch.ones(1))
        zero.step()

    for step in named(tmp_path, 4, body):
        names = [name for _, name, _ in step]
        assert names[:3] == ["", "optimizer: Update", ""]
        assert set(names[3:]) == {"optimizer: ZeroRedundancyOptimizer"}


class Reducing(nn.Module):
    def forward(self, x):
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1


def test_what_is_compiled_has_no_name_and_is_not_compiled_again(tmp_path):
    from torch._dynamo.utils import counters

    whole = torch.compile(nn.Sequential(Reducing(), Reducing()), backend="eager")
    part = nn.Sequential(Reducing(), Reducing())
    part[1].compile(backend="eager")
    num_frames = []

    def body(number):
        whole(torch.ones(4, requires_grad=True)).sum().backward()
        part(torch.ones(4, requires_grad=True)).sum().backward()
        num_frames.append(sum(counters["frames"].values()))

    *_, last = named(tmp_path, 5, body)
    names = [name for _, name, phase in last if phase == "forward"]
    assert names[:3] == ["", "", "0"]
    assert names[3] in ("", "1")  # by what the backend leaves of its frames
    assert {name for _, name, phase in last if phase == "backward"} <= {""}
    assert len(set(num_frames)) == 1


def test_models_are_not_kept_alive(tmp_path):
    import gc
    from weakref import ref

    gone = []

    def body(number):
        model = nn.Sequential(Reducing(), Reducing())
        model(torch.ones(4))
        gone.append(ref(model))

    names = named(tmp_path, 4, body)
    gc.collect()
    assert [name for _, name, _ in names[-1]] == ["0", "1"]
    assert all(model() is None for model in gone)


def step_of(*calls):
    step = RecordedStep(0, 0, 0, None)
    step.calls = [CollectiveCall(GROUP, op, num_bytes, "float32", False) for op, num_bytes in calls]
    return step


GROUP = Group("0", "default", [0, 1], "gloo")


def test_a_name_that_was_not_seen_twice_is_not_given():
    learned = LearnedNames()

    def look(names, size=4):
        step = step_of(("all_reduce", size), ("all_reduce", 8))
        for call, name in zip(step.calls, names, strict=True):
            call.module = name
        return learned.learn(step, {id(call) for call in step.calls})

    def names(*calls):
        step = step_of(*calls)
        learned.name(step)
        return [call.module for call in step.calls]

    usual = ("all_reduce", 4), ("all_reduce", 8)
    assert not look(["a", "b"])
    assert names(*usual) == [None, None]
    assert look(["a", "b"])
    assert names(*usual) == ["a", "b"]
    assert names(*usual, ("all_reduce", 8)) == [None] * 3
    assert names(("all_reduce", 16), ("all_reduce", 8)) == [None, None]
    look(["a", "other"], size=16)
    assert names(("all_reduce", 16), ("all_reduce", 8)) == ["a", None]


def test_looks_end(tmp_path, monkeypatch):
    """A program whose steps are never the same is looked at in a few."""
    from aorta.record import collective_names

    looks = []
    original = collective_names.CallOrigins.module
    monkeypatch.setattr(
        collective_names.CallOrigins,
        "module",
        lambda self: (looks.append(sys._getframe(1)), original(self))[1],
    )
    monkeypatch.setattr(collective_names, "FIRST_LOOKS", 3)

    def body(number):
        for _ in range(1 + number):
            dist.all_reduce(torch.ones(1))

    named(tmp_path, 12, body)
    assert len(looks) == 2 + 3 + 4 + 5 + 9
