"""FLOPs of a step that torch counts on a copy without data, beside counts by hand."""

import linecache
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import get_args
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributions import (
    Categorical,
    Distribution,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
)
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.parametrizations import orthogonal
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from aorta.attach.call_flops import count_of
from aorta.attach.flops import NO_CALL, NO_OPTIMIZER, UNLIKE, ModelCalls
from aorta.attach.meta_copies import copy_without_data
from aorta.attach.needless_batches import NeedlessBatches, _is, held
from aorta.attach.without_data import WithoutData
from aorta.record.census import census
from aorta.records.schema import LoopKind

B, S, D, HEADS, LAYERS, VOCABULARY = 2, 32, 64, 4, 2, 100
SIDE = 512
"""Of a matrix that no cache holds as a whole, with what is computed of it."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(B, S, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(B, S, D))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.embed, self.drop = nn.Embedding(VOCABULARY, D), nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.drop(self.embed(ids))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


class Experts(nn.Module):
    def __init__(self, num=8, chosen=2):
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(D, num, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 2 * D, bias=False), nn.SiLU(), nn.Linear(2 * D, D, bias=False))
            for _ in range(num)
        )

    def forward(self, x):
        weights, places = self.gate(x).softmax(-1).topk(self.chosen, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(places == number)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


def counted(model, *inputs):
    copy = copy_without_data(model)
    return count_of(copy, tuple(torch.empty_like(each, device="meta") for each in inputs), {})[0]


IDS = torch.zeros(B, S, dtype=torch.long)
OF_DECODER = 3 * (2 * B * S * (LAYERS * 12 * D * D + D * VOCABULARY) + LAYERS * 4 * B * S * S * D)
"""Forward and twice as much backward: 12 D^2 weights a layer, scores and values of full attention, a head."""


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_a_decoder(checkpointed):
    """What a checkpointed layer does again is not the model's."""
    assert counted(Decoder(checkpointed), IDS) == OF_DECODER


def test_operators_that_checkpoints_call_again():
    """As many more as a step has with them, and bytes: a block's own, forward, without fused scores."""
    counts = [count_of(copy_without_data(Decoder(is_on)), (IDS.to("meta"),), {}) for is_on in (False, True)]
    plain, checkpointed = (one.operators for one in counts)
    assert plain[1] == counts[0].again_bytes == 0
    assert checkpointed[0] - checkpointed[1] == plain[0]
    assert counts[1].num_bytes - counts[1].again_bytes == counts[0].num_bytes
    model = Decoder(True)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(IDS))
    assert work.again_launched == checkpointed[1] / checkpointed[0] > 0.1


def test_a_convolution_net():
    """The first layer's input has no gradient: twice its forward pass, thrice of the others."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    first, second, head = 2 * 8 * 16 * 16 * 16 * 27, 2 * 8 * 8 * 8 * 32 * 16 * 9, 2 * 8 * 32 * 10
    assert counted(model, torch.zeros(8, 3, 16, 16)) == 2 * first + 3 * second + 3 * head


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_sparse_gradients_of_bags_are_none_of_the_products(mode):
    model = nn.Sequential(nn.EmbeddingBag(100, D, mode=mode, sparse=True), nn.Linear(D, 10))
    assert counted(model, IDS) == 3 * 2 * B * D * 10


def test_experts_count_as_evenly_used():
    """Each token goes through two of eight experts of two matrices; the gate is small."""
    num = 64
    first, gate, experts = 2 * num * D * D, 2 * num * D * 8, 2 * num * 2 * 2 * D * 2 * D
    model = nn.Sequential(nn.Linear(D, D, bias=False), Experts())
    assert counted(model, torch.zeros(num, D)) == 2 * first + 3 * gate + 3 * experts


class LeavesOutMasks(nn.Linear):
    """As transformers does: of batches of which no row is filled up. asks: how it finds out."""

    def __init__(self, asks):
        super().__init__(4, 4)
        self.asks = asks

    def forward(self, x, mask):
        x = super().forward(x)
        mask = None if self.asks(mask) else mask[None, :].expand(2, 2)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


@pytest.mark.parametrize(
    "asks", [lambda mask: mask.all(), lambda mask: mask.sum() == mask.numel()], ids=["all", "sum"]
)
def test_a_model_that_asks_whether_a_mask_leaves_anything_out_is_counted_with_it(asks):
    """A product of 2 by 4 with 4 by 4 whose input has no gradient, and scores and values of attention."""
    by_hand = 2 * 2 * 2 * 4 * 4 + 3 * 2 * 2 * 2 * 2 * 4
    assert counted(LeavesOutMasks(asks), torch.zeros(2, 4), torch.ones(2, dtype=torch.bool)) == by_hand


class ReadsValues(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


BESIDE = nn.Linear(4, 4)


NOT_HELD = torch.ones(4)


class MakesTensors(nn.Linear):
    """On a device that it knows by name, and in the type that autocast gives elsewhere."""

    def forward(self, x):
        places = torch.arange(4, device="cpu") + NOT_HELD
        x = super().forward(x * places)
        mask = torch.zeros(2, 2, device="cpu", dtype=torch.bfloat16)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_tensors_that_a_model_makes_with_data_meet_its_copy_without():
    """A product of 2 by 4 with 4 by 4, and scores and values of attention; the input has no gradient."""
    assert counted(MakesTensors(4, 4), torch.zeros(2, 4)) == 2 * 2 * 2 * 4 * 4 + 3 * 2 * 2 * 2 * 2 * 4


def test_a_device_known_by_name_makes_nothing_there():
    """A count launches nothing on a GPU; what has data is stood for once, but for a number."""
    told = []
    change = WithoutData(lambda tensor, empty: told.append((tensor, empty)))
    assert change((4,), {"device": "cuda:1", "dtype": None})[1] == {
        "device": torch.device("meta"),
        "dtype": None,
    }
    assert change((4,), {"device": "cpu"})[1] == {"device": "cpu"}
    table, empty = torch.zeros(3, 4).T, torch.zeros(4, 3, device="meta")
    (one, other), _ = change((empty, table), {})
    assert one is empty
    assert (other.is_meta, other.shape, other.stride()) == (True, table.shape, table.stride())
    assert told == [(table, other)]
    assert change((empty, table), {})[0][1] is other
    number = torch.tensor(2.0)
    assert change((empty, number), {})[0][1] is number


class UsesAnother(nn.Linear):
    def forward(self, x):
        return super().forward(x) + BESIDE(x)


class TakesSparse(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.adjacency = nn.Parameter(torch.eye(2).to_sparse())

    def forward(self, x):
        return torch.sparse.mm(self.adjacency, super().forward(x))


class Communicates(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return torch.ops._c10d_functional.all_reduce(x, "sum", "0")


class KnowsShapes(nn.Linear):
    def forward(self, x):
        if x.is_meta:
            raise ValueError("Tensor on device meta is not on the expected device!")
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            ReadsValues(4, 4),
            "the forward pass reads values of tensors on the host (at ReadsValues.forward(), ",
        ),
        (TakesSparse(4, 4), "a tensor of the model is sparse and trains"),
        (UsesAnother(4, 4), "the forward pass uses parameters that its module does not hold"),
        (Communicates(4, 4), "the model communicates in its forward pass"),
        (KnowsShapes(4, 4), "the model does not run without data: ValueError (at KnowsShapes.forward(), "),
    ],
)
def test_what_cannot_be_counted_is_refused_with_a_reason(model, reason):
    calls = noted(model, torch.zeros(2, 4))
    total, told = calls.count()
    assert total is None
    assert told.startswith(reason)


class Draws(nn.Linear):
    """A policy whose distributions look whether their values are theirs."""

    def forward(self, x):
        base = Independent(Normal(super().forward(x), torch.ones(4)), 1)
        drawn = TransformedDistribution(base, [TanhTransform(cache_size=1)])
        action = drawn.rsample()
        return action, drawn.log_prob(action), Categorical(logits=action).entropy()


def test_a_model_is_counted_whose_distributions_check_values(monkeypatch):
    monkeypatch.setattr(Distribution, "_validate_args", True)  # torch.compile takes it off, for good
    calls = noted(Draws(4, 4), torch.zeros(2, 4))
    assert calls.count()[0] == pytest.approx(2 * 2 * 2 * 4 * 4)  # no gradient of the inputs
    assert Distribution._validate_args


def test_the_end_of_a_run_waits_no_longer_for_a_count_than_it_may(monkeypatch):
    """20,000 steps of time are some million operators of a copy: minutes."""
    monkeypatch.setattr("aorta.attach.flops.MOST_CPU_S", 0.2)
    calls = noted(nn.GRU(4, 4), torch.zeros(20_000, 1, 4))
    begins_s = time.thread_time()
    assert calls.count() == (None, "to count its operators takes longer than 4 s")
    assert time.thread_time() - begins_s < 2.0


def noted(model, *inputs, times=1):
    """The calls of a step in which the model is called; on inputs without data, so that it may fail."""
    calls = ModelCalls()
    calls.begin_step([torch.optim.SGD(model.parameters(), 0.1)], 0)
    for _ in range(times):
        try:
            model(*inputs)
        except RuntimeError:
            assert isinstance(model, Communicates)
    calls.end_step()
    return calls


def test_each_call_of_a_step_counts():
    assert noted(Decoder(), IDS, times=3).count() == (3.0 * OF_DECODER, "")


NUM = 40


class Loops(nn.Module):
    """Three operators an iteration, beside views."""

    def __init__(self, form):
        super().__init__()
        self.form, self.cell = form, nn.Linear(4, 4)
        self.gru = nn.GRU(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(NUM))

    def forward(self, x):
        if self.form == "of a library":
            return self.gru(x)[0]
        if self.form == "recurrence":
            state = x[0]
            for row in range(NUM):
                state = torch.relu(self.cell(state)) + x[row]
            return state
        layers = [self.cell] * NUM if self.form == "parts" else self.heads
        given, rows = x[0], []
        for row in range(NUM):
            given = given if self.form == "layers" else x[row if self.form == "parts" else 0]
            given = torch.relu(layers[row](given)) + 1
            rows.append(given)
        return torch.stack(rows)


@pytest.mark.parametrize("form", ["recurrence", "parts", "modules", "layers", "of a library"])
def test_a_loop_of_the_model_is_found_with_what_its_iterations_have(form):
    calls = noted(Loops(form), torch.zeros(NUM, 2, 4), times=2)
    calls.count()
    loop = calls.work.loop
    assert (None if loop is None else loop.kind) == (form if form in get_args(LoopKind) else None)
    if loop is not None:
        assert loop.iterations == NUM
        assert loop.flops == 2 * NUM * 2 * 2 * 4 * 4  # twice
        assert loop.operators >= 2 * NUM * 3
        assert loop.at.function == "Loops.forward"
        assert loop.last_line - loop.first_line <= 2


class Experts3(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.gate = form, nn.Linear(D, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.ReLU()) for _ in range(3))

    def forward(self, x):
        value, chosen = self.gate(x).softmax(-1).max(-1)
        weights = F.one_hot(chosen, 3) * value[:, None]
        if self.form == "soft":
            weights = self.gate(x).softmax(-1)
        given = [expert(x) for expert in self.experts]
        done = sum(one * weights[:, place : place + 1] for place, one in enumerate(given))
        return done + sum(given) if self.form == "read otherwise" else done


@pytest.mark.parametrize("form", ["one-hot", "soft", "read otherwise"])
def test_rows_that_are_multiplied_by_zero(form):
    """Two thirds of three products, and of as many for the gradients of their weights."""
    model, x = Experts3(form), torch.zeros(S, D)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(x))
    assert work.masked == pytest.approx(4 * PRODUCT if form == "one-hot" else 0, abs=3)


@pytest.mark.parametrize(
    ("words", "dtype", "precision", "is_odd"),
    [
        (1001, "bfloat16", "highest", True),
        (1008, "bfloat16", "highest", False),
        (1004, "bfloat16", "highest", True),  # a multiple of 8 bytes
        (1001, "float32", "highest", False),  # not in tensor cores
        (1001, "float32", "high", True),  # TF32
        (1004, "float32", "high", False),  # a multiple of 16 bytes
    ],
)
def test_the_largest_products_whose_rows_begin_anywhere(words, dtype, precision, is_odd, monkeypatch):
    """Forward, and for the gradients of weights and of what the first layer gave."""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    model, x = nn.Sequential(nn.Linear(D, D), nn.Linear(D, words)), torch.zeros(S, D)
    model, x = model.to(getattr(torch, dtype)), x.to(getattr(torch, dtype))
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(x))
    assert work.precision == {"bfloat16": "bf16", "float32": {"high": "tf32"}.get(precision, "fp32")}[dtype]
    assert (work.odd, work.odd_num) == ((3 * 2 * S * D * words, 3) if is_odd else (0, 0))
    assert work.odd_length == (words if is_odd else 0)


class MaskedScores(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.inner = form, nn.Linear(D, D)
        self.register_buffer("mask", torch.ones(2 * S, 2 * S, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("other", torch.rand(S, S) > 0.5)

    def forward(self, x):
        y = self.inner(x)[:, None]
        ones, places = torch.ones(S, S, dtype=torch.bool), torch.arange(S)
        mask = {
            "tril": lambda: ones.tril(),
            "added": lambda: torch.zeros(S, S).masked_fill(~ones.tril(), float("-inf")),
            "triu": lambda: torch.full((S, S), float("-inf")).triu(1),
            "places": lambda: places[:, None] >= places[None],
            "held": lambda: self.mask[:S, :S],
            "with padding": lambda: ones.tril() & (x[:, None, None, :, 0] != 9),
            "another": lambda: self.other,
            "none": lambda: None,
        }[self.form]()
        return F.scaled_dot_product_attention(y, y, y, attn_mask=mask, is_causal=mask is None)


@pytest.mark.parametrize(
    ("form", "is_causal"),
    [
        *((form, True) for form in ("tril", "added", "triu", "places", "held")),
        *((form, False) for form in ("with padding", "another", "none")),
    ],
)
def test_a_mask_that_is_causal_says(form, is_causal):
    torch.manual_seed(3)
    model, x = MaskedScores(form), torch.zeros(2, S, D)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(x))
    assert (work.attention, work.causal) == (1, is_causal)
    assert work.causal_at is None or work.causal_at.function.startswith("MaskedScores.forward")


def test_rows_of_a_convolution_are_channels():
    """Not its 3 columns, at which its kernel begins anew."""
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 3)).bfloat16()
    x = torch.zeros(2, 8, 15, 15, dtype=torch.bfloat16)
    assert worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(x)).odd_num == 0


class Whitened(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.linear = form, nn.Linear(D, D)

    def forward(self, x):
        if self.form == "one of torch's":
            return F.layer_norm(self.linear(x), (D,))
        y = self.linear(x)
        centred = y - y.mean(-1, keepdim=True)
        squares = centred**2 if self.form == "a power" else centred * centred
        wide = centred * squares.mean(-1, keepdim=True).rsqrt()
        return self.linear(wide) if self.form == "read by a product" else wide


@pytest.mark.parametrize("form", ["norm", "a power", "read by a product", "one of torch's"])
def test_what_operators_hand_to_each_other_is_counted(form):
    """Written, and read twice or once: the mean of each row, what is centred, squares, and their means twice;
    not what a product gives or reads."""
    model, x = Whitened(form), torch.zeros(S, D)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(x))
    rows, whole = 4 * S, 4 * S * D
    expected = 2 * rows + 3 * whole + 2 * whole + 2 * rows + 2 * rows
    assert sum(line.handed_bytes for line in work.lines) == (0 if form == "one of torch's" else expected)


@pytest.mark.parametrize(("num", "found"), [(40, True), (4, False)], ids=["many", "few"])
def test_a_loop_over_operators_between_the_model_and_its_loss_is_timed(num, found):
    model, calls = nn.Linear(4, 4), ModelCalls()
    calls.begin_step([torch.optim.SGD(model.parameters(), 0.1)], 0)
    output = model(torch.zeros(2, 4))
    loss = sum((output * k).sum() for k in range(num))
    calls.backward_begins([loss], True)
    loss.backward()
    calls.end_step()
    assert (calls.loss_loop is not None) is found
    if found:  # a product, a sum and an addition each
        assert calls.loss_loop.operators == pytest.approx(3 * num, abs=2)
        assert calls.loss_loop.ms > 0


def smoothed(logits, targets):
    target = F.one_hot(targets, SIDE).float() * 0.9 + 0.1 / SIDE
    return -(target * torch.log(torch.softmax(logits, 1) + 1e-9)).sum(1).mean()


@pytest.mark.parametrize(
    ("loss_of", "is_found"),
    [
        pytest.param(smoothed, True, id="by-hand"),
        pytest.param(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), False, id="one-of-torchs"),
        pytest.param(lambda x, y: F.cross_entropy(x[:, :4], y % 4), False, id="of-few-columns"),
        pytest.param(
            lambda x, y: smoothed(F.conv1d(x[None], torch.eye(SIDE)[:, :, None])[0], y),
            False,
            id="with-another",
        ),
    ],
)
def test_a_loss_whose_operators_hand_large_tensors_to_each_other_is_told(loss_of, is_found):
    """A softmax moves its result 5 times, adding, a logarithm and a product too, a sum 3 times: more than
    twice what one function moves. What a convolution takes no bytes tell."""
    model, calls = nn.Linear(4, SIDE), ModelCalls()
    calls.begin_step([torch.optim.SGD(model.parameters(), 0.1)], 0)
    loss = loss_of(model(torch.zeros(SIDE, 4)), torch.zeros(SIDE, dtype=torch.int64))
    calls.backward_begins([loss], True)
    loss.backward()
    calls.end_step()
    found = calls.loss_loop
    assert (found is not None) is is_found
    if found is not None:
        assert found.bytes == pytest.approx(23 * 4 * SIDE**2, rel=0.01)
        assert found.least_bytes == 8 * 4 * SIDE**2
        assert found.ms > 0


class Turned(nn.Module):
    """A weight near the identity, computed in each round."""

    def __init__(self, rounds):
        super().__init__()
        self.rounds, self.turn = rounds, nn.Linear(D, D, bias=False)
        parametrize.register_parametrization(self.turn, "weight", NearIdentity())

    def forward(self, x):
        for _ in range(self.rounds):
            x = self.turn(x)
        return x


class NearIdentity(nn.Module):
    def forward(self, x):
        return torch.eye(D) + x


@pytest.mark.parametrize(("rounds", "is_cached", "again"), [(4, False, 3), (1, False, 0), (4, True, 0)])
def test_a_weight_that_each_round_computes_of_others_is_counted_but_the_first_time(rounds, is_cached, again):
    """Twice read and once written: the identity is no less the model's than the weight. And as often
    backward. Of the two operators of its line, one makes the identity of nothing."""
    model = Turned(rounds)
    context = parametrize.cached if is_cached else nullcontext

    def step():
        with context():
            return model(torch.zeros(S, D))

    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), step)
    assert work.hoisted_bytes == 2 * again * 3 * 4 * D**2
    assert work.hoisted_share == pytest.approx(again / rounds / 2 if again else 0)
    assert not parametrize._cache


@pytest.mark.parametrize(
    ("passes", "is_cached", "again"),
    [(1, False, 3), (1, True, 0), (4, False, 0)],
    ids=["one-pass", "cached", "a-pass-each"],
)
def test_weights_that_each_call_of_the_model_computes_of_others(passes, is_cached, again):
    """Four calls, whose weights one pass could share; those of micro-batches have graphs of their own."""
    model, calls = Turned(1), ModelCalls()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        calls.begin_step([optimizer], step)
        for _ in range(passes):
            with parametrize.cached() if is_cached else nullcontext():
                loss = sum(model(torch.zeros(S, D)).sum() for _ in range(4 // passes))
            calls.backward_begins([loss], True)
            loss.backward()
        calls.end_step()
        model.zero_grad()
    calls.count()
    assert calls.work.hoisted_bytes == 2 * again * 3 * 4 * D**2


class Own(nn.Module):
    """A weight that the program computes itself, of what may differ from call to call, or once a step."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.zeros(D, D)), 1.0

    def forward(self, x):
        return x @ torch.tanh(self.weight * self.scale)


@pytest.mark.parametrize("name", ["own", "spectral_norm"])
def test_weights_that_may_differ_from_call_to_call_are_computed_in_each(name):
    layer = nn.Linear(D, D, bias=False)
    model, calls = Own() if name == "own" else parametrizations.spectral_norm(layer), ModelCalls()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        calls.begin_step([optimizer], step)
        loss = sum(model(torch.zeros(S, D)).sum() for _ in range(4))
        calls.backward_begins([loss], True)
        loss.backward()
        calls.end_step()
    calls.count()
    assert calls.work.hoisted_bytes == 0


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_weights_that_hooks_of_torch_compute_are_counted_as_those_of_parametrizations(name):
    def of(functions):
        model = Turned(1)
        model.rounds, model.turn = 4, getattr(functions, name)(nn.Linear(D, D, bias=False))
        work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(torch.zeros(S, D)))
        return work.hoisted_at and work.hoisted_at.function, work.hoisted_bytes, work.hoisted_launched

    at, hoisted_bytes, part = of(torch.nn.utils)
    assert (at, hoisted_bytes, part) == of(parametrizations)
    assert (at, part > 0.1) == ("Turned.forward", True)
    assert hoisted_bytes > 2 * 3 * 4 * D**2  # three times each weight is read, at least


class Solves(nn.Module):
    """A weight that a system of equations gives, in each of four rounds, and one that data give, in each."""

    def __init__(self, of_data):
        super().__init__()
        self.of_data, self.turn = of_data, orthogonal(nn.Linear(D, D, bias=False), orthogonal_map="cayley")

    def forward(self, x):
        for _ in range(4):
            x = self.turn(x)
            if self.of_data:
                x = torch.linalg.solve(torch.eye(D) + x.T @ x, x.T).T
        return x


@pytest.mark.parametrize(("of_data", "part"), [(False, 3 / 4), (True, 3 / 8)])
def test_solves_for_weights_are_told_from_those_for_data(of_data, part):
    """One of four is needed for the weight; those for data have nothing to do with it."""
    model = Solves(of_data)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(torch.zeros(S, D)))
    assert (work.hoisted_solves, work.hoisted_checks) == (pytest.approx(part), pytest.approx(part))
    assert 0 < work.hoisted_launched < 1


class WithPenalty(nn.Linear):
    """Keeps a sum of squares of its own weights, as losses beside the output are kept."""

    def forward(self, x):
        self.penalty = self.weight.pow(2).sum()
        return super().forward(x)


@pytest.mark.parametrize(
    ("penalty", "passes"),
    [
        pytest.param(lambda model, _: model.weight.pow(2).sum(), 5 + 3 + 3, id="squares"),
        pytest.param(lambda model, _: 2 * model.weight.abs().sum(), 5 + 3 + 3, id="absolute-values"),
        pytest.param(
            lambda model, old: (model.weight - old).square().sum(), 2 * 5 + 3 + 3, id="far-from-old"
        ),
        pytest.param(lambda model, _: model.penalty, 0, id="within-the-model"),
        pytest.param(lambda model, _: model.weight[:4].pow(2).sum(), 0, id="of-few-rows"),
        pytest.param(lambda model, old: (model.output * old).sum(), 0, id="of-activations"),
    ],
)
def test_operators_on_weights_between_the_model_and_its_loss_are_counted(penalty, passes):
    """Element by element: read, written; then both read and one written backward. A sum writes next to
    nothing. The gradient is added to the one of the model's own: two read, and one written."""
    model, calls = WithPenalty(SIDE, SIDE, bias=False), ModelCalls()
    calls.begin_step([torch.optim.SGD(model.parameters(), 0.1)], 0)
    output = model.output = model(torch.zeros(SIDE, SIDE))
    old = torch.zeros(SIDE, SIDE)
    loss = output.sum() + penalty(model, old)
    calls.backward_begins([loss], True)
    loss.backward()
    calls.end_step()
    found = calls.loss_loop
    assert (found is not None) is (passes > 0)
    if found is not None:
        assert found.weights_bytes == pytest.approx(4 * passes * SIDE**2, rel=0.01)
        assert found.bytes == pytest.approx(4 * (passes - 3 + 3) * SIDE**2, rel=0.01)  # with the output's sum
        assert found.parameters == 1
        assert found.ms > 0


def test_an_orthogonal_penalty_is_work_on_weights():
    """A product of the weights with themselves: its FLOPs count as bytes, 8 a byte."""
    model, calls = nn.Linear(SIDE, SIDE, bias=False), ModelCalls()
    calls.begin_step([torch.optim.SGD(model.parameters(), 0.1)], 0)
    output = model(torch.zeros(2, SIDE))
    loss = output.sum() + (model.weight @ model.weight.T - torch.eye(SIDE)).norm()
    calls.backward_begins([loss], True)
    calls.end_step()
    flops, moved = 3 * 2 * SIDE**3, 4 * (3 * 2 + 2 + 5 + 3 + 3) * SIDE**2
    assert calls.loss_loop.weights_bytes == pytest.approx(flops / 8 + moved, rel=0.01)
    assert calls.loss_loop.ms is None  # no backward pass came to the model


def test_a_step_without_a_backward_pass_keeps_no_graph():
    """As an evaluation without no_grad(): what its outputs hang on is freed with them."""

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor

    def pack(tensor):
        saved.append(ref(found := Saved(tensor.detach())))
        return found

    saved = []
    model, calls = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), ModelCalls()
    calls.begin_step([torch.optim.SGD(model.parameters(), 0.1)], 0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda found: found.tensor):
        model(torch.zeros(2, 4))
    calls.end_step()
    assert saved
    assert not any(one() for one in saved)


def test_what_a_backward_pass_calls_again_is_no_call_of_the_step():
    model, calls = Decoder(checkpointed=True), ModelCalls()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls.begin_step([optimizer], 0)
    model(IDS).sum().backward()
    calls.end_step()
    assert calls.count() == (float(OF_DECODER), "")
    # Forward, without the head, and a layer's last product, of which no gradient needs the result.
    again = 2 * B * S * LAYERS * 8 * D * D + LAYERS * 4 * B * S * S * D
    work = calls.work
    assert (work.again, work.flops) == (again, OF_DECODER + again)
    assert work.again_at.text.startswith("Decoder.forward(), test_flops.py:")


class Probe(nn.Module):
    """A trunk below a head."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(D, D, bias=False, dtype=dtype), nn.Linear(D, D, bias=False, dtype=dtype)
        )
        self.head = nn.Linear(D, D, bias=False)

    def forward(self, x):
        y = self.trunk(x)
        return self.head(y.float())


def worked(model, optimizer, call, between=lambda: None):
    """What is found in three steps."""
    calls = ModelCalls()
    for step in range(3):
        calls.begin_step([optimizer], step)
        call().sum().backward()
        calls.end_step()
        between()
        model.zero_grad()
    calls.count()
    return calls.work


PRODUCT = 2 * S * D * D


@pytest.mark.parametrize("is_one", [True, False], ids=["within", "before"])
def test_gradients_that_no_optimizer_reads(is_one):
    """Of two layers of a trunk: two for weights, one for what the first gave; and within a model also the one
    that the head gives the trunk."""
    model, x = Probe(), torch.zeros(S, D)
    optimizer = torch.optim.SGD(model.head.parameters(), 0.1)
    work = worked(model, optimizer, lambda: model(x) if is_one else model.head(model.trunk(x)))
    # The head's call alone tells no more than that its input has a gradient.
    assert (work.unread, work.flops) == ((4 if is_one else 3) * PRODUCT, 8 * PRODUCT)
    assert work.unread_at.function.endswith("Probe.forward" if is_one else "<lambda>")
    assert (work.unread_of, work.unread_num) == ("Probe.trunk" if is_one else "Sequential", 2)
    assert not work.unread_is_apart  # the head is called there, too


@pytest.mark.parametrize("needs_gradient", [False, True], ids=["of-data", "of-what-trains"])
def test_a_trunk_needs_no_graph_where_no_gradient_goes_through_it(needs_gradient):
    """What trains may lie before it: without a graph it would get no gradient."""
    model, x = Probe(), torch.zeros(S, D, requires_grad=needs_gradient)

    def call():
        features = model.trunk(x)
        return model.head(features)

    work = worked(model, torch.optim.SGD(model.head.parameters(), 0.1), call)
    assert work.unread
    assert work.unread_is_apart == (not needs_gradient)


def test_a_module_that_no_optimizer_has_is_counted_in_each_of_its_calls():
    """As of a loss that compares features of two images: of one a gradient goes on to what trains."""
    features, model, x = nn.Linear(D, D), nn.Linear(D, D), torch.zeros(S, D)
    call = lambda: features(model(x)) + features(x)  # noqa: E731
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), call)
    assert (work.unread, work.flops) == (2 * PRODUCT, 7 * PRODUCT)


@pytest.mark.parametrize("kind", ["frozen", "by hand", "trained"])
def test_gradients_that_are_read_are_not_needless(kind):
    model, x = Probe(), torch.zeros(S, D)
    if kind == "frozen":
        model.trunk.requires_grad_(False)
    optimizer = torch.optim.SGD((model if kind == "trained" else model.head).parameters(), 0.1)

    def by_hand():
        for parameter in model.trunk.parameters():
            parameter.data.sub_(0.1)

    assert worked(model, optimizer, lambda: model(x), by_hand if kind == "by hand" else int).unread == 0


@pytest.mark.parametrize("form", ["asked for", "of a layer before", "trained"])
def test_gradients_of_what_a_model_is_given(form):
    """That of a batch costs the first layer one product more."""
    model, x = Probe(), torch.zeros(S, D, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), *([x] if form == "trained" else [])], 0.1)
    given = (lambda: x.relu()) if form == "of a layer before" else lambda: x
    work = worked(model, optimizer, lambda: model(given()))
    assert work.inputs == (PRODUCT if form == "asked for" else 0)
    assert not work.inputs or work.inputs_at.function.endswith("<lambda>")


@pytest.mark.parametrize("form", ["to zero", "by hand", "to none", "added to"])
def test_gradients_that_are_set_to_zero_and_added_to(form):
    """In each step; where they are none, or hold something, nothing is done without need."""
    model, calls = nn.Linear(D, D), ModelCalls()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(S, D)).sum().backward()
    for step in range(3):
        calls.begin_step([optimizer], step)
        if form == "by hand":
            for one in model.parameters():
                one.grad.zero_()
        elif form != "added to":
            optimizer.zero_grad(set_to_none=form == "to none")
        loss = model(torch.ones(S, D)).square().sum()
        calls.backward_begins([loss], True)
        loss.backward()
        calls.end_step()
    calls.count()
    assert calls.work.zeroed_bytes == (4 * (D + 1) * D if form in ("to zero", "by hand") else 0)


def test_a_teacher_that_was_trained_before_gets_no_gradients():
    """It still has those of its own training."""
    teacher, student = nn.Linear(D, D), nn.Linear(D, D)
    teacher(torch.zeros(S, D)).sum().backward()
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    call = lambda: student(teacher(torch.zeros(S, D)).detach())  # noqa: E731
    assert worked(student, optimizer, call).unread == 0


def test_products_in_fp64_have_the_line_of_the_model_that_calls_them():
    model, x = Probe(torch.float64), torch.zeros(S, D, dtype=torch.float64)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(x))
    assert (work.fp64, work.flops) == (5 * PRODUCT, 8 * PRODUCT)
    assert work.fp64_at.function == "Probe.forward"


class FullPrecisionHead(Probe):
    def forward(self, x):
        y = self.trunk(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.head(y.float())


def test_products_outside_of_autocast_have_their_line():
    """The copy lies on a device that torch has no autocast for."""
    model, x = FullPrecisionHead(), torch.zeros(S, D)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(x))
    assert (work.fp32, work.flops) == (PRODUCT, 8 * PRODUCT)
    assert work.fp32_at.function == "FullPrecisionHead.forward"
    with torch.autocast("cpu", torch.bfloat16):
        assert model.head(x).dtype == torch.bfloat16


def test_autocast_of_other_threads_goes_on_while_work_is_counted():
    other, context, told = ThreadPoolExecutor(1), torch.autocast("cpu"), []

    class Beside(FullPrecisionHead):
        def forward(self, x):
            if x.is_meta:  # it is counted
                other.submit(lambda: (context.__exit__(None, None, None), use())).result()
            return super().forward(x)

    def use():
        told.append(torch.is_autocast_enabled("cpu"))
        with torch.autocast("cpu"):
            told.append(torch.is_autocast_enabled("cpu"))

    other.submit(context.__enter__).result()
    model, x = Beside(), torch.zeros(S, D)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(x))
    other.submit(use).result()
    assert told == [False, True] * 2
    assert work.fp32 == PRODUCT


class Attention(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.qkv = form, nn.Linear(D, 3 * D)

    def forward(self, x):
        q, k, v = self.qkv(x).view(B, S, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        if self.form.startswith("fused"):
            return F.scaled_dot_product_attention(q, k, v)
        scores = q @ k.transpose(-1, -2)
        if self.form == "softmax":
            return scores.softmax(-1) @ v
        return scores @ v  # linear attention needs its scores


class Exponential(nn.Sequential):
    def forward(self, x):
        return self[1](self[0](x).exp())


def test_what_lies_between_two_layers_are_no_scores_of_attention():
    model, x = Exponential(nn.Linear(D, D), nn.Linear(D, D)), torch.zeros(S, D)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(x))
    assert (work.scores_bytes, work.scores_at) == (0, None)


@pytest.mark.parametrize("form", ["softmax", "linear", "fused", "fused, not allowed"])
def test_scores_of_attention_that_pass_through_memory(form):
    """Read and written by softmax forward (2), backward (3), and by the six products of both passes."""
    model, x = Attention(form), torch.zeros(B, S, D)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kernels = [SDPBackend.MATH] if form == "fused, not allowed" else [*SDPBackend.__members__.values()][1:]
    with sdpa_kernel(kernels):
        work = worked(model, optimizer, lambda: model(x))
    entries = B * HEADS * S * S
    found = {"softmax": 11, "fused, not allowed": 11}.get(form, 0)
    assert work.scores_bytes == 4 * entries * found
    assert (work.scores_at is not None, work.scores_num) == ((found > 0), int(found > 0))


class Places(nn.Module):
    """Puts rows where indices say."""

    def __init__(self, way):
        super().__init__()
        self.way, self.table, self.index = way, nn.Parameter(torch.ones(8, D)), torch.arange(S) % 8

    def forward(self, x):
        if self.way == "interpolate":
            return nn.functional.interpolate(self.table.view(1, 1, 8, D), scale_factor=2, mode="bilinear")
        if self.way == "indexed":
            wider = torch.zeros(9, 4 * D)[self.index]  # of which no gradient is asked
            return self.table[self.index] + x + wider[:, :D]
        if self.way == "selected":
            return self.table.index_select(0, self.index) + x
        return self.table.index_add(0, self.index, x)


@pytest.mark.parametrize(
    ("way", "ordered", "indexed", "line"),
    [
        pytest.param("added", 4 * S * D, 0, "index_add", id="index_add"),
        pytest.param("selected", 4 * S * D, 0, "index_select", id="its-backward-pass"),
        pytest.param("indexed", 0, 4 * S * D, "table[self.index]", id="table-index"),
        pytest.param("interpolate", 4 * 4 * 16 * 2 * D, 0, "interpolate", id="four-corners"),
    ],
)
def test_what_deterministic_algorithms_bring_into_an_order(way, ordered, indexed, line):
    model, x = Places(way), torch.zeros(S, D)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.use_deterministic_algorithms(True)
    try:
        work = worked(model, optimizer, lambda: model(x))
    finally:
        torch.use_deterministic_algorithms(False)
    assert (work.ordered_bytes, work.indexed_bytes) == (ordered, indexed)
    at = work.ordered_at or work.indexed_at
    assert line in linecache.getline(__file__, at.line)


class Layers(nn.ModuleList):
    def forward(self, x):
        for layer in self:
            x = layer(x).transpose(1, 2).reshape(B, S, D)
        return x


def test_layers_whose_attention_is_not_fused_are_counted():
    forms, x = ["softmax", "fused", "softmax", "softmax"], torch.zeros(B, S, D)
    model = Layers(map(Attention, forms))
    assert worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(x)).scores_num == 3


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("scale", torch.ones(S))
        self.seen = torch.zeros(S)

    def forward(self, x, weights, writes=False):
        degrees = weights.sum(1) * self.scale
        if writes:
            self.seen += 1
        return (weights / degrees[:, None] + self.seen) @ self.linear(x)


@pytest.mark.parametrize("is_written", [False, True])
def test_what_a_model_holds_is_known_when_the_function_that_held_the_model_has_returned(is_written):
    def main():
        model, x, weights, calls = Graph(), torch.zeros(S, D), torch.ones(S, S), ModelCalls()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            calls.begin_step([optimizer], step)
            model(x, weights, writes=is_written and step == 1).sum().backward()
            calls.end_step()
        return calls

    calls = main()
    calls.count()
    of_another = 2 * S * S + S  # the second sum, of a matrix and what the model holds
    assert calls.work.unchanged_bytes == 4 * (3 * S * S + 5 * S + (0 if is_written else of_another))


@pytest.mark.parametrize("form", ["same", "new each time", "written to", "partly"])
def test_what_is_computed_from_nothing_that_changes(form):
    """Of matrices of S x S: one is read for the sum, one each is read and written for the division and the
    second sum, and rows of it."""
    model, x, weights = Graph(), torch.zeros(S, D), torch.ones(S, S)

    def call():
        if form == "written to":
            weights.add_(1)
        given = weights.clone() if form == "new each time" else weights
        return model(x, given, writes=form == "partly")

    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), call)
    of_sum, of_division, of_another = S * S + S, 2 * S * S + S, 2 * S * S + S
    found = {"same": of_sum + 3 * S + of_division + of_another, "partly": of_sum + 3 * S + of_division}
    assert work.unchanged_bytes == 4 * found.get(form, 0)
    assert not work.unchanged_bytes or work.unchanged_at.function == "Graph.forward"
    assert not work.unchanged_is_all  # the product there is of the model


class Looked(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.table = form, nn.Embedding(1000, D, sparse=form == "sparse")
        self.other = nn.Embedding(500, D) if form == "two in a line" else None

    def forward(self, ids):
        x = self.table(ids) if self.other is None else self.table(ids) + self.other(ids)
        return F.linear(x, self.table.weight) if self.form == "tied" else x * 2.0


@pytest.mark.parametrize(
    ("form", "num_rows"),
    [("dense", 1000 - B * S), ("two in a line", 1500 - 2 * B * S), ("sparse", 0), ("tied", 0)],
)
def test_gradients_of_rows_that_nobody_looks_up(form, num_rows):
    model = Looked(form)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(IDS))
    assert work.rows_bytes == 4 * D * num_rows
    num_looked_up = {"dense": B * S, "two in a line": 2 * B * S}.get(form, 0)
    assert (work.rows_looked_up, work.rows_looked_up_bytes) == (num_looked_up, 4 * D * num_looked_up)
    assert not num_rows or work.rows_at.function == "Looked.forward"


@pytest.mark.parametrize(
    "form",
    [
        *("after", "before", "in the next step", "another batch", "now and then"),
        *("with gradients", "with gradients, in the next step", "both of use"),
    ],
)
def test_a_batch_that_goes_forward_once_more_for_nothing_that_trains(form):
    model, optimizer = Probe(), torch.optim.SGD(Probe().parameters(), 0.1)
    optimizer.param_groups[0]["params"] = [*model.parameters()]
    calls, before = ModelCalls(), None
    for step in range(3):
        x = torch.zeros(S, D)
        calls.begin_step([optimizer], step)
        if form == "before":
            measured(model, x)
        if form.endswith("in the next step") and step:
            measured(model, before, "with" in form)
        loss = (model(x) + model(x) if form == "both of use" else model(x)).sum()
        calls.backward_begins([loss], True)
        loss.backward()
        if form == "with gradients":
            measured(model, x, True)
        if form == "after" or (form == "now and then" and step == 0):
            measured(model, x)
        if form == "another batch":
            measured(model, torch.zeros(S, D))
        calls.end_step()
        before = x
    calls.count()
    found = form in ("after", "before") or form.startswith("with") or form.endswith("in the next step")
    assert calls.work.twice == (3 * PRODUCT if found else 0)
    assert not found or calls.work.twice_at.function == "measured"


@pytest.mark.parametrize(
    ("lengths", "columns"),
    [
        ([5, 6, 7, 8], (5, 8)),
        ([5, 5, 5, 5], (5, 5)),
        ([5, 6, 7], None),  # too few
        ([5, 1, 1, 1], (5, 1)),  # with a cache
        ([5, 1, 1, 2], None),
        ([5, 6, 6, 8], None),
        ([], None),
    ],
)
@pytest.mark.parametrize("form", ["before", "behind", "in every second step"])
def test_calls_without_gradients_before_the_one_that_trains(lengths, columns, form):
    model = Probe()
    optimizer, calls = torch.optim.SGD(model.parameters(), 0.1), ModelCalls()
    for step in range(6):
        calls.begin_step([optimizer], step)
        for when in ("before", "behind"):
            if form == when or (form.startswith("in") and when == "before" and step % 2):
                for length in lengths:
                    measured(model, torch.zeros(2, length, D))
            if when == "before":
                loss = model(torch.zeros(2, 9, D)).sum()
                calls.backward_begins([loss], True)
                loss.backward()
        calls.end_step()
    calls.count()
    quiet = calls.work.quiet
    assert (quiet and quiet.columns) == (columns if form == "before" else None)
    assert quiet is None or (quiet.num, quiet.at.function) == (4, "measured")


@pytest.mark.parametrize("form", ["on few rows each", "one after the other"])
def test_calls_of_the_model_in_a_step(form):
    """Of what each is given another's result they are no calls on few rows."""
    model, calls = nn.Linear(D, D), ModelCalls()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        calls.begin_step([optimizer], step)
        y = torch.zeros(2, D)
        for rows in (2, 2, 5):
            y = model(torch.zeros(rows, D) if form == "on few rows each" else y)
        calls.end_step()
    calls.count()
    found = calls.work.calls
    assert (found is None) == (form != "on few rows each")
    if found is None:
        return
    assert (found.num, found.rows) == (3, 3)
    assert found.parameter_bytes == 4 * (D + 1) * D
    assert found.operators >= 3
    assert found.at.function == "test_calls_of_the_model_in_a_step"


@pytest.mark.parametrize("of", ["lightning.fabric", "the model", "another"])
def test_a_step_that_goes_through_forward_and_calls_the_model_within(of):
    """As Lightning sends it through DDP. A forward of others is noted as the model's own."""
    model = Probe()
    optimizer, calls, own = torch.optim.SGD(model.parameters(), 0.1), ModelCalls(), model.forward

    def step_instead(x):
        model.forward = own
        loss = model(x).sum()
        measured(model, x)
        return loss

    step_instead.__module__ = of
    for step in range(3):
        x = torch.zeros(S, D)
        calls.begin_step([optimizer], step)
        model.forward = own if of == "the model" else step_instead
        model(x).sum().backward()
        calls.end_step()
    flops, _ = calls.count()
    assert (
        flops == 8 * PRODUCT
    )  # three products forward and twice backward, but that the input has no gradient
    assert calls.work.twice == (3 * PRODUCT if of == "lightning.fabric" else 0)


@pytest.mark.parametrize(
    ("again", "is_one"),
    [
        pytest.param(lambda ids: ids[:, :-1], True, id="the-same-view"),
        pytest.param(lambda ids: ids[:, 1:], False, id="another-view"),
        pytest.param(lambda ids: ids.add_(1)[:, :-1], False, id="written-to-between"),
    ],
)
def test_views_of_a_batch_are_made_anew_for_each_call(again, is_one):
    ids = torch.zeros(S, D)
    first = held(ids[:, :-1])
    assert _is(first, again(ids)) == is_one


def measured(model, x, has_gradients=False):
    with torch.set_grad_enabled(has_gradients):
        return model(x).mean()


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([[5, 3, 0, 0], [7, 0, 0, 0]], (3 / 8, 1 / 4)),  # one of each may be a token that ends rows
        ([[0, 0, 3, 5], [0, 0, 0, 7]], (3 / 8, 1 / 4)),
        ([[5, 3, 2, 1], [7, 0, 0, 0]], (2 / 8, 0.0)),
        ([[0, 0, 0, 0], [0, 0, 0, 0]], (0.0, 0.0)),  # there are no tokens
        ([[[5.0], [3.0], [0.0], [0.0]], [[7.0], [0.0], [0.0], [0.0]]], (3 / 8, 1 / 4)),
        ([[[5.0], [5.0], [5.0]], [[5.0], [5.0], [5.0]]], (0.0, 0.0)),  # of what is no zero none
        ([[[5.0], [0.0], [0.0]], [[5.0], [0.0], [0.0]]], (0.0, 0.0)),  # what a decoder fills in
    ],
)
def test_tokens_that_only_fill_rows_up(rows, found):
    batches = NeedlessBatches()
    batches.is_table(torch.tensor(rows))
    assert batches.padding() == pytest.approx(found)


class Issued(TorchDispatchMode):
    """Names of collectives, and of operators on DTensors."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        of_all = func.namespace in ("c10d", "_c10d_functional")
        if of_all or any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.heavy
def test_rank_0_alone_issues_nothing_on_the_programs_dtensors():
    """It may be a collective, in which it would wait for good: other ranks note no calls of modules."""

    def issued(watches):
        model = distribute_module(nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)), mesh)
        unread = distribute_module(nn.Linear(D, D), mesh)
        x = distribute_tensor(torch.ones(B, S, D), mesh, [Shard(0)])
        optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
        calls = ModelCalls()
        with Issued() as mode:
            for step in range(2):
                if watches:
                    calls.begin_step([optimizer], step)
                with torch.no_grad():
                    model(x)
                loss = unread(model(x)).sum()
                for parameter in model.parameters():
                    loss = loss + parameter.abs().sum()
                for _ in range(2):
                    if watches:
                        calls.backward_begins([loss], True)
                    loss.backward(retain_graph=True)
                if watches:
                    calls.end_step()
                    census(torch.device("cpu"))
                optimizer.step()
            if watches:
                calls.count()
                calls.batch()
        return mode.names

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        own = issued(False)
        assert len(own) > 50
        assert issued(True) == own
    finally:
        dist.destroy_process_group()


def test_copies_that_lines_of_the_program_ask_for():
    """Not of what lies as it should; nothing is left behind."""
    model, x = nn.Linear(D, D), torch.zeros(D, S)

    def call():
        rows = x.t().contiguous().contiguous()  # one
        rows = rows.t().reshape(-1).reshape(D, S).t()  # and one
        rows.flatten()  # and one
        torch.zeros(1, 2, 4, 4).to(memory_format=torch.channels_last)  # and one
        wide = torch.zeros(D, dtype=torch.float64)
        wide.float(), wide.to(torch.bfloat16), wide.to(torch.float64), torch.zeros(D).float()
        torch.vmap(lambda one: one.t().contiguous().sum())(torch.zeros(2, 3, 4))  # which shows no memory
        return model(rows.to(torch.float32).reshape(S, D).float())

    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), call)
    assert (work.copies, work.copies_at.is_program) == (4, True)
    assert (work.narrowed_bytes, work.narrowed_at.is_program) == (2 * 8 * D, True)
    assert not {"contiguous", "reshape", "flatten", "to", "float"} & set(vars(torch.Tensor))


def test_dropout_of_what_never_changes_draws_anew():
    """What it makes to be filled moves nothing."""
    model, x = nn.Sequential(nn.Dropout(0.5), nn.Linear(D, D)), torch.zeros(B, D)
    optimizer, calls = torch.optim.SGD(model.parameters(), 0.1), ModelCalls()
    for step in range(3):
        calls.begin_step([optimizer], step)
        model(x)
        calls.end_step()
    calls.count()
    assert (calls.work.unchanged, calls.work.unchanged_bytes) == (0, 0)


def test_a_step_of_many_different_calls_has_no_count():
    model, calls = nn.Linear(4, 4), ModelCalls()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls.begin_step([optimizer], 0)
    for size in range(1, 20):
        model(torch.zeros(size, 4))
    calls.end_step()
    assert calls.count() == (None, "a step calls modules in more than 8 different ways")


def test_a_step_leaves_nothing_behind():
    """Neither in torch, nor in the model and its random numbers."""
    before = nn.Module.__call__
    torch.manual_seed(0)
    random.seed(0)
    model = Decoder()
    expected = torch.random.get_rng_state(), random.getstate(), model.head.weight.detach().clone()
    calls = ModelCalls()
    calls.begin_step([torch.optim.SGD(model.parameters(), 0.1)], 0)
    assert nn.Module.__call__ is not before
    model.eval()(IDS)
    calls.end_step()
    assert nn.Module.__call__ is before
    calls.count()
    assert torch.equal(torch.random.get_rng_state(), expected[0])
    assert random.getstate() == expected[1]
    assert torch.equal(model.head.weight, expected[2])
    assert not model.head._forward_hooks
    assert all(parameter.device.type == "cpu" and parameter.grad is None for parameter in model.parameters())


@pytest.mark.filterwarnings("error")
def test_a_copy_is_not_searched_for_anomalies():
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        calls = noted(nn.Linear(4, 4), torch.zeros(2, 4))
        assert calls.count() == (2 * 2 * 4 * 4 * 2, "")
        assert torch.is_anomaly_enabled()


def test_a_profiler_with_stacks_may_begin_in_a_step_that_is_noted():
    """It reads a local of the frame of Module.__call__ by its name: without that the process dies."""
    model, calls = nn.Linear(4, 4), ModelCalls()
    calls.begin_step([torch.optim.SGD(model.parameters(), 0.1)], 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True):
        model(torch.zeros(2, 4)).sum().backward()
    calls.end_step()
    assert calls.count() == (2 * 2 * 4 * 4 * 2, "")


def test_a_module_that_trains_nothing_is_no_model():
    calls, optimizer = ModelCalls(), torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    calls.begin_step([optimizer], 0)
    nn.Linear(4, 4)(torch.zeros(2, 4))
    calls.end_step()
    assert calls.count() == (None, NO_CALL)


def test_without_an_optimizer_there_is_no_count():
    assert ModelCalls().count() == (None, NO_OPTIMIZER)


def test_hooks_of_the_model_are_not_run_by_the_copy():
    model, ran = nn.Linear(4, 4), []
    model.register_forward_hook(lambda *_: ran.append(1))
    assert counted(model, torch.zeros(2, 4)) == 2 * (2 * 2 * 4 * 4)
    assert ran == []


def test_a_wrapped_forward_is_that_of_the_class():
    """As accelerate wraps it for autocast: the wrapper holds the model's own method."""
    model = nn.Linear(4, 4)
    inner = model.forward
    model.forward = lambda x: inner(x)
    assert counted(model, torch.zeros(2, 4)) == 2 * (2 * 2 * 4 * 4)


class Autocasts(nn.Module):
    """The model enters autocast itself, or a wrapper of its forward does, but for a part of it."""

    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)), nn.Linear(D, D)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.trunk(x)
        return self.head(y.float())


def wrapped_in_autocast():
    model = nn.Sequential(Decoder())
    model[0].forward = torch.autocast("cpu", torch.bfloat16)(model[0].forward)
    return model


@pytest.mark.parametrize(
    ("model", "given", "precision"),
    [
        (Decoder(), IDS, "fp32"),
        (wrapped_in_autocast(), IDS, "bf16"),
        (Autocasts(), torch.zeros(S, D), "bf16"),
        (Decoder().to(torch.float16), IDS, "fp16"),
    ],
    ids=["nothing", "a wrapper", "the model itself, for most of it", "parameters"],
)
def test_the_precision_is_that_of_most_weights_where_they_are_used(model, given, precision):
    """Of the peak rate that MFU divides by: 15 times as high in bf16 as in fp32."""
    assert noted(model, given).precision == precision


def test_tied_parameters_stay_tied():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    copy = copy_without_data(model)
    assert copy[1].weight is copy[0].weight


def meshed(model: nn.Linear, names, placement, shape=(2,)) -> nn.Linear:
    """With a weight as DTensors are."""
    mesh = SimpleNamespace(mesh_dim_names=names, shape=shape, ndim=len(shape), size=lambda: shape[-1])
    model.weight.device_mesh, model.weight.placements = mesh, (placement,)
    return model


@pytest.mark.parametrize(
    ("names", "placement", "reason"),
    [
        (("cp",), Replicate(), "ranks of the axis cp share the work of one model"),
        (("dp", "ep"), Shard(0), "ranks of the axis ep share the work of one model"),
        (None, Shard(0), "weight is sharded over a mesh without names"),
        (None, Replicate(), ""),
        (("dp",), Shard(0), ""),
    ],
)
def test_ranks_that_share_a_model_otherwise_have_neither_flops_nor_a_batch(names, placement, reason):
    shape = (2,) * len(names) if names else (2, 2)
    calls = noted(meshed(nn.Linear(4, 4), names, placement, shape), torch.zeros(5, 4))
    assert calls.batch()[0] == (None if reason else 5)
    assert calls.batch()[2].startswith(reason)
    assert calls.count()[1].startswith(reason)


@pytest.mark.parametrize(("names", "shape"), [(None, (2,)), (("mp",), (2,)), (("dp", "tp"), (3, 2))])
def test_ranks_of_a_tensor_axis_have_their_part_of_flops_and_batch(names, shape):
    calls = noted(meshed(nn.Linear(4, 4), names, Shard(0), shape), torch.zeros(6, 4))
    assert calls.batch()[0] == 3
    assert calls.count() == (2 * (2 * 6 * 4 * 4) / 2, "")
    odd = noted(meshed(nn.Linear(4, 4), names, Shard(0), shape), torch.zeros(5, 4))
    assert odd.batch() == (None, None, "2 ranks share a batch of 5")


def test_a_model_that_torch_makes_parallel_by_tensors_has_half_the_flops_on_each_of_two_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = Decoder()
        plan = {
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
            "head": ColwiseParallel(),
        }
        parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
        calls = noted(model, IDS)
        assert calls.count() == (OF_DECODER / 2, "")
        assert calls.batch()[1] == B * S // 2
    finally:
        dist.destroy_process_group()


def test_fsdp_may_shard_over_a_mesh_without_names():
    """Its default one. fully_shard gives modules a class of these bases."""
    model = nn.Sequential(meshed(nn.Linear(4, 4), None, Shard(0)))
    model.__class__ = type("FSDPSequential", (type("FSDPModule", (), {}), nn.Sequential), {})
    assert noted(model, torch.zeros(5, 4)).batch() == (5, None, "")


class FullyShardedDataParallel(nn.Sequential):
    """Of that name, by which FSDP1 is known."""


@pytest.mark.parametrize("model", [TakesSparse(4, 4), FullyShardedDataParallel(nn.Linear(4, 4))])
def test_the_batch_is_known_where_the_flops_are_not(model):
    calls = noted(model, torch.zeros(2, 4), times=2)
    assert calls.count()[0] is None
    assert calls.batch() == (4, None, "")


class Recommender(nn.Module):
    """An embedding for each of four categories."""

    def __init__(self):
        super().__init__()
        self.tables, self.out = nn.ModuleList(nn.Embedding(9, 4) for _ in range(4)), nn.Linear(16, 1)

    def forward(self, categories, numbers=None):
        return self.out(torch.cat([table(categories[:, i]) for i, table in enumerate(self.tables)], 1))


def batch_of(modules, step, num_steps=3):
    """What is found of steps(number) that call these modules; those that are asked for are noted."""
    calls = ModelCalls()
    optimizer = torch.optim.SGD([p for one in modules for p in one.parameters()], 0.1)
    for number in range(num_steps):
        if is_asked_for := calls.wants(number):
            calls.begin_step([optimizer], number)
        step(number)
        if is_asked_for:
            calls.end_step()
    return calls.batch()


DECODER, LINEAR, CRITIC = Decoder(), nn.Linear(4, 4), nn.Linear(4, 1)


def as_a_generator_and_its_critic(_):
    made = LINEAR(torch.zeros(5, 4))
    for rows in (torch.zeros(5, 4), made.detach(), made):
        CRITIC(rows)


@pytest.mark.parametrize(
    ("modules", "step", "found"),
    [
        pytest.param([DECODER], lambda _: DECODER(IDS), (None, B * S, ""), id="tokens"),
        pytest.param([DECODER], lambda _: [DECODER(ids=IDS) for _ in "ab"], (None, 2 * B * S, ""), id="two"),
        pytest.param([LINEAR], lambda _: LINEAR(torch.zeros(5, 4)), (5, None, ""), id="rows"),
        pytest.param([LINEAR, CRITIC], as_a_generator_and_its_critic, (5, None, ""), id="critic"),
        pytest.param(
            [model := Recommender()],
            lambda _: model(torch.zeros(6, 4, dtype=torch.long)),
            (6, None, ""),
            id="categories-are-no-tokens",
        ),
        pytest.param([LINEAR], lambda i: LINEAR(torch.zeros(i + 1, 4)), (None, None, UNLIKE), id="unlike"),
        pytest.param([LINEAR], lambda _: None, (None, None, NO_CALL), id="no-call"),
    ],
)  # fmt: skip
def test_the_batch_is_told_by_what_the_model_is_called_with(modules, step, found):
    assert batch_of(modules, step) == found


def test_a_batch_that_grows_later_is_noticed():
    """As a ramp grows it, of 60 steps."""
    for grown in (3, 8, 40):
        found = batch_of([LINEAR], lambda i, at=grown: LINEAR(torch.zeros(4 if i < at else 64, 4)), 60)
        assert found == (None, None, UNLIKE)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        pytest.param(lambda step: 4 if step < 40 else 64, (None, UNLIKE), id="a-ramp"),
        pytest.param(lambda step: 2 if step % 15 == 6 else 4, 4, id="a-shorter-last-batch"),
        pytest.param(lambda step: 4 + step % 7, (None, UNLIKE), id="lengths-that-vary"),
    ],
)
def test_flops_are_not_those_of_one_step_where_batches_differ(rows, found):
    """An epoch of 15 steps ends at one of the steps that are looked at."""
    calls, optimizer = ModelCalls(), torch.optim.SGD(LINEAR.parameters(), 0.1)
    for number in range(60):
        if calls.wants(number):
            calls.begin_step([optimizer], number)
            LINEAR(torch.zeros(rows(number), 4, requires_grad=True))
            calls.end_step()
    if found == 4:
        assert calls.batch() == (4, None, "")
        assert calls.count()[0] == 3 * 2 * 4 * LINEAR.weight.numel()
    else:
        assert calls.count() == found


def test_alike_batches_are_looked_at_ever_less_often():
    calls, optimizer, noted_steps = ModelCalls(), torch.optim.SGD(LINEAR.parameters(), 0.1), []
    for number in range(1000, 11000):
        if calls.wants(number):
            noted_steps.append(number - 1000)
            calls.begin_step([optimizer], number)
            LINEAR(torch.zeros(4, 4))
            calls.end_step()
    assert noted_steps[:7] == [0, 1, 2, 3, 4, 6, 9]
    assert len(noted_steps) < 30
    assert calls.batch() == (4, None, "")


def test_a_step_that_was_cut_short_says_nothing_of_the_batch():
    calls, optimizer = ModelCalls(), torch.optim.SGD(LINEAR.parameters(), 0.1)
    for number, rows in enumerate((4, 4, 4, 1)):
        calls.begin_step([optimizer], number)
        LINEAR(torch.zeros(rows, 4))
        calls.end_step(is_whole=rows == 4)
    assert calls.batch() == (4, None, "")


class Growing(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.linear = form, nn.Linear(D, D)

    def forward(self, x):
        rows = [self.linear(x) for _ in range(LONG)]
        if self.form == "at once":
            return torch.cat(rows)
        grown = rows[0]
        for row in rows[1:]:
            row = row + grown.mean() if self.form == "read each time" else row
            grown = torch.cat([grown, row])
        return grown


LONG = 20


@pytest.mark.parametrize("form", ["part by part", "at once", "read each time"])
def test_a_tensor_that_grows_in_a_loop(form):
    """What the second and later calls of torch.cat read again: 2 to 19 parts of one row."""
    model, x = Growing(form), torch.zeros(1, D)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(x))
    again = 2 * sum(range(2, LONG)) * 4 * D
    assert work.grown_bytes == (again if form == "part by part" else 0)
    assert not work.grown_bytes or work.grown_at.function == "Growing.forward"


class OneHot(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.weight = form, nn.Parameter(torch.zeros(VOCABULARY, D))

    def forward(self, ids):
        if self.form == "eye":
            return torch.eye(VOCABULARY)[ids] @ self.weight
        rows = F.one_hot(ids, VOCABULARY).float()
        return rows @ self.weight if self.form == "one_hot" else (rows + 0.1).softmax(-1) @ self.weight


@pytest.mark.parametrize("form", ["one_hot", "eye", "smoothed"])
def test_a_product_that_looks_rows_up(form):
    """Forward, and for the gradient of the weights."""
    model = OneHot(form)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(IDS))
    assert work.one_hot == (0 if form == "smoothed" else 2 * 2 * B * S * VOCABULARY * D)
    assert (work.one_hot_at is None) == (form == "smoothed")
    assert work.model_at.outer_function == "test_a_product_that_looks_rows_up"


class Asked(nn.Module):
    """Each round of its loop asks for what it computes of x."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.layer, self.drop = nn.Linear(D, D, bias=False), nn.Dropout(0.1)
        self.norm, self.others = nn.BatchNorm1d(S), nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def encode(self, x, number):
        if self.form == "of what was drawn":
            x = self.drop(x)
        elif self.form == "normalized":
            x = self.norm(x)
        elif self.form == "of other numbers":
            x = x * number
        elif self.form == "written meanwhile":
            x = x.clone().add_(number + 1)
        layer = self.others[number] if self.form == "by other weights" else self.layer
        return layer(x) + torch.rand_like(x) if self.form == "a part of it" else layer(x)

    def forward(self, x):
        x, total = x + 1, 0
        encoded = self.encode(x, 0)
        for number in range(3):
            encoded = encoded if self.form == "once" else self.encode(x, number)
            total = total + torch.sigmoid(encoded * (number + 1))
        return total


FORMS = ("of what was drawn", "of other numbers", "written meanwhile", "by other weights", "once")


@pytest.mark.parametrize("form", ["the same", "normalized", "a part of it", *FORMS])
def test_what_a_pass_computes_once_more_from_the_same(form):
    model = Asked(form)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(torch.rand(B, S, D)).sum())
    product = 2 * B * S * D * D
    if form in ("the same", "normalized", "a part of it"):  # three of four
        assert work.repeated == 3 * (3 if form == "normalized" else 2) * product
        assert work.repeated_at.function == ("Asked.encode" if form == "a part of it" else "Asked.forward")
        assert 0 < work.repeated_launched < 3 / 4
        assert (work.repeated_bytes > 0) == (form == "normalized")
    elif form in ("of other numbers", "written meanwhile", "by other weights"):
        assert work.repeated == 2 * product  # the first round is as before the loop
    else:
        assert work.repeated == work.repeated_bytes == work.repeated_launched == 0


class Pairs(nn.Module):
    """Joins rows of S objects in pairs, or of the ends of as many edges, and multiplies these."""

    def __init__(self, form):
        super().__init__()
        self.form, self.inner = form, nn.Linear(D, D, bias=False)
        self.layer = nn.Linear(S * D if form == "windows" else 2 * D, D, bias=False)
        self.ends = torch.randint(S, (2, S * S))

    def forward(self, x):
        x = self.inner(x)[0]
        first, second = x.unsqueeze(1), x.unsqueeze(0)
        if self.form == "expanded":
            pairs = torch.cat([first.expand(S, S, D), second.expand(S, S, D)], -1)
        elif self.form == "repeated":
            pairs = torch.cat([first.repeat(1, S, 1), second.repeat(S, 1, 1)], -1)
        elif self.form == "edges":
            pairs = torch.cat([x[self.ends[0]], x.index_select(0, self.ends[1])], -1)
        elif self.form == "behind each other":
            rows = torch.cat([first.expand(S, S // 2, D), first.expand(S, S // 2, D)], 1)
            pairs = torch.cat([rows, rows], -1)
        elif self.form == "written to":
            pairs = torch.cat([first.expand(S, S, D), second.expand(S, S, D)], -1)
            pairs[:, :, :D] = first - second
        elif self.form == "one side":
            pairs = torch.cat([first.expand(S, S, D), (first - second)], -1)
        elif self.form == "differences":
            pairs = torch.cat([first - second, first * second], -1)
        elif self.form == "windows":  # of which each is another row
            pairs = x[self.ends[0]].view(S, S * D)
        elif self.form == "few edges":
            pairs = torch.cat([x[self.ends[0, :S]], x[self.ends[1, :S]]], -1)
        return self.layer(pairs)


PAIRS = {
    "expanded": 1 - 1 / S,
    "behind each other": 1 - 2 / S,
    "repeated": 1 - 1 / S,
    "edges": 1 - 1 / S,
    "one side": (1 - 1 / S) / 2,
}


@pytest.mark.parametrize("form", [*PAIRS, "differences", "windows", "few edges", "written to"])
def test_products_of_rows_that_were_repeated_before(form):
    """In both passes."""
    model = Pairs(form)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(torch.rand(1, S, D)))
    assert work.spread == pytest.approx(PAIRS.get(form, 0.0) * 3 * 2 * S * S * 2 * D * D)
    assert not work.spread or work.spread_at.function == "Pairs.forward"


class Maps(nn.Module):
    """Joins what is known of each place with what is known of all, and multiplies both."""

    def __init__(self, form):
        super().__init__()
        self.form, self.inner = form, nn.Conv1d(D, D, 1, bias=False)
        num, padding = (3, 1) if form == "of three places" else (1, int(form == "with a border"))
        self.layer = nn.Conv1d(4 * D, D, num, padding=padding, bias=False)

    def forward(self, x):
        x = self.inner(x)
        if self.form == "of places":
            return self.layer(torch.cat([x, x, x, x], 1))
        of_all = x.amax(2, keepdim=True).repeat(1, 3, 1)
        if self.form == "normalized":
            return self.layer(torch.cat([x, of_all.expand(-1, -1, S) - x.repeat(1, 3, 1)], 1))
        joined = torch.cat([x, of_all.expand(-1, -1, S)], 1)
        if self.form == "written to":
            joined += self.inner.weight[0, :1]
        return self.layer(joined)


@pytest.mark.parametrize(
    ("form", "part"),
    [
        ("expanded", 3 / 4 * (1 - 1 / S)),
        *(
            (form, 0.0)
            for form in ("of places", "of three places", "normalized", "written to", "with a border")
        ),
    ],
)
def test_convolutions_of_one_place_multiply_what_is_the_same_at_all(form, part):
    """In both passes."""
    model = Maps(form)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(torch.rand(2, D, S)))
    assert work.spread == pytest.approx(part * 3 * 2 * 2 * S * 4 * D * D)
    assert not part or work.spread_at.function == "Maps.forward"


class Unfolded(nn.Module):
    """Multiplies the columns of its images."""

    def __init__(self, form):
        super().__init__()
        self.form, self.weight = form, nn.Parameter(torch.randn(4, 27))

    def forward(self, x):
        columns = F.unfold(x, 3, padding=1)
        if self.form == "attention":  # by what is computed of the images
            return columns.mean(2, keepdim=True).transpose(1, 2) @ columns * self.weight.sum()
        weight = F.normalize(self.weight) if self.form == "computed" else self.weight
        return F.linear(columns.transpose(1, 2), weight) if self.form == "linear" else weight @ columns


@pytest.mark.parametrize("form", ["given", "computed", "linear", "attention"])
def test_convolutions_that_are_made_of_columns(form):
    """Columns of 27 for 64 places, in a pass forward, and for the weights."""
    model = Unfolded(form)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    work = worked(model, optimizer, lambda: model(torch.rand(B, 3, 8, 8)).sum())
    if form == "attention":
        assert work.unfolded == 0
        return
    assert work.unfolded == 2 * 2 * B * 4 * 27 * 64
    assert work.unfolded_bytes >= 2 * 4 * B * (27 + 3) * 64
    assert work.unfolded_at.function == "Unfolded.forward"


class OverEdges(nn.Module):
    """Rows of a table, of which each is the sum of its neighbours' rows, twice."""

    def __init__(self, graphs, form):
        super().__init__()
        self.form, self.table = form, nn.Embedding(S, D)
        self.register_buffer("first", graphs[0])
        self.graphs = [self.first, graphs[1]]

    def spread(self, graph):
        return torch.sparse.mm(graph, torch.sparse.mm(graph, self.table.weight))

    def forward(self, users, items):
        first = self.spread(self.graphs[0])
        second = first if self.form == "once" else self.spread(self.graphs[self.form == "of two graphs"])
        return (first[users] * second[items]).sum(1)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("form", ["once", "twice", "of two graphs"])
def test_products_of_sparse_matrices_that_the_program_holds(form, layout):
    """Each entry is multiplied with a row, forward and backward."""
    graphs = [(torch.rand(S, S) < 0.2).float().to_sparse(layout=layout) for _ in range(2)]
    model, ids = OverEdges(graphs, form), torch.randint(S, (2, B))
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(*ids.clone()).sum())
    of_graph = [2 * 2 * 2 * D * graph._nnz() for graph in graphs]
    called = {"once": of_graph[:1], "twice": 2 * of_graph[:1], "of two graphs": of_graph}[form]
    assert work.flops == sum(called)
    assert work.repeated == (of_graph[0] if form == "twice" else 0)


class Chosen(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.layer = form, nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, x):
        y = self.layer(x)
        if self.form == "all, in parts":
            return y[:, : S // 2], y[:, S // 2 :]
        if self.form == "by numbers":
            return y[:, torch.zeros(1, dtype=torch.long)], y[:, torch.ones(S - 1, dtype=torch.long)]
        y = y + 1 if self.form == "the last of a sum" else y
        return y[:, -1] if self.form.startswith("the last") else y


@pytest.mark.parametrize("form", ["the last", "the last of a sum", "all", "all, in parts", "by numbers"])
def test_a_product_of_which_a_part_is_read(form):
    """Forward, and for the gradients of the input and of the weights."""
    model, x = Chosen(form), torch.zeros(B, S, D, requires_grad=True)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: sum(map(torch.sum, model(x))))
    assert work.unused == (3 * 2 * B * (S - 1) * D * VOCABULARY if form.startswith("the last") else 0)
    assert not work.unused or work.unused_at.function == "Chosen.forward"


@pytest.mark.parametrize(
    ("choose", "part"),
    [
        (lambda y: [y[:, -1]], 1 / S),
        (lambda y: [y[:, -2:, :]], 2 / S),
        (lambda y: [y[torch.arange(B * S).reshape(B, S) % 4 == 0]], 1 / 4),
        (lambda y: [y[:, 0], y[:, 1]], 2 / S),  # by two passes
        (lambda y: [y.relu()[:, -1]], 1.0),
        (lambda y: [y], 1.0),
    ],
    ids=["the last", "a stretch", "by a mask", "two losses", "behind another", "all"],
)
def test_a_product_of_which_the_loss_takes_a_part(choose, part):
    model, calls = Chosen("all"), ModelCalls()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        calls.begin_step([optimizer], step)
        losses = [one.sum() for one in choose(model(torch.zeros(B, S, D)))]
        for loss in losses:
            calls.backward_begins([loss], True)
            loss.backward(retain_graph=True)
        calls.end_step()
    calls.count()
    assert calls.work.unused == pytest.approx((1 - part) * 2 * 2 * B * S * D * VOCABULARY)


class Masked(nn.Module):
    """The loss is within, as in libraries of language models; with the logits, where these are returned."""

    def __init__(self, form):
        super().__init__()
        self.form, self.layer = form, nn.Linear(D, VOCABULARY)

    def forward(self, x, targets):
        y = self.layer(x)
        if self.form == "convolved":
            return F.cross_entropy(F.conv1d(x.mT, self.layer.weight[:, :, None]).mT.flatten(0, 1), targets)
        loss = F.cross_entropy(y.view(-1, VOCABULARY).float(), targets)
        if self.form in ("accuracy", "predictions", "of one class", "predictions given"):
            found = y.argmax(-1).view(-1)
            accuracy = (found == (x[0, 0, 0] if self.form == "predictions" else targets)).float().mean()
            loss = loss + 0 * accuracy
            if self.form == "of one class":
                loss = loss + 0 * (found == 3).float().mean()
            return (loss, found) if self.form == "predictions given" else loss
        probabilities = y.log_softmax(-1)
        return loss if self.form != "entropy" else loss - (probabilities.exp() * probabilities).sum()


@pytest.mark.parametrize("form", ["within", "accuracy", "behind", "behind a checkpoint"])
def test_a_product_for_targets_that_the_loss_ignores(form):
    """Three of four positions: forward, and for the gradients of the weights and of the input."""
    model, calls, x = Masked(form), ModelCalls(), torch.zeros(B, S, D, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    targets, num_calls = torch.where(torch.arange(B * S) % 4 == 0, 1, -100), []

    def loss_of(logits):
        num_calls.append(1)
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets)

    for step in range(3):
        calls.begin_step([optimizer], step)
        if form in ("within", "accuracy"):  # which compares with the same targets
            loss = model(x, targets)
        elif form == "behind":
            loss = loss_of(model.layer(x))
        else:
            loss = checkpoint(loss_of, model.layer(x), use_reentrant=False)
        calls.backward_begins([loss], True)
        assert len(num_calls) in (0, step + 1)  # to look at what is kept computes nothing again
        calls.end_step()
    calls.count()
    is_known = form != "behind a checkpoint"
    assert calls.work.unused == (3 * 2 * B * S * D * VOCABULARY * 3 / 4 if is_known else 0)
    assert calls.work.ignored == (3 / 4 if is_known else 0)


@pytest.mark.parametrize(
    "form", ["predictions", "of one class", "predictions given", "entropy", "convolved", "all count"]
)
def test_a_product_is_needed_where_its_positions_are_read_otherwise(form):
    model, calls, x = Masked(form), ModelCalls(), torch.zeros(B, S, D)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    targets = torch.where(torch.arange(B * S) % 4 == 0, 1, 2 if form == "all count" else -100)
    for step in range(3):
        calls.begin_step([optimizer], step)
        given = model(x, targets)
        calls.backward_begins([given[0] if isinstance(given, tuple) else given], True)
        calls.end_step()
    calls.count()
    assert calls.work.unused == 0


class Neighbours(nn.Module):
    def __init__(self, num_of_each):
        super().__init__()
        self.layer, rows = nn.Linear(D, D), torch.zeros(1000, 1000)
        rows[:, :num_of_each] = 1
        self.register_buffer("rows", rows)

    def forward(self, x):
        return (self.rows / 2) @ self.layer(x)


@pytest.mark.parametrize("num_of_each", [5, 50])
def test_a_product_with_a_matrix_of_zeros(num_of_each):
    """Forward, and for the gradient of what it is multiplied with; each entry counts ten times."""
    model, x = Neighbours(num_of_each), torch.zeros(1000, D)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(x))
    assert work.zeros == (pytest.approx(0.95 * 2 * 2 * 1000 * 1000 * D) if num_of_each == 5 else 0)
    assert not work.zeros or work.zeros_at.function == "Neighbours.forward"


@pytest.mark.parametrize(
    "form",
    [
        *("each loss", "their sum", "set back between", "stepped between", "two models", "of the gradient"),
        "a graph each",
    ],
)
def test_backward_passes_through_the_same_operators(form):
    """A trunk of two layers below two heads: the second pass has the trunk and one head, of which the
    trunk was passed before; so 2 of 4 products."""
    trunk, heads = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)), [nn.Linear(D, D) for _ in range(2)]
    model = nn.ModuleList([trunk, *heads])
    calls, optimizer = ModelCalls(), torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        calls.begin_step([optimizer], step)
        model.zero_grad()
        y = trunk(torch.ones(S, D))
        ys = [trunk(torch.ones(S, D)), y] if form == "a graph each" else [y, y]
        losses = [head(one).square().sum() for head, one in zip(heads, ys, strict=True)]
        if form == "their sum":
            losses = [sum(losses)]
        elif form == "two models":
            losses = [losses[0], heads[1](y.detach()).sum()]
        elif form == "of the gradient":
            grads = torch.autograd.grad(losses[0], [*heads[0].parameters()], create_graph=True)
            losses = [losses[0] + sum(grad.square().sum() for grad in grads)]
        for loss in losses:
            calls.backward_begins([loss], True)
            loss.backward(retain_graph=True)
            if form == "set back between":
                model.zero_grad()
            if form == "stepped between":
                calls.optimizer_stepped(optimizer)
        calls.end_step()
    calls.count()
    of_trunk_and_heads = (2 + 2) * 2 * PRODUCT - PRODUCT  # backward, but for the gradient of the batch
    if form == "each loss":
        assert calls.work.backwards == pytest.approx(0.5 * of_trunk_and_heads)
        assert calls.work.backwards_at.function == "test_backward_passes_through_the_same_operators"
    else:
        assert calls.work.backwards == 0


@pytest.mark.parametrize(
    ("form", "discarded", "beside"),
    [
        # All of the generator's backward pass, but for the gradient of the noise.
        ("not detached", 3 * PRODUCT, 3 * PRODUCT),
        ("not detached, three times", 3 * 3 * PRODUCT, 3 * PRODUCT),
        ("of the judge", 2 * PRODUCT, 0),
        ("of the judge, set to zero", 2 * PRODUCT, 0),
        ("detached, and frozen", 0, 0),
        ("its own alone", 0, 0),
        ("added up", 0, 0),
        ("put together from several", 0, 0),
        ("one optimizer", 0, 0),
    ],
)
def test_gradients_that_are_set_back_before_an_optimizer_takes_them(form, discarded, beside):
    """A generator and a judge of two layers each, of which each pass is for one."""
    maker, judge = (nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)) for _ in range(2))
    of_each = [[*maker.parameters()], [*judge.parameters()]]
    optimizers = [torch.optim.SGD(one, 1e-3) for one in of_each]
    if form == "one optimizer":
        optimizers = [torch.optim.SGD([*of_each[0], *of_each[1]], 1e-3)] * 2
    calls, kept = ModelCalls(), {}
    to_none, is_whole = form != "of the judge, set to zero", form.startswith("not detached")

    def step_of(optimizer):
        optimizer.step()
        calls.optimizer_stepped(optimizer)

    def passes(loss, own):
        inputs = of_each[own] if form == "its own alone" else None
        calls.backward_begins([loss], inputs is None)
        loss.backward(inputs=inputs, retain_graph=True)
        if form != "put together from several":
            step_of(optimizers[own])
            return
        for one in (*maker.parameters(), *judge.parameters()):
            if one.grad is not None:
                kept[one] = kept.get(one, 0) + one.grad
                one.grad = None

    for step in range(3):
        calls.begin_step(optimizers, step)
        for _ in range(3 if form.endswith("times") else 1):
            made = maker(torch.ones(S, D))
            if form != "added up":
                optimizers[1].zero_grad(to_none)
            passes((judge(made if is_whole else made.detach()) - 1).square().mean(), 1)
        if form != "added up":
            optimizers[0].zero_grad(to_none)
        if is_whole or form == "detached, and frozen":
            judge.requires_grad_(False)
        passes(judge(made).square().mean(), 0)
        judge.requires_grad_(True)
        for one, grad in kept.items():
            one.grad = grad
        for one in optimizers if kept else ():
            step_of(one)
        kept.clear()
        calls.end_step()
    calls.count()
    work = calls.work
    assert (work.discarded, work.discarded_beside) == (discarded, beside)
    if discarded:
        assert work.discarded_at.function.endswith(".passes")
        assert work.discarded_of.function == work.discarded_at.function.partition(".<locals>")[0]
        assert work.discarded_is_apart == is_whole


class Scaled(nn.Module):
    """Uses a function of its weight in each round of a loop."""

    def __init__(self, form):
        super().__init__()
        self.form, self.weight, self.other = (form, *(nn.Parameter(torch.ones(D, D)) for _ in range(2)))

    def forward(self, x):
        once = self.weight / self.weight.norm()
        for turn in range(4):
            if self.form == "each time":
                once = self.weight / self.weight.norm()
            elif self.form == "of two":
                once = (self.weight, self.other)[turn % 2] / (turn + 1)
            elif self.form == "of data":
                once = self.weight / x.norm()
            x = x @ once
        return x


@pytest.mark.parametrize("form", ["each time", "once", "of two", "of data"])
def test_weights_that_are_computed_again_in_each_round_of_a_loop(form):
    """Three of four times: a norm reads the weight, and a division reads it and gives another; and as much
    backward."""
    model, x = Scaled(form), torch.ones(S, D)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(x))
    if form == "each time":
        assert work.hoisted_bytes == pytest.approx(2 * 3 / 4 * 4 * 4 * (3 * D * D + 2), rel=0.01)
        assert (work.hoisted_at.function, 0 < work.hoisted_share < 1) == ("Scaled.forward", True)
    else:
        assert work.hoisted_bytes == 0


class Adapted(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(torch.zeros(D, D), requires_grad=form == "whole")
        self.down, self.up = nn.Parameter(torch.zeros(2, D)), nn.Parameter(torch.zeros(D, 2))

    def forward(self, x):
        if self.form == "factors":
            return x @ self.weight.t() + x @ self.down.t() @ self.up.t()
        return x @ (self.weight + self.up @ self.down).t()


@pytest.mark.parametrize("form", ["merged", "factors", "whole"])
def test_gradients_of_whole_weights_of_which_small_factors_train(form):
    model, x = Adapted(form), torch.zeros(S, D)
    work = worked(model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(x))
    assert work.merged == (PRODUCT if form == "merged" else 0)
    assert not work.merged or work.merged_at.function == "Adapted.forward"


@pytest.mark.parametrize(
    "form", ["same samples", "let go", "turned", "others", "follows", "drops out", "a copy"]
)
def test_a_frozen_module_that_is_called_with_what_it_had_before(form):
    frozen, model = nn.Linear(D, D).requires_grad_(False).eval(), nn.Linear(D, D, bias=form == "a copy")
    calls, optimizer = ModelCalls(), torch.optim.SGD(model.parameters(), 0.1)
    samples = torch.randn(2 * S, D)
    frozen.train(form == "drops out")
    for step in range(3):
        calls.begin_step([optimizer], step)
        batch = torch.randn(S, D) if form == "others" else samples[torch.randperm(2 * S)[:S]]
        batch = batch.roll(step, 1) if form == "turned" else batch
        with torch.no_grad():
            seen = frozen(batch)
        model(seen).sum().backward()
        calls.end_step()
        if form == "follows":
            frozen.weight.lerp_(model.weight.detach(), 0.1)
    if form == "let go":  # as with the function that held it
        del frozen
    calls.count()
    is_told = form in ("same samples", "let go")
    assert calls.work.before == (PRODUCT if is_told else 0)
    assert not is_told or calls.work.before_at.function == (
        "test_a_frozen_module_that_is_called_with_what_it_had_before"
    )
