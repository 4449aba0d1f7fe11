"""Who holds memory, of programs whose every block is known by hand."""

import gc
import inspect
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from aorta.record.census import _attribute_of, alike, census

CPU = torch.device("cpu")
BATCH, WIDTH = 3, 1000


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.seen = []

    def forward(self, x):
        return torch.relu(self.up(x))


@pytest.fixture(autouse=True)
def _none_but_the_tests_objects():
    """A census asks every object of the process; those of pytest and of earlier tests need not be asked. They
    stay frozen: to look through a million of them takes half a second, here and at each later collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def model():
    gc.collect()
    return nn.Sequential(Block(), Block())


def held(first_of_step=0, frames=()):
    rows = census(CPU, first_of_step, frames).held
    return {
        (row.kind, row.module, row.holder): (row.bytes, row.num_blocks) for row in rows if row.bytes > 8000
    }


def here():
    return [sys._getframe(1)]


WEIGHT, RESULT = 4 * WIDTH * WIDTH, 4 * BATCH * WIDTH


def test_a_model_its_gradients_and_adams_two_moments_are_told_by_module(model):
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(BATCH, WIDTH)).sum().backward()
    optimizer.step()
    found = held()
    assert found["parameters", "0.up", ""] == (WEIGHT, 1)
    assert found["gradients", "1.up", ""] == (WEIGHT, 1)
    assert found["optimizer state", "1.up", "Adam"] == (2 * WEIGHT + 4, 3)  # and the number of the step


def test_rows_of_a_sparse_gradient_count_with_their_places():
    table = nn.Embedding(WIDTH, WIDTH, sparse=True)
    table(torch.arange(BATCH)).sum().backward()
    assert held()["gradients", "Embedding", ""] == (4 * BATCH * WIDTH + 8 * BATCH, 1)


def test_activations_are_those_of_the_module_at_or_before_them(model):
    x = torch.ones(BATCH, WIDTH)
    loss = model(x).sum()
    found = held()
    # A Linear keeps its input, a relu its result: the second Linear's input is the first relu's result.
    assert found["activations", "0.up", ""] == (2 * RESULT, 2)  # x, and the first relu's result
    assert found["activations", "1.up", ""] == (RESULT + 4, 2)  # and the loss
    loss.backward()
    assert not any(kind == "activations" for kind, *_ in held())


def test_a_result_that_goes_on_to_the_loss_is_its_modules_and_one_of_an_earlier_step_its_variables():
    head = nn.Linear(WIDTH, WIDTH, bias=False)
    logits = head(torch.ones(100 * BATCH, WIDTH))
    assert held()["activations", "Linear", ""] == (200 * RESULT, 2)  # x, and the result
    after = torch.autograd._get_sequence_nr()
    line = here()[0].f_lineno - 3
    assert held(after, here())["tensors", "", f"logits (test_census.py:{line})"] == (100 * RESULT, 1)
    assert logits.grad_fn is not None


def test_graphs_of_earlier_steps_are_those_of_the_variable_that_keeps_them(model):
    history = []
    for _ in range(4):
        first = torch.autograd._get_sequence_nr()
        history.append(model(torch.ones(BATCH, WIDTH)).sum())
    (row,) = [
        row for row in held(first, here()) if row[0] == "kept graphs" and row[1] == "0.up" and row[2] != ""
    ]
    line = here()[0].f_code.co_firstlineno + 4
    assert row[2] == f"history (test_census.py:{line})"


def test_tensors_in_an_attribute_are_named_with_their_class_and_line(model):
    for _ in range(5):
        model[0].seen.append(torch.ones(BATCH, WIDTH))
    line = inspect.currentframe().f_lineno - 1
    assert held()["kept tensors", "", f"seen of Block (test_census.py:{line})"] == (5 * RESULT, 5)


def test_a_list_of_dicts_of_tensors_is_one_holder(model):
    copies = [{name: value.clone() for name, value in model.state_dict().items()} for _ in range(12)]
    (row,) = [
        row for row in held(frames=here()).items() if row[0][0] == "kept tensors" and "copies" in row[0][2]
    ]
    assert row[1] == (12 * 2 * WEIGHT, 24)
    del copies


def test_what_a_checkpoint_has_packed_is_not_computed_again(model):
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    loss = checkpoint(model, torch.ones(BATCH, WIDTH, requires_grad=True), use_reentrant=False).sum()
    held()
    assert calls == [1]
    loss.backward()


def test_looking_keeps_nothing_alive(model):
    kept = torch.ones(BATCH, WIDTH)
    gone = weakref.ref(kept)
    held()
    del kept
    gc.collect()
    assert gone() is None


def test_a_look_that_takes_too_long_is_left_and_says_so(model):
    many = [[] for _ in range(4096)]  # it looks at the clock after so many objects
    assert not census(CPU, longest_s=0.0).is_whole
    del many


def test_layers_that_are_alike_are_one():
    assert alike("model.layers.3.mlp.0") == "model.layers.*.mlp.*"
    assert alike("layer3.conv1") == "layer3.conv1"


def test_a_tensor_of_a_closure_with_several_is_named_by_its_own_cell():
    """Cells are equal where their contents are, and tensors cannot be asked that."""
    first, held = torch.zeros(3), torch.ones(3)

    def step():
        return first, held

    assert _attribute_of(held, set()).startswith("held ")
    assert len(step()) == 2
