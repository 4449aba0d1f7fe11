"""Products whose rows the next product makes narrow."""

import pytest
import torch
from torch import nn

from aorta.attach.call_flops import count_of
from aorta.attach.meta_copies import copy_without_data

NODES, WIDE, NARROW = 40, 64, 8
OF_ROWS, OF_WEIGHTS = 2 * NODES * NODES, 2 * NODES * WIDE * NARROW
"""FLOPs of a product of neighbours, for each column; and of weights, with NODES rows."""


class Convolution(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.weight = form, nn.Parameter(torch.zeros(WIDE, NARROW))
        self.wider = nn.Parameter(torch.zeros(WIDE, 2 * WIDE))
        self.linear = nn.Linear(WIDE, NARROW)

    def forward(self, rows, x):
        match self.form:
            case "narrow":
                return (rows @ x) @ self.weight
            case "linear":
                return self.linear(rows @ x)
            case "in order":
                return rows @ (x @ self.weight)
            case "wider":
                return (rows @ x) @ self.wider
            case "beside another reader":
                found = rows @ x
                return found @ self.weight + found.sum()
            case "with a nonlinearity":
                return torch.relu(rows @ x) @ self.weight
            case "returned":
                found = rows @ x
                return found @ self.weight, found
            case "kept":
                self.found = rows @ x
                return self.found @ self.weight
            case "transposed":
                return (rows @ x[:, :NODES]).t() @ self.weight[:NODES]
            case "of weights":
                return (x @ self.wider) @ self.wider.t() @ self.weight
        return None


def spared(form, of_batches=False, trains=False):
    model = Convolution(form)
    shape = (2, NODES) if of_batches else (NODES,)
    rows, x = torch.zeros(*shape, NODES, device="meta"), torch.zeros(*shape, WIDE, device="meta")
    count = count_of(copy_without_data(model), (rows, x.requires_grad_(trains)), {})
    return count.needless.widened


@pytest.mark.parametrize(
    ("form", "num"),
    [
        # Forward as many columns less; backward the narrow one goes through the neighbours too.
        ("narrow", OF_ROWS * (WIDE - 2 * NARROW)),
        ("linear", OF_ROWS * (WIDE - 2 * NARROW)),
        ("in order", 0),
        ("wider", 0),
        ("beside another reader", 0),
        ("with a nonlinearity", 0),
        ("returned", 0),
        ("kept", 0),
        ("transposed", 0),
        ("of weights", 0),
    ],
)
def test_flops_that_the_other_order_of_two_products_spares(form, num):
    assert spared(form).total() == num


def test_products_of_several_graphs_have_the_same_order():
    assert spared("linear", of_batches=True).total() == 2 * OF_ROWS * (WIDE - 2 * NARROW)


def test_what_is_trained_in_front_of_them_goes_back_through_both():
    assert spared("narrow", trains=True).total() == OF_ROWS * (2 * WIDE - 2 * NARROW)


def test_the_line_is_that_of_the_second_product():
    (line,) = spared("narrow")
    assert line.function == "Convolution.forward"
