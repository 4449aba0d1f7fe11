"""Exchange of tokens between experts on the GPUs of one node: medians, a row a case.

    torchrun --nproc_per_node 2 benchmarks/projection/dispatch.py --seconds 120 --output dispatch.csv

Dispatch and combine in two ways. `nccl`: all_to_all_single of every copy of a token, in equal parts, with the
permutation before it and after it left out. `direct`: what DeepEP does between the GPUs of a node, by own
kernels and so a lower bound on its rate: a kernel copies each token once for each rank that has some of its
experts, straight into that rank's memory, and another sums from all ranks' memories what they computed. Each
row counts the bytes that leave a rank. Routing is random and balanced, as training with a forced balance has
it. The first call of each kind is compared with what plain indexing gives.
"""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from harness import arguments, need_gpus  # noqa: E402
from projection.kernel_cases import BF16, Case, batch_ms, measure  # noqa: E402

CASES = (
    # tokens of a rank, experts of a token, width
    (4096, 8, 2048),  # Qwen3 30B
    (16384, 8, 2048),
    (4096, 8, 4096),  # Qwen3 235B
    (4096, 8, 7168),  # DeepSeek-V3
    (16384, 4, 2880),  # gpt-oss 120B
    (16384, 6, 2688),  # Nemotron 3 Nano
    (1024, 8, 7168),
    (256, 8, 7168),
    (32768, 2, 4096),  # Mixtral
    (512, 8, 2048),
)
EXPERTS = 64


class Exchange:
    """Tokens of one rank, where they go, and memory that all ranks can reach."""

    def __init__(self, tokens: int, active: int, width: int) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.device = torch.device("cuda", torch.cuda.current_device())
        generator = torch.Generator(self.device).manual_seed(1 + self.rank)
        draw = torch.rand(tokens, EXPERTS, device=self.device, generator=generator)
        expert = draw.topk(active, dim=1).indices
        goes = torch.zeros(tokens, self.ranks, dtype=torch.bool, device=self.device)
        goes.scatter_(1, expert // (EXPERTS // self.ranks), True)
        self.goes = goes.to(torch.int8)
        self.source = torch.randn(tokens, width, device=self.device, dtype=BF16, generator=generator)
        # Of each rank: a place for every token of every rank, by number, so that no count is exchanged.
        shape = (self.ranks, tokens, width)
        self.held = symmetric.empty(shape, dtype=BF16, device=self.device)
        world = dist.group.WORLD
        assert world is not None
        handle = symmetric.rendezvous(self.held, world)
        self.barrier = handle.barrier
        self.peers = [handle.get_buffer(rank, shape, BF16)[self.rank] for rank in range(self.ranks)]
        self.index = [goes[:, rank].nonzero().flatten().to(torch.int32) for rank in range(self.ranks)]
        self.joined = torch.empty_like(self.source)

    @property
    def sent_bytes(self) -> int:
        """Bytes that leave the rank by dispatch; as many come back."""
        rows = sum(len(index) for rank, index in enumerate(self.index) if rank != self.rank)
        return rows * self.source.shape[1] * 2

    def dispatch(self) -> None:
        from projection.scan_kernels import scatter_to

        self.barrier(channel=0)
        for step in range(self.ranks):  # each rank begins with another one
            rank = (self.rank + step) % self.ranks
            scatter_to(self.source, self.index[rank], self.peers[rank])
        self.barrier(channel=1)

    def combine(self) -> None:
        from projection.scan_kernels import sum_from

        self.barrier(channel=0)
        sum_from(self.peers, self.goes, self.joined)
        self.barrier(channel=1)

    def check(self) -> float:
        """How far dispatch and combine of unchanged tokens lie from each token times its ranks, in parts."""
        self.held.zero_()
        self.dispatch()
        self.combine()
        wanted = self.source.float() * self.goes.sum(1, keepdim=True)
        return float((self.joined.float() - wanted).abs().max() / wanted.abs().max())


def together_ms(call: Callable[[], Any], at_most_s: float = 0.5) -> tuple[float, int]:
    """Median over batches of the slowest rank's time of one call; all ranks make as many calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    one = slowest(batch_ms(call, 3))
    iters = max(5, min(50, int(at_most_s / 5 / max(one / 1e3, 1e-5))))
    times = []
    for _ in range(5):
        dist.barrier()
        times.append(slowest(batch_ms(call, iters)))
    return sorted(times)[2], iters


def slowest(ms: float) -> float:
    found = torch.tensor([ms], device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def direct(tokens: int, active: int, width: int) -> dict[str, Any]:
    """Dispatch and combine between memories, each token once a rank."""
    exchange = Exchange(tokens, active, width)
    off = exchange.check()
    dispatch_ms, iters = together_ms(exchange.dispatch)
    combine_ms, _ = together_ms(exchange.combine)
    barrier_ms, _ = together_ms(lambda: exchange.barrier(channel=0))
    return {
        "dispatch_ms": dispatch_ms,
        "combine_ms": combine_ms,
        "barrier_ms": barrier_ms,
        "sent_bytes": exchange.sent_bytes,
        "largest_error": off,
        "iters": iters,
    }


def nccl(tokens: int, active: int, width: int) -> dict[str, Any]:
    """all_to_all_single of every copy; its part for the own rank is copied, as in training."""
    rows = tokens * active
    source = torch.randn(rows, width, device="cuda", dtype=BF16)
    target = torch.empty_like(source)
    ms, iters = together_ms(lambda: dist.all_to_all_single(target, source))
    ranks = dist.get_world_size()
    return {"dispatch_ms": ms, "sent_bytes": rows * width * 2 * (ranks - 1) // ranks, "iters": iters}


def cases() -> Iterator[Case]:
    for tokens, active, width in CASES:
        for kind, run in (("direct", direct), ("nccl", nccl)):
            case = {"kind": kind, "tokens": tokens, "active": active, "width": width}
            case["ranks"] = dist.get_world_size()
            yield case, partial(run, tokens, active, width)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="no case begins after that")
    options = parser.parse_args()
    need_gpus(2)
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    measure(cases(), options.output, options.seconds, speaks=dist.get_rank() == 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
