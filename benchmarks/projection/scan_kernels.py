# mypy: ignore-errors
"""Kernels of Mamba-2 and of routed tokens in Triton, for times that no library here gives.

B batch, S sequence, T = B x S tokens, C chunks, L positions of a chunk, H heads, G groups, P width of a head,
N state, K experts of a token, D width of a token. A scan is that of Dao and Gu, Transformers are SSMs (arXiv
2405.21060), section 6: products inside chunks, a state handed from chunk to chunk. Written plainly: what they
reach is a lower bound on the rate of tuned kernels. `checked` compares them with the recurrence, position by
position.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 128
TAPS = 4


@triton.jit
def chunk_states(x, b, decay, states, totals, H, G, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr):
    """states[C, H, P, N]: what the positions of a chunk leave behind at its end."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    group = head // (H // G)
    row = chunk * L + tl.arange(0, L)
    p, n = tl.arange(0, P), tl.arange(0, N)
    a = tl.load(decay + row * H + head)
    total = tl.sum(a)
    scale = tl.exp(total - tl.cumsum(a))
    x_LP = tl.load(x + (row * H + head)[:, None] * P + p[None, :]) * scale[:, None]
    b_LN = tl.load(b + (row * G + group)[:, None] * N + n[None, :])
    s_PN = tl.dot(tl.trans(x_LP.to(b_LN.dtype)), b_LN)
    tl.store(states + (chunk * H + head) * P * N + p[:, None] * N + n[None, :], s_PN)
    tl.store(totals + chunk * H + head, total)


@triton.jit
def pass_states(states, totals, chunks, H, SIZE, BLOCK: tl.constexpr, BACK: tl.constexpr):
    """In place: the state before each chunk; BACK: the gradient of the state after it."""
    batch, head = tl.program_id(0), tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    state = tl.zeros((BLOCK,), tl.float32)
    for number in range(chunks):
        chunk = batch * chunks + (chunks - 1 - number if BACK else number)
        place = states + (chunk * H + head) * SIZE + at
        own = tl.load(place)
        tl.store(place, state)
        state = state * tl.exp(tl.load(totals + chunk * H + head)) + own


@triton.jit
def chunk_outputs(x, b, c, decay, states, out, H, G, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr):
    chunk, head = tl.program_id(0), tl.program_id(1)
    group = head // (H // G)
    i = tl.arange(0, L)
    row = chunk * L + i
    p, n = tl.arange(0, P), tl.arange(0, N)
    sums = tl.cumsum(tl.load(decay + row * H + head))
    x_LP = tl.load(x + (row * H + head)[:, None] * P + p[None, :])
    b_LN = tl.load(b + (row * G + group)[:, None] * N + n[None, :])
    c_LN = tl.load(c + (row * G + group)[:, None] * N + n[None, :])
    s_PN = tl.load(states + (chunk * H + head) * P * N + p[:, None] * N + n[None, :])
    away = tl.where(i[:, None] >= i[None, :], sums[:, None] - sums[None, :], float("-inf"))
    scores_LL = tl.dot(c_LN, tl.trans(b_LN)) * tl.exp(away)
    o_LP = tl.dot(scores_LL.to(x_LP.dtype), x_LP)
    o_LP += tl.dot(c_LN, tl.trans(s_PN.to(c_LN.dtype))) * tl.exp(sums)[:, None]
    tl.store(out + (row * H + head)[:, None] * P + p[None, :], o_LP.to(x_LP.dtype))


@triton.jit
def state_grads(do, c, decay, grads, H, G, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr):
    """grads[C, H, P, N]: of the state that a chunk begins with, from its own outputs."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    group = head // (H // G)
    row = chunk * L + tl.arange(0, L)
    p, n = tl.arange(0, P), tl.arange(0, N)
    sums = tl.cumsum(tl.load(decay + row * H + head))
    do_LP = tl.load(do + (row * H + head)[:, None] * P + p[None, :]) * tl.exp(sums)[:, None]
    c_LN = tl.load(c + (row * G + group)[:, None] * N + n[None, :])
    tl.store(
        grads + (chunk * H + head) * P * N + p[:, None] * N + n[None, :],
        tl.dot(tl.trans(do_LP.to(c_LN.dtype)), c_LN),
    )


@triton.jit
def input_grads(
    x, b, c, do, decay, states, grads, dx, db, dc, H, G, P: tl.constexpr, N: tl.constexpr, L: tl.constexpr
):
    """Gradients of x, and of b and c summed over the heads of a group in fp32."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    group = head // (H // G)
    i = tl.arange(0, L)
    row = chunk * L + i
    p, n = tl.arange(0, P), tl.arange(0, N)
    a = tl.load(decay + row * H + head)
    sums = tl.cumsum(a)
    scale = tl.exp(tl.sum(a) - sums)
    place_LP = (row * H + head)[:, None] * P + p[None, :]
    place_LN = (row * G + group)[:, None] * N + n[None, :]
    place_PN = (chunk * H + head) * P * N + p[:, None] * N + n[None, :]
    x_LP, do_LP = tl.load(x + place_LP), tl.load(do + place_LP)
    b_LN, c_LN = tl.load(b + place_LN), tl.load(c + place_LN)
    away = tl.where(i[:, None] >= i[None, :], sums[:, None] - sums[None, :], float("-inf"))
    decay_LL = tl.exp(away)
    scores_LL = (tl.dot(c_LN, tl.trans(b_LN)) * decay_LL).to(x_LP.dtype)
    g_PN = tl.load(grads + place_PN).to(x_LP.dtype)
    dx_LP = tl.dot(tl.trans(scores_LL), do_LP) + tl.dot(b_LN, tl.trans(g_PN)) * scale[:, None]
    tl.store(dx + place_LP, dx_LP.to(x_LP.dtype))
    dscores_LL = (tl.dot(do_LP, tl.trans(x_LP)) * decay_LL).to(x_LP.dtype)
    s_PN = tl.load(states + place_PN).to(x_LP.dtype)
    dc_LN = tl.dot(dscores_LL, b_LN) + tl.dot(do_LP, s_PN) * tl.exp(sums)[:, None]
    db_LN = tl.dot(tl.trans(dscores_LL), c_LN) + tl.dot(x_LP, g_PN) * scale[:, None]
    tl.atomic_add(dc + place_LN, dc_LN)
    tl.atomic_add(db + place_LN, db_LN)


class ScanRun:
    """A scan of S positions with its operands and results on a device."""

    def __init__(self, B: int, S: int, H: int, G: int, P: int, N: int, device: str, dtype: torch.dtype):
        self.shape = B, S, H, G, P, N
        self.chunks = S // CHUNK
        T = B * S

        def drawn(*size: int) -> Tensor:
            return (torch.randn(*size, device=device) / size[-1] ** 0.5).to(dtype)

        self.x_THP, self.do_THP = drawn(T, H, P), drawn(T, H, P)
        self.b_TGN, self.c_TGN = drawn(T, G, N), drawn(T, G, N)
        self.decay_TH = -torch.rand(T, H, device=device) * 0.1
        self.states = torch.zeros(B * self.chunks, H, P, N, device=device)
        self.grads = torch.zeros_like(self.states)
        self.totals = torch.zeros(B * self.chunks, H, device=device)
        self.out, self.dx = torch.zeros_like(self.x_THP), torch.zeros_like(self.x_THP)
        self.db, self.dc = (torch.zeros(T, G, N, device=device) for _ in range(2))

    def _passed(self, states: Tensor, back: bool) -> None:
        B, _, H, _, P, N = self.shape
        block = min(1024, P * N)
        pass_states[(B, H, P * N // block)](
            states, self.totals, self.chunks, H, P * N, BLOCK=block, BACK=back
        )

    def forward(self) -> Tensor:
        B, _, H, G, P, N = self.shape
        grid, sizes = (B * self.chunks, H), {"P": P, "N": N, "L": CHUNK}
        chunk_states[grid](
            self.x_THP, self.b_TGN, self.decay_TH, self.states, self.totals, H, G, **sizes, num_warps=4
        )
        self._passed(self.states, False)
        operands = self.x_THP, self.b_TGN, self.c_TGN, self.decay_TH
        chunk_outputs[grid](*operands, self.states, self.out, H, G, **sizes, num_warps=8)
        return self.out

    def backward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of x, b and c; that of the decay, a sum over what is at hand, is left out."""
        B, _, H, G, P, N = self.shape
        grid, sizes = (B * self.chunks, H), {"P": P, "N": N, "L": CHUNK}
        state_grads[grid](self.do_THP, self.c_TGN, self.decay_TH, self.grads, H, G, **sizes, num_warps=4)
        self._passed(self.grads, True)
        self.db.zero_()
        self.dc.zero_()
        operands = self.x_THP, self.b_TGN, self.c_TGN, self.do_THP, self.decay_TH, self.states, self.grads
        input_grads[grid](*operands, self.dx, self.db, self.dc, H, G, **sizes, num_warps=8)
        return self.dx, self.db, self.dc


def checked(run: ScanRun) -> float:
    """Largest difference from the recurrence, outputs and gradients, over the largest value of each."""
    B, S, H, G, P, N = run.shape

    def by_head(t: Tensor) -> Tensor:
        return t.double().view(B, S, G, 1, N).expand(B, S, G, H // G, N).reshape(B, S, H, N)

    x = run.x_THP.double().view(B, S, H, P).requires_grad_()
    b, c = (t.double().view(B, S, G, N).requires_grad_() for t in (run.b_TGN, run.c_TGN))
    a = run.decay_TH.double().view(B, S, H).exp()
    state = torch.zeros(B, H, P, N, dtype=torch.float64, device=x.device)
    outputs = []
    b_BSHN, c_BSHN = by_head(b), by_head(c)
    for t in range(S):
        state = state * a[:, t, :, None, None] + x[:, t, :, :, None] * b_BSHN[:, t, :, None, :]
        outputs.append((state * c_BSHN[:, t, :, None, :]).sum(-1))
    out = torch.stack(outputs, 1)
    wanted = torch.autograd.grad(out, (x, b, c), run.do_THP.double().view(B, S, H, P))
    found = (run.forward(), *run.backward())
    pairs = zip(found, (out, *wanted), strict=True)
    return max(
        float((f.double().flatten() - w.detach().flatten()).abs().max() / w.detach().abs().max())
        for f, w in pairs
    )


@triton.jit
def gather_rows(source, index, out, D, BLOCK: tl.constexpr):
    """out[i] = source[index[i]]: tokens in the order of their experts."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(index + row).to(tl.int64)
    inside = column < D
    tl.store(out + row * D + column, tl.load(source + at * D + column, mask=inside), mask=inside)


@triton.jit
def sum_rows(source, index, weight, out, D, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = sum over k of weight[t, k] source[index[t, k]]: results of a token's experts joined."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(K):
        at = tl.load(index + row * K + k).to(tl.int64)
        total += tl.load(weight + row * K + k) * tl.load(source + at * D + column, mask=inside, other=0.0)
    tl.store(out + row * D + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def scatter_rows(source, index, out, D, BLOCK: tl.constexpr):
    """out[index[i]] = source[index[i]]: tokens into another rank's memory, each at its own number."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(index + tl.program_id(0)).to(tl.int64) * D + column
    tl.store(out + at, tl.load(source + at, mask=column < D), mask=column < D)


@triton.jit
def sum_places(first, second, goes, out, D, TWO: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = sum of first[t] and second[t] as far as token t went there."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row * D + column
    # goes holds 0 or 1: none of the columns is read of a place where the token did not go
    inside = column < D * tl.load(goes + row * (1 + TWO)).to(tl.int32)
    total = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    if TWO:
        inside = column < D * tl.load(goes + row * 2 + 1).to(tl.int32)
        total += tl.load(second + at, mask=inside, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=column < D)


@triton.jit
def convolve(x, w, out, S, D, TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """out[t] = silu(sum over taps of w x[t - tap]), each channel for itself, never across sequences."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for tap in range(TAPS):
        there = ((t % S) >= tap)[:, None] & (d < D)[None, :]
        value = tl.load(x + (t - tap)[:, None] * D + d[None, :], mask=there, other=0.0).to(tl.float32)
        total += value * tl.load(w + d * TAPS + tap, mask=d < D, other=0.0)[None, :]
    total = total * tl.sigmoid(total)
    tl.store(out + t[:, None] * D + d[None, :], total.to(out.dtype.element_ty), mask=(d < D)[None, :])


def permute(source_TD: Tensor, index_R: Tensor, out_RD: Tensor) -> None:
    width = source_TD.shape[1]
    gather_rows[(index_R.numel(), triton.cdiv(width, 1024))](source_TD, index_R, out_RD, width, BLOCK=1024)


def unpermute(source_RD: Tensor, index_TK: Tensor, weight_TK: Tensor, out_TD: Tensor) -> None:
    width, (tokens, active) = source_RD.shape[1], index_TK.shape
    grid = (tokens, triton.cdiv(width, 1024))
    sum_rows[grid](source_RD, index_TK, weight_TK, out_TD, width, K=active, BLOCK=1024)


def scatter_to(source_TD: Tensor, index_R: Tensor, out_TD: Tensor) -> None:
    width = source_TD.shape[1]
    if len(index_R):
        scatter_rows[(len(index_R), triton.cdiv(width, 1024))](source_TD, index_R, out_TD, width, BLOCK=1024)


def sum_from(places: list[Tensor], goes: Tensor, out_TD: Tensor) -> None:
    """places: of one rank or two."""
    tokens, width = out_TD.shape
    grid = (tokens, triton.cdiv(width, 1024))
    sum_places[grid](places[0], places[-1], goes, out_TD, width, TWO=len(places) == 2, BLOCK=1024)


def convolution(x_TD: Tensor, w_DJ: Tensor, out_TD: Tensor, S: int) -> None:
    T, D = x_TD.shape
    grid: Any = (T // 64, triton.cdiv(D, 64))
    convolve[grid](x_TD, w_DJ, out_TD, S, D, TAPS=TAPS, BLOCK_T=64, BLOCK_D=64)
