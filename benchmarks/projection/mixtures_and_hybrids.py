"""Kernels of mixtures and hybrids on one GPU: medians, a row a case.

    python benchmarks/projection/mixtures_and_hybrids.py --seconds 200 --output mixtures_and_hybrids.csv

Grouped GEMMs forward and both ways back by tokens per expert, permutation of tokens, scans and convolution of
Mamba-2 (own kernels: a lower bound on the rate), attention with windows and sinks, and of latent heads. The
kinds take turns, so that a run cut short by --seconds has some of each; what is left is listed as not run.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from harness import arguments, need_gpus  # noqa: E402
from projection.kernel_cases import BF16, DEVICE, Case, host_us, measure, median_ms  # noqa: E402

EXPERTS = (
    # experts of a rank, columns and rows of one
    (16, 1536, 2048),  # Qwen3 30B: joined gate and up over ep 8
    (128, 1536, 2048),
    (16, 2048, 768),  # its product down
    (16, 5760, 2880),  # gpt-oss 120B over ep 8
    (2, 5760, 2880),  # over ep 64
    (4, 4096, 7168),  # DeepSeek-V3 over ep 64
    (32, 4096, 7168),  # over ep 8
    (16, 7168, 2048),
    (8, 3712, 2688),  # Nemotron 3 Nano over ep 16, without a gate
    (2, 28672, 4096),  # Mixtral 8x7B over ep 4
)
TOKENS_PER_EXPERT = (64, 512, 2048)
MOST_ROWS = 131072
SCANS = (
    # sequences, positions, heads, groups, width of a head, state
    (1, 8192, 64, 8, 64, 128),  # Nemotron 3 Nano
    (2, 8192, 64, 8, 64, 128),
    (4, 8192, 64, 8, 64, 128),
    (1, 8192, 128, 8, 64, 128),  # Nemotron-H 8B, Nemotron 3 Super
    (1, 4096, 256, 8, 64, 256),  # Nemotron-H 56B
    (8, 2048, 80, 1, 64, 128),  # Mamba-2 2.7B
)
PERMUTED = (
    # tokens, experts of a token, width
    (8192, 8, 2048),
    (16384, 6, 2688),
    (4096, 8, 7168),
    (16384, 4, 2880),
)
LATENT = ((1, 4096, 16), (1, 4096, 64), (1, 4096, 128), (1, 8192, 16))
WINDOWED = ((1, 4096, 64, 8, 64), (4, 4096, 64, 8, 64), (1, 16384, 64, 8, 64))  # gpt-oss
WINDOW = 128


def grouped(experts: int, tokens: int, n: int, k: int) -> dict[str, Any]:
    """One call for all experts, and one batched call of the same products, forward and each way back."""
    a = torch.randn(experts * tokens, k, device=DEVICE, dtype=BF16, requires_grad=True)
    weights = torch.randn(experts, n, k, device=DEVICE, dtype=BF16)
    b = weights.transpose(-1, -2).requires_grad_()
    ends = torch.arange(1, experts + 1, device=DEVICE, dtype=torch.int32) * tokens
    out = torch._grouped_mm(a, b, offs=ends)
    grad = torch.randn_like(out)
    batched = a.detach().view(experts, tokens, k)
    calls = {
        "forward": lambda: torch._grouped_mm(a, b, offs=ends),
        "dgrad": lambda: torch.autograd.grad(out, a, grad, retain_graph=True),
        "wgrad": lambda: torch.autograd.grad(out, b, grad, retain_graph=True),
        "batched": lambda: batched @ b,
    }
    times: dict[str, Any] = {}
    for name, call in calls.items():
        times[f"{name}_ms"], times["iters"] = median_ms(call, 0.12)
    return times | {"host_us": host_us(calls["forward"])}


def permuted(tokens: int, active: int, width: int) -> dict[str, Any]:
    """Tokens in the order of their experts and back, by own kernels and by torch's indexing."""
    from projection.scan_kernels import permute, unpermute

    source = torch.randn(tokens, width, device=DEVICE, dtype=BF16)
    order = torch.randperm(tokens * active, device=DEVICE)
    index = (order // active).to(torch.int32)
    back = torch.argsort(order).view(tokens, active).to(torch.int32)
    weight = torch.rand(tokens, active, device=DEVICE)
    routed = torch.empty(tokens * active, width, device=DEVICE, dtype=BF16)
    joined = torch.empty_like(source)
    permute_ms, iters = median_ms(lambda: permute(source, index, routed), 0.1)
    unpermute_ms, _ = median_ms(lambda: unpermute(routed, back, weight, joined), 0.1)
    select_ms, _ = median_ms(lambda: torch.index_select(source, 0, index), 0.1)
    add_ms, _ = median_ms(lambda: joined.index_add_(0, index, routed), 0.1)
    return {
        "permute_ms": permute_ms,
        "unpermute_ms": unpermute_ms,
        "index_select_ms": select_ms,
        "index_add_ms": add_ms,
        "iters": iters,
    }


def scan(batch: int, seq: int, heads: int, groups: int, width: int, state: int) -> dict[str, Any]:
    """A scan forward and back, with how far a short one lies from the recurrence."""
    from projection.scan_kernels import ScanRun, checked

    short = ScanRun(1, 256, 8, 2, width, state, "cuda", BF16)
    off = checked(short)
    run = ScanRun(batch, seq, heads, groups, width, state, "cuda", BF16)
    forward_ms, iters = median_ms(run.forward, 0.12)
    backward_ms, _ = median_ms(run.backward, 0.12)
    return {"forward_ms": forward_ms, "backward_ms": backward_ms, "iters": iters, "largest_error": off}


def convolved(batch: int, seq: int, heads: int, groups: int, width: int, state: int) -> dict[str, Any]:
    """The convolution before a scan, by an own kernel and by torch, forward; and back by torch."""
    from projection.scan_kernels import TAPS, convolution

    channels = heads * width + 2 * groups * state
    x = torch.randn(batch * seq, channels, device=DEVICE, dtype=BF16)
    w = torch.randn(channels, TAPS, device=DEVICE)
    out = torch.empty_like(x)
    own_ms, iters = median_ms(lambda: convolution(x, w, out, seq), 0.1)
    by_channel = x.view(batch, seq, channels).transpose(1, 2).contiguous().requires_grad_()
    taps = w.to(BF16)[:, None].contiguous().requires_grad_()
    call: Callable[[], torch.Tensor]
    call = lambda: F.conv1d(by_channel, taps, padding=TAPS - 1, groups=channels)  # noqa: E731
    torch_ms, _ = median_ms(call, 0.1)
    result = call()
    grad = torch.randn_like(result)
    back_ms, _ = median_ms(
        lambda: torch.autograd.grad(result, (by_channel, taps), grad, retain_graph=True), 0.1
    )
    return {"forward_ms": own_ms, "torch_ms": torch_ms, "torch_backward_ms": back_ms, "iters": iters}


def latent(backend: Any, batch: int, seq: int, heads: int) -> dict[str, Any]:
    """Attention of latent heads: queries and keys 192 wide, values 128."""
    q, k = (
        torch.randn(batch, heads, seq, 192, device=DEVICE, dtype=BF16, requires_grad=True) for _ in range(2)
    )
    v = torch.randn(batch, heads, seq, 128, device=DEVICE, dtype=BF16, requires_grad=True)
    with sdpa_kernel(backend):
        call: Callable[[], torch.Tensor]
        call = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
        out = call()
        grad = torch.randn_like(out)
        forward_ms, iters = median_ms(call, 0.12)
        backward_ms, _ = median_ms(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), 0.12)
    return {"forward_ms": forward_ms, "backward_ms": backward_ms, "iters": iters}


_compiled: list[Any] = []


def windowed(
    batch: int, seq: int, heads: int, kv_heads: int, dim: int, window: int | None, sinks: bool
) -> dict[str, Any]:
    """Flex attention with a window, and with one learned logit a head beside the keys."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not _compiled:
        _compiled.append(torch.compile(flex_attention, dynamic=False))
    q = torch.randn(batch, heads, seq, dim, device=DEVICE, dtype=BF16, requires_grad=True)
    k, v = (
        torch.randn(batch, kv_heads, seq, dim, device=DEVICE, dtype=BF16, requires_grad=True)
        for _ in range(2)
    )
    sink = torch.zeros(heads, device=DEVICE, requires_grad=True)

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) if window is None else (i >= j) & (i - j < window)

    mask = create_block_mask(seen, None, None, seq, seq, device="cuda")

    def call() -> Any:
        if not sinks:
            return _compiled[0](q, k, v, block_mask=mask, enable_gqa=True)
        out, lse = _compiled[0](q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
        return out * torch.sigmoid(lse - sink[:, None]).unsqueeze(-1).to(out.dtype)

    out = call()
    grad = torch.randn_like(out)
    wanted = (q, k, v, sink) if sinks else (q, k, v)
    forward_ms, iters = median_ms(call, 0.1)
    backward_ms, _ = median_ms(lambda: torch.autograd.grad(out, wanted, grad, retain_graph=True), 0.1)
    return {"forward_ms": forward_ms, "backward_ms": backward_ms, "iters": iters}


def by_kind() -> Iterator[list[Case]]:
    """The cases of each kind."""
    groups: list[Case] = []
    for tokens in TOKENS_PER_EXPERT:
        for experts, n, k in EXPERTS:
            if experts * tokens <= MOST_ROWS:
                case = {"kind": "grouped", "experts": experts, "tokens_per_expert": tokens, "n": n, "k": k}
                groups.append((case, partial(grouped, experts, tokens, n, k)))
    yield groups
    scan_names = ("batch", "seq", "heads", "groups", "head_dim", "state")
    for kind, run in (("scan", scan), ("convolution", convolved)):
        yield [
            ({"kind": kind, **dict(zip(scan_names, size, strict=True))}, partial(run, *size))
            for size in SCANS
        ]
    yield [
        ({"kind": "permute", "tokens": t, "active": k, "width": d}, partial(permuted, t, k, d))
        for t, k, d in PERMUTED
    ]
    backends = (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION))
    yield [
        (
            {"kind": "latent", "backend": name, "batch": b, "seq": s, "heads": h},
            partial(latent, backend, b, s, h),
        )
        for b, s, h in LATENT
        for name, backend in backends
    ]
    names = ("batch", "seq", "heads", "kv_heads", "head_dim")
    # Each is compiled, which takes longer than to run it.
    chosen: list[tuple[tuple[int, int, int, int, int], int | None, bool]]
    chosen = [(size, WINDOW, False) for size in WINDOWED]
    chosen += [(WINDOWED[1], WINDOW, True), (WINDOWED[1], None, True)]
    yield [
        (
            {"kind": "flex", **dict(zip(names, size, strict=True)), "window": window, "sinks": sinks},
            partial(windowed, *size, window=window, sinks=sinks),
        )
        for size, window, sinks in chosen
    ]


def cases() -> Iterator[Case]:
    """All cases, one of each kind in turn."""
    for turn in itertools.zip_longest(*by_kind()):
        yield from (case for case in turn if case is not None)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=200.0, help="no case begins after that")
    options = parser.parse_args()
    need_gpus()
    measure(cases(), options.output, options.seconds)


if __name__ == "__main__":
    main()
