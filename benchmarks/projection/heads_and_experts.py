"""Times of attention of head size 64 and 128, expert GEMMs and host copies on one GPU: medians, a row a case.

    python benchmarks/projection/heads_and_experts.py --seconds 55 --output heads_and_experts.csv

Cases run in order of use; what is left over after --seconds of wall time is listed as not run.
"""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from harness import arguments, need_gpus  # noqa: E402
from projection.kernel_cases import BF16, DEVICE, Case, host_us, measure, median_ms  # noqa: E402


def sdpa(
    backend: Any, batch: int, seq: int, heads: int, kv_heads: int, dim: int, causal: bool
) -> dict[str, Any]:
    q = torch.randn(batch, heads, seq, dim, device=DEVICE, dtype=BF16, requires_grad=True)
    k, v = (
        torch.randn(batch, kv_heads, seq, dim, device=DEVICE, dtype=BF16, requires_grad=True)
        for _ in range(2)
    )
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)
        grad = torch.randn_like(out)
        forward, iters = median_ms(
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)
        )
        backward, _ = median_ms(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    return {"forward_ms": forward, "backward_ms": backward, "iters": iters}


def gemm(m: int, n: int, k: int, batch: int = 1) -> dict[str, Any]:
    shape = (batch,) if batch > 1 else ()
    a = torch.randn(*shape, m, k, device=DEVICE, dtype=BF16)
    b = torch.randn(*shape, n, k, device=DEVICE, dtype=BF16).transpose(-1, -2)
    ms, iters = median_ms(lambda: a @ b)
    return {"ms": ms, "iters": iters, "host_us": host_us(lambda: a @ b)}


def grouped(experts: int, tokens: int, n: int, k: int, skew: float) -> dict[str, Any]:
    """torch._grouped_mm over experts; skew: the fullest expert has that many times the mean."""
    counts = torch.full((experts,), tokens / experts)
    if skew > 1:
        ramp = torch.linspace(skew, 2 - skew if skew < 2 else 0.0, experts)
        counts = counts * ramp / ramp.mean()
    sizes = (counts / 16).round().to(torch.int32) * 16
    offsets = sizes.cumsum(0).to(torch.int32).to(DEVICE)
    total = int(sizes.sum())
    a = torch.randn(total, k, device=DEVICE, dtype=BF16)
    b = torch.randn(experts, n, k, device=DEVICE, dtype=BF16).transpose(-1, -2)
    call = lambda: torch._grouped_mm(a, b, offs=offsets)  # noqa: E731
    ms, iters = median_ms(call)
    parts = a.split(sizes.tolist())
    loop = lambda: [part @ weight for part, weight in zip(parts, b, strict=True)]  # noqa: E731
    loop_ms, _ = median_ms(loop)
    return {
        "ms": ms,
        "iters": iters,
        "tokens": total,
        "host_us": host_us(call),
        "loop_ms": loop_ms,
        "loop_host_us": host_us(loop),
    }


def offload(megabytes: int, gemm_size: int) -> dict[str, Any]:
    """Copy to pinned memory and back alone, and beside GEMMs."""
    size = megabytes * 2**20
    source = torch.empty(size, device=DEVICE, dtype=torch.uint8)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream()
    out_ms, _ = median_ms(lambda: target.copy_(source, non_blocking=True))
    back_ms, _ = median_ms(lambda: source.copy_(target, non_blocking=True))
    a, b = (torch.randn(gemm_size, gemm_size, device=DEVICE, dtype=BF16) for _ in range(2))
    gemm_ms, _ = median_ms(lambda: a @ b)
    copies = max(1, int(0.15 / (out_ms / 1e3)))
    with torch.cuda.stream(stream):
        for _ in range(copies):
            target.copy_(source, non_blocking=True)
    beside_ms, iters = median_ms(lambda: a @ b, 0.05)
    torch.cuda.synchronize()
    return {
        "to_host_ms": out_ms,
        "to_device_ms": back_ms,
        "gemm_ms": gemm_ms,
        "gemm_beside_copy_ms": beside_ms,
    }


def cases() -> Iterator[Case]:
    flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    for dim in (64, 128):
        for batch, seq, heads, kv_heads, causal in (
            (1, 4096, 32, 8, True),
            (2, 2048, 32, 32, True),
            (1, 8192, 32, 8, True),
            (4, 1024, 16, 16, True),
            (1, 16384, 32, 8, True),
            (1, 4096, 64, 8, True),
            (1, 4096, 32, 32, False),
            (1, 8192, 16, 16, False),
        ):
            for name, backend in (("flash", flash), ("cudnn", cudnn)):
                case = dict(
                    kind="sdpa",
                    backend=name,
                    batch=batch,
                    seq=seq,
                    heads=heads,
                    kv_heads=kv_heads,
                    head_dim=dim,
                    causal=causal,
                )
                arguments = (backend, batch, seq, heads, kv_heads, dim, causal)
                yield case, partial(sdpa, *arguments)
    for experts, tokens, n, k in (
        (8, 8192, 14336, 4096),
        (8, 8192, 4096, 14336),
        (16, 32768, 1536, 2048),
        (16, 32768, 2048, 768),
        (64, 32768, 1408, 2048),
        (128, 32768, 1536, 2048),
        (8, 1024, 14336, 4096),
        (128, 4096, 1536, 2048),
        (8, 65536, 4096, 7168),
        (32, 32768, 4096, 7168),
    ):
        for skew in (1.0, 1.5):
            case = dict(kind="grouped_mm", experts=experts, tokens=tokens, n=n, k=k, skew=skew)
            yield case, partial(grouped, experts, tokens, n, k, skew)
    for batch, m, n, k in (
        (8, 1024, 14336, 4096),
        (16, 2048, 1536, 2048),
        (64, 512, 1408, 2048),
        (128, 256, 1536, 2048),
        (1, 4096, 1536, 2048),
        (1, 64, 1536, 2048),
        (1, 256, 14336, 4096),
        (1, 16, 4096, 4096),
    ):
        case = dict(kind="gemm", batch=batch, m=m, n=n, k=k)
        yield case, partial(gemm, m, n, k, batch)
    for megabytes in (32, 256):
        case = dict(kind="offload", megabytes=megabytes, gemm_size=8192)
        yield case, partial(offload, megabytes, 8192)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=55.0, help="no case begins after that")
    options = parser.parse_args()
    need_gpus()
    measure(cases(), options.output, options.seconds)


if __name__ == "__main__":
    main()
