"""FLOPs of programs that compile: as of those that do not, and nothing is compiled anew for them."""

import copy
import importlib
import os
import runpy
import sys
import threading
from collections import UserList
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import aorta
from aorta.attach.compiled_modules import CALL, without_compiling
from aorta.attach.flops import COMPILED_PARTS, ModelCalls
from aorta.attach.hooks import Attachment
from aorta.attach.meta_copies import copy_without_data
from aorta.attach.session import CALLS_AT
from aorta.attach.settings import AttachSettings
from aorta.record.interception.works import promise
from tests.dist.launch import run_ranks

AORTA = os.path.dirname(aorta.__file__) + os.sep
B, S, D, LAYERS, VOCABULARY = 2, 16, 32, 10, 50
"""More layers than kinds of calls that are counted."""
OF_DECODER = 3 * 2 * B * S * (LAYERS * 8 * D * D + D * VOCABULARY)
"""Forward and twice as much backward: 8 D^2 weights a layer, and a head."""
OPTIONS = {"backend": "eager", "fullgraph": True}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, D), nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def squared(y):
    return y.square().mean()


def doubled(x):
    return F.gelu(x) * 2


COMPILED = {"doubled": doubled}


class CallsCompiled(Block):
    def forward(self, x):
        return x + self.down(COMPILED["doubled"](self.up(self.norm(x))))


def compiled_of(form, options):
    """A model, what is called of it, and its loss."""
    torch.manual_seed(0)
    model = called = Decoder()
    loss = squared
    if form == "blocks in place":
        for block in model.blocks:
            block.compile(**options)
    elif form == "wrapped blocks":
        for number, block in enumerate(model.blocks):
            model.blocks[number] = torch.compile(block, **options)
    elif form == "functions of blocks":
        for block in model.blocks:
            block.up.forward = torch.compile(block.up.forward, **options)
    elif form == "a function":
        model.blocks = nn.ModuleList(CallsCompiled() for _ in range(LAYERS))
        COMPILED["doubled"] = torch.compile(doubled, **options)
        torch._dynamo.reset()  # by which torch forgets what it was asked for
    elif form == "in place":
        model.compile(**options)
    elif form == "wrapped":
        called = torch.compile(model, **options)
    elif form == "forward":
        model.forward = torch.compile(model.forward, **options)
    elif form == "loss":
        loss = torch.compile(squared, **options)
    elif form == "step":
        called = torch.compile(lambda ids: model(ids), **options)
    return model, called, loss


def counters():
    from torch._dynamo.utils import counters  # takes a second to load

    return counters


def compiled_so_far():
    return {name: dict(counters()[name]) for name in ("frames", "stats", "graph_break", "recompiles")}


def loss_of_step(called, loss, optimizer, ids, calls, number):
    """Trained for one step, which calls note where they are given."""
    if calls is not None:
        calls.begin_step([optimizer], number)
    value = loss(called(ids))
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    if calls is not None:
        calls.end_step()
    return value.item()


def trained(form, sizes, is_noted, options=OPTIONS, with_hook=False):
    """The losses of steps on as many rows, FLOPs with the reason, and what was compiled up to each step."""
    torch._dynamo.reset()
    counters().clear()
    model, called, loss = compiled_of(form, options)
    if with_hook:
        model.register_forward_hook(lambda *_: None)
    optimizer, calls = torch.optim.SGD(model.parameters(), 0.1), ModelCalls()
    losses, compiled = [], []
    for number, rows in enumerate(sizes):
        notes = is_noted and CALLS_AT <= number < CALLS_AT + 3
        ids = torch.arange(rows * S).view(rows, S) % VOCABULARY
        losses.append(loss_of_step(called, loss, optimizer, ids, calls if notes else None, number))
        if is_noted and number == len(sizes) - 2:
            flops = calls.count()
        compiled.append(compiled_so_far())
    return losses, flops if is_noted else None, compiled


ALIKE = [B] * 8
"""Rows of each step: two before they are noted, three that are, one more, then one behind the count."""


@pytest.mark.heavy
@pytest.mark.parametrize("is_whole", [True, False], ids=["fullgraph", "graphs"])
@pytest.mark.parametrize(
    "form",
    [
        "nothing",
        "blocks in place",
        "wrapped blocks",
        "functions of blocks",
        "a function",
        "in place",
        "wrapped",
        "forward",
        "loss",
    ],
)
def test_a_program_that_compiles_has_the_flops_of_one_that_does_not(form, is_whole):
    """And neither a step that is noted nor the count compiles anything, or changes a result."""
    options = OPTIONS | {"fullgraph": is_whole}
    losses, flops, compiled = trained(form, ALIKE, True, options)
    assert flops == (OF_DECODER, "")
    assert (losses, compiled) == trained(form, ALIKE, False, options)[::2]


@pytest.mark.heavy
@pytest.mark.parametrize("with_hook", [False, True])
@pytest.mark.parametrize("is_whole", [True, False], ids=["fullgraph", "graphs"])
def test_a_compiled_step_hides_what_it_calls_and_is_not_compiled_anew(is_whole, with_hook):
    options = OPTIONS | {"fullgraph": is_whole}
    losses, flops, compiled = trained("step", ALIKE, True, options, with_hook)
    assert flops == (None, COMPILED_PARTS)
    assert (losses, compiled) == trained("step", ALIKE, False, options, with_hook)[::2]


@pytest.mark.heavy
@pytest.mark.parametrize(
    "form", ["blocks in place", "wrapped blocks", "in place", "wrapped", "forward", "step"]
)
def test_a_graph_that_is_compiled_in_a_step_that_is_noted_is_as_without(form):
    sizes = [B, B, B + 1, B + 3, B, B + 1, B + 3, B]
    assert trained(form, sizes, True)[::2] == trained(form, sizes, False)[::2]


@pytest.mark.heavy
@pytest.mark.parametrize("form", ["blocks in place", "wrapped blocks", "in place", "wrapped", "forward"])
def test_what_is_compiled_for_the_first_time_in_a_step_that_is_noted_is_not_compiled_again(form):
    calls = ModelCalls()
    torch._dynamo.reset()
    model, called, loss = compiled_of(form, OPTIONS)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids = torch.zeros(B, S, dtype=torch.long)
    counters().clear()
    calls.begin_step([optimizer], 0)
    loss(called(ids)).backward()
    calls.end_step()
    before = compiled_so_far()
    loss(called(ids)).backward()
    assert compiled_so_far() == before


def compiled_later(form, is_noted):
    """Losses, FLOPs, and what was compiled, where the program trains eagerly first, and compiles amid a step
    that is noted."""
    torch._dynamo.reset()
    for name in [name for name, one in cached_backends().items() if one is not None]:
        del cached_backends()[name]  # other tests'
    counters().clear()
    model, called, loss = compiled_of("nothing", OPTIONS)
    optimizer, calls = torch.optim.SGD(model.parameters(), 0.1), ModelCalls()
    ids, losses = torch.arange(B * S).view(B, S) % VOCABULARY, []
    for number in range(9):
        notes = is_noted and number >= CALLS_AT
        if notes:
            calls = ModelCalls() if calls.is_empty else calls
            calls.begin_step([optimizer], number)
        if number == CALLS_AT:
            if form == "blocks in place":
                for block in model.blocks:
                    block.compile(**OPTIONS)
            elif form == "in place":
                model.compile(**OPTIONS)
            else:
                called = torch.compile(model if form == "wrapped" else lambda ids: model(ids), **OPTIONS)
        value = loss(called(ids))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
        if notes:
            calls.end_step()
    return losses, calls.count(), compiled_so_far()


def cached_backends():
    from torch._dynamo.eval_frame import cached_backends  # takes a second to load

    return cached_backends


@pytest.mark.heavy
@pytest.mark.parametrize("form", ["blocks in place", "wrapped", "in place", "step"])
def test_what_is_compiled_first_amid_a_step_that_is_noted_is_compiled_once(form):
    losses, flops, compiled = compiled_later(form, True)
    assert flops == ((None, COMPILED_PARTS) if form == "step" else (OF_DECODER, ""))
    assert (losses, compiled) == compiled_later(form, False)[::2]
    assert compiled["stats"]["unique_graphs"] > 0


@pytest.mark.heavy
def test_another_thread_runs_what_is_compiled_while_one_counts():
    def kind(x):
        return x + (1 if torch.compiler.is_compiling() else 2)

    compiled, seen = torch.compile(kind, **OPTIONS), []
    zero = torch.zeros(1)
    with torch.compiler.set_stance("default"):
        with without_compiling():
            thread = threading.Thread(target=lambda: seen.append(compiled(zero).item()))
            thread.start()
            thread.join()
            seen.append(compiled(zero).item())
            of_another = torch.compiler.set_stance("default")
            of_another.__enter__()
        of_another.__exit__(None, None, None)  # puts back what it found
        seen.append(compiled(zero).item())
    assert seen == [1, 2, 1]


@pytest.mark.heavy
def test_a_compiled_step_that_calls_a_module_with_hooks_and_compiled_blocks_is_not_compiled_anew():
    def compiled_by(is_noted):
        torch._dynamo.reset()
        counters().clear()
        model, _, _ = compiled_of("blocks in place", OPTIONS)
        model.register_forward_hook(lambda *_: None)
        step = torch.compile(lambda ids: squared(model(ids)), **OPTIONS)
        optimizer, calls = torch.optim.SGD(model.parameters(), 0.1), ModelCalls()
        for number in range(3):
            if is_noted and number == 1:
                calls.begin_step([optimizer], number)
            step(torch.zeros(B, S, dtype=torch.long)).backward()
            calls.end_step()
        return compiled_so_far(), calls.count()[1]

    compiled, reason = compiled_by(True)
    assert (compiled, reason) == (compiled_by(False)[0], COMPILED_PARTS)


@pytest.mark.heavy
def test_what_is_replicated_in_each_call_holds_nothing():
    """A replica would call the module that it was made of."""
    model, _, _ = compiled_of("blocks in place", OPTIONS)
    whole, calls = nn.DataParallel(model), ModelCalls()
    calls.begin_step([torch.optim.SGD(model.parameters(), 0.1)], 0)
    assert CALL in vars(whole)
    assert CALL not in vars(model)
    whole(torch.zeros(B, S, dtype=torch.long)).sum().backward()
    calls.end_step()
    assert calls.count() == (OF_DECODER, "")


@pytest.mark.heavy
@pytest.mark.parametrize("form", ["nothing", "loss"])
def test_a_model_that_is_traced_in_a_step_that_is_noted_is_as_without(form):
    torch._dynamo.reset()
    model, _, loss = compiled_of(form, OPTIONS)
    ids, calls = torch.zeros(B, S, dtype=torch.long), ModelCalls()
    loss(model(ids)).backward()
    traced = [one.kind() for one in torch.jit.trace(model, ids).inlined_graph.nodes()]
    calls.begin_step([torch.optim.SGD(model.parameters(), 0.1)], 0)
    loss(model(ids)).backward()
    within = [one.kind() for one in torch.jit.trace(model, ids).inlined_graph.nodes()]
    calls.end_step()
    assert within == traced
    assert calls.count() == (OF_DECODER, "")


@pytest.mark.heavy
def test_what_compiled_autograd_compiles_runs_in_a_step_that_is_noted():
    torch._dynamo.reset()
    model, _, _ = compiled_of("nothing", OPTIONS)
    optimizer, calls, losses = torch.optim.SGD(model.parameters(), 0.1), ModelCalls(), []

    def step(ids):
        loss = squared(model(ids))
        loss.backward()
        return loss

    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(step, backend="eager")
        for number in range(4):
            if number:
                calls.begin_step([optimizer], number)
            losses.append(compiled(torch.zeros(B, S, dtype=torch.long)).item())
            calls.end_step()
    assert len({*losses}) == 1
    assert calls.count() == (None, COMPILED_PARTS)


def halved(gradient):
    return gradient / 2


class Halved(torch.optim.SGD):
    def step(self, closure=None):
        self.param_groups[0]["lr"] /= 2
        super().step(closure)


class Saved:
    def __reduce__(self):
        return Saved, ()


class Engine:
    def __init__(self, model):
        self.optimizer = Halved(model.parameters(), 0.1)
        self.scaler = torch.amp.GradScaler("cpu")

    def step(self):
        self.optimizer.step()


def step_of(model, engine, path, ids):
    loss = squared(model(ids))
    engine.scaler.scale(loss).backward()
    engine.scaler.step(engine.optimizer)
    engine.scaler.update()
    engine.step()
    importlib.import_module("colorsys")
    model.eval()
    with torch.no_grad():
        loss = squared(model(ids))
    model.train()
    torch.save([model.state_dict(), Saved()], path)
    return loss


@pytest.mark.heavy
def test_a_compiled_step_whose_graph_breaks_compiles_what_it_does_without_the_recorder(tmp_path, monkeypatch):
    """Torch compiles what the program runs then, as in the backward pass, and nothing of the recorder."""
    from torch._dynamo.convert_frame import input_codes  # takes a second to load

    bootstrap = runpy.run_path(os.path.join(AORTA, "attach", "bootstrap", "sitecustomize.py"))
    compiled_codes = []
    for is_recorded in (False, True):
        torch._dynamo.reset()
        attachment = Attachment(AttachSettings(output=str(tmp_path / "run")))
        monkeypatch.delitem(sys.modules, "colorsys", raising=False)
        model, _, _ = compiled_of("nothing", OPTIONS)
        try:
            if is_recorded:
                monkeypatch.setattr(sys, "meta_path", [bootstrap["TorchFinder"]({"torch"}), *sys.meta_path])
                attachment.imported("torch", torch)
            engine, compiled = Engine(model), torch.compile(step_of, backend="eager")
            for number in range(6):
                if number == 2:
                    model(torch.zeros(B, S, dtype=torch.long)).sum().backward()
                    engine.step()
                if number == 4:  # the recorder is on
                    model.head.weight.register_hook(halved)
                compiled(model, engine, tmp_path / "model.pt", torch.zeros(B, S, dtype=torch.long))
            seen = [code for held in input_codes.seen if (code := held()) is not None]
        finally:
            attachment._process_ends()
            attachment.detach()
        ours = [code for code in seen if code.co_filename.startswith((AORTA, __file__))]
        compiled_codes.append(sorted(code.co_qualname for code in ours))
    assert attachment.session is not None
    assert compiled_codes[1] == compiled_codes[0]
    assert {"halved", "Halved.step", "Saved.__reduce__"} <= {*compiled_codes[0]}


@pytest.mark.heavy
def test_an_optimizer_is_not_compiled_anew_where_recording_begins_or_ends(tmp_path):
    attachment = Attachment(AttachSettings(output=str(tmp_path / "run")))
    try:
        attachment.imported("torch", torch)
        model = nn.Linear(D, D)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        step = torch.compile(torch.optim.SGD(model.parameters(), 0.1).step, backend="eager")
        step()
        assert attachment.session is None
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(4):
                model(torch.ones(D)).sum().backward()
                step()
            assert attachment.session is not None
            attachment._process_ends()
            step()
    finally:
        attachment.detach()


@pytest.mark.heavy
def test_what_is_dropped_amid_compiled_code_leaves_no_frame_of_it():
    from torch._dynamo.convert_frame import input_codes  # takes a second to load

    def drops(x, held):
        y = x + 1
        torch._dynamo.graph_break()
        held.clear()
        return y + 1

    lost = []
    held = UserList([torch.futures.Future(), torch.optim.SGD([torch.zeros(1)])])
    attachment = Attachment(AttachSettings(output="nowhere"))
    try:
        attachment.imported("torch", torch)
        promise(held[0], [], SimpleNamespace(lost=lost.append))
        known = attachment.key_of(held[1])
        assert [*attachment._serials.values()] == [known]
        torch.compile(drops, backend="eager")(torch.zeros(1), held)
    finally:
        attachment.detach()
    seen = [code for held in input_codes.seen if (code := held()) is not None]
    assert (lost, attachment._serials) == ([[]], {})
    assert not [code.co_qualname for code in seen if code.co_filename.startswith(AORTA)]


class Unreadable(nn.Module):
    @property
    def __dict__(self):
        raise RuntimeError("not here")


@pytest.mark.heavy
def test_a_module_that_hides_what_it_holds_leaves_the_program_without_a_count():
    model, called, loss = compiled_of("blocks in place", OPTIONS)
    hides, calls = object.__new__(Unreadable), ModelCalls()
    calls.begin_step([torch.optim.SGD(model.parameters(), 0.1)], 0)
    loss(called(torch.zeros(B, S, dtype=torch.long))).backward()
    calls.end_step()
    flops, reason = calls.count()
    assert flops is None
    assert "RuntimeError" in reason
    assert type(hides) is Unreadable


@pytest.mark.heavy
def test_a_model_that_is_called_beside_a_compiled_one_unseen_has_no_count():
    """One with hooks, which a compiled function may call. Vectors alone take part in no product."""
    for beside, expected in ((nn.Linear(D, D), COMPILED_PARTS), (nn.LayerNorm(D), "")):
        model, called, _ = compiled_of("blocks in place", OPTIONS)
        beside.register_forward_hook(lambda *_: None)
        optimizer = torch.optim.SGD([*model.parameters(), *beside.parameters()], 0.1)
        calls = ModelCalls()
        calls.begin_step([optimizer], 0)
        (called(torch.zeros(B, S, dtype=torch.long)).sum() + beside(torch.zeros(D)).sum()).backward()
        calls.end_step()
        assert calls.count()[1] == expected


class Autocasts(Decoder):
    def forward(self, ids):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids)


@pytest.mark.heavy
@pytest.mark.parametrize("form", ["blocks", "whole"])
@pytest.mark.parametrize("way", ["the model itself", "the program", "a wrapper", "nothing"])
def test_the_precision_is_known_where_autocast_is_seen(form, way):
    """Of the peak rate that MFU divides by; whether a wrapper of the model's forward casts is not known."""
    model = Autocasts() if way == "the model itself" else Decoder()
    if way == "a wrapper":
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    for one in model.blocks if form == "blocks" else [model]:
        one.compile(backend="eager")
    calls = ModelCalls()
    calls.begin_step([torch.optim.SGD(model.parameters(), 0.1)], 0)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "the program"):
        model(torch.zeros(B, S, dtype=torch.long)).sum().backward()
    calls.end_step()
    assert calls.count() == (OF_DECODER, "")
    assert calls.precision == {"nothing": "fp32", "a wrapper": None}.get(way, "bf16")


@pytest.mark.heavy
def test_nothing_is_left_in_a_module_nor_in_its_copies():
    model, called, _ = compiled_of("blocks in place", OPTIONS)
    before = [dict(vars(module)) for module in model.modules()]
    calls = ModelCalls()
    calls.begin_step([torch.optim.SGD(model.parameters(), 0.1)], 0)
    assert CALL in vars(model)
    assert CALL not in vars(copy.deepcopy(model))
    called(torch.zeros(B, S, dtype=torch.long))
    model.blocks[0].compile(**OPTIONS)  # by the program itself, meanwhile
    calls.end_step()
    assert CALL not in vars(model)
    after = [dict(vars(module)) for module in model.modules()]
    changed = [place for place, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    assert len(changed) == 1
    assert all(CALL not in vars(one) for one in copy_without_data(model).modules())


def trained_by_rank(form, wraps, is_noted):
    """Losses, rank 0's FLOPs, and what was compiled."""
    # Of a whole model that is sharded, torch's own hooks break the graph.
    options = OPTIONS | {"fullgraph": (form, wraps) != ("in place", "fully_shard")}
    model, called, loss = compiled_of(form, options)
    if wraps == "DDP":
        called = DistributedDataParallel(called)
    elif wraps == "fully_shard":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    optimizer, calls = torch.optim.SGD(called.parameters(), 0.1), ModelCalls()
    losses = []
    ids = torch.arange(B * S).view(B, S) % VOCABULARY
    for number in range(7):
        notes = is_noted and CALLS_AT <= number < CALLS_AT + 3 and torch.distributed.get_rank() == 0
        losses.append(loss_of_step(called, loss, optimizer, ids, calls if notes else None, number))
    return losses, calls.count(), compiled_so_far()


@pytest.mark.parametrize("form", ["blocks in place", "wrapped blocks", "in place"])
@pytest.mark.parametrize("wraps", ["DDP", "fully_shard"])
def test_ranks_around_compiled_modules(form, wraps):
    noted, plain = (
        run_ranks(partial(trained_by_rank, form, wraps), 2, is_noted) for is_noted in (True, False)
    )
    assert noted[0][1] == (OF_DECODER, "")
    assert [one[::2] for one in noted] == [one[::2] for one in plain]
