"""Derivatives by several inputs that one call of autograd.grad each asks for."""

import pytest
import torch

from aorta.attach.backward_graphs import graph_of
from aorta.attach.derivatives import Derivatives


def passes(form, derivatives):
    """Of two layers, whose outputs u and v have derivatives by x and t in the loss."""
    inner, outer = (torch.rand(size, requires_grad=True) for size in ((2, 4), (4, 2)))
    x, t = (torch.rand(3, 1, requires_grad=True) for _ in range(2))
    u, v = (torch.tanh(torch.cat([x, t], 1) @ inner) @ outer).split(1, dim=1)

    def grad(output, *inputs, given=None):
        given = torch.ones_like(output) if given is None else given
        derivatives.begins(graph_of([output]), [output], [given], inputs, False)
        found = torch.autograd.grad(output, inputs, given, create_graph=form != "no graph", retain_graph=True)
        derivatives.ended(found)
        return sum(one.square().sum() for one in found)

    if form == "at once":
        loss = grad(u, x, t)
    elif form == "the same again":
        loss = grad(u, x) + grad(u, x)
    elif form == "of two outputs":
        loss = grad(u, x) + grad(v, t)
    elif form == "of unlike gradients":
        loss = grad(u, x) + grad(u, t, given=torch.full_like(u, 2.0))
    else:
        loss = grad(u, x) + grad(u, t)
    loss = loss + u.sum()
    derivatives.begins(graph_of([loss]), [loss], [None], (), True)
    loss.backward()
    derivatives.ended([])
    derivatives.end_step()


FORMS = ("at once", "the same again", "of two outputs", "of unlike gradients")


@pytest.mark.parametrize(
    ("form", "part"),
    [
        # 2 products forward and 2 in each call, each of which makes 2; 12 in the last pass through 6.
        ("one by one", (2 + 4) / (2 + 4 + 12)),
        ("no graph", 2 / (2 + 4 + 4)),
        *((form, 0.0) for form in FORMS),
    ],
)
def test_calls_for_one_more_input_go_through_the_same_graph(form, part):
    derivatives = Derivatives()
    for _ in range(3):
        passes(form, derivatives)
    found = derivatives.found()
    assert found.of_products == pytest.approx(part)
    assert (found.num, found.num_again) == (1 if form == "at once" else 2, int(part > 0))
    assert not part or found.at.function.endswith("grad")


def test_operators_that_compute_nothing_are_not_counted():
    """Of a sum of squares of a part: the part is none."""
    derivatives = Derivatives()
    x = torch.rand(4, requires_grad=True)
    y = torch.rand(4, requires_grad=True)
    root = (x + y)[:2].square().sum()
    for one in (x, y):
        derivatives.begins(graph_of([root]), [root], [torch.ones(())], [one], False)
        derivatives.ended(torch.autograd.grad(root, one, retain_graph=True))
    derivatives.end_step()
    part = derivatives.found().of_operators
    assert part == pytest.approx(3 / (3 + 3 + 3))  # forward, and each call: the sum, squares, and the total
