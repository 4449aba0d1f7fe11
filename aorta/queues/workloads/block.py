"""Parts of a residual block of two matrix multiplies, forward and backward, into memory that the caller has.

Between them is a tanh: with a relu, bfloat16 and float64 would disagree about the sign of numbers near zero,
and so about whole terms of the gradients.

T rows (tokens), D model dim, F hidden dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

KERNELS_FORWARD = 3
KERNELS_BACKWARD = 5


def hidden(x_TD: Tensor, up_DF: Tensor, hidden_TF: Tensor) -> None:
    """tanh(x up)."""
    torch.mm(x_TD, up_DF, out=hidden_TF)
    hidden_TF.tanh_()


def backward_hidden(dy_TD: Tensor, hidden_TF: Tensor, down_FD: Tensor, dhidden_TF: Tensor) -> None:
    """Gradient of x up, before the tanh."""
    torch.mm(dy_TD, down_FD.t(), out=dhidden_TF)
    torch.ops.aten.tanh_backward.grad_input(dhidden_TF, hidden_TF, grad_input=dhidden_TF)


def backward_weights(
    dy_TD: Tensor,
    x_TD: Tensor,
    hidden_TF: Tensor,
    dhidden_TF: Tensor,
    gradients: tuple[Tensor, Tensor],
    accumulate: bool,
) -> None:
    """Gradients of up and down, added to what is there or in its place."""
    dup_DF, ddown_FD = gradients
    add_product(ddown_FD, hidden_TF.t(), dy_TD, accumulate)
    add_product(dup_DF, x_TD.t(), dhidden_TF, accumulate)


def split(flat: Tensor, dim: int, hidden_dim: int) -> tuple[Tensor, Tensor]:
    """Views of both weights (up, then down) that lie in one row."""
    up, down = flat.chunk(2)
    return up.view(dim, hidden_dim), down.view(hidden_dim, dim)


def add_product(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """out (+)= a b."""
    if accumulate:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)


def gemm_flops(num_rows: int, dim: int, hidden_dim: int) -> float:
    """FLOPs of a forward; a backward has twice as many."""
    return 4.0 * num_rows * dim * hidden_dim


def reference(
    x_TD: Tensor, weights: Sequence[tuple[Tensor, Tensor]], dy_TD: Tensor
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """(y, dx, gradients of the weights) of a stack of blocks by autograd in float64, all rows at once."""
    x = x_TD.detach().double().requires_grad_()
    doubles = [(up.double(), down.double()) for up, down in weights]
    leaves = [weight.requires_grad_() for pair in doubles for weight in pair]
    y = x
    for up, down in doubles:
        y = y + (y @ up).tanh() @ down
    dx, *gradients = torch.autograd.grad(y, [x, *leaves], dy_TD.double())
    return y.detach(), dx, list(zip(gradients[::2], gradients[1::2], strict=True))
