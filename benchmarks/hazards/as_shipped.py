"""Two orders that torch itself lacks, shown without aorta: one stream of a training loop is slow, and the
numbers change.

torchrun --nproc-per-node 2 benchmarks/hazards/as_shipped.py
aorta check -- torchrun --nproc-per-node 2 benchmarks/hazards/as_shipped.py --check fsdp2_hook [--mended]

fsdp2_hook  `set_all_reduce_hook` with a stream, where gradients are reduced in another precision than that
            of the parameters. The hook's stream is slow. Mended: the hook calls `record_stream` on what it is
            given.
ddp_mixed   DistributedDataParallel with its private `mixed_precision`. Slow is the optimizer, or the stream
            on which gradients are cast. Mended: the stream that casts parameters waits for the caller's, and
            gradients are recorded on the stream that casts them.

Each form runs six times from the same weights on the same batches: twice mended, twice as it is, with one
stream slow, and slow but mended. A line for each says how far losses, gradients and parameters are from the
first run's. With --check one form trains as it is, nothing is slow, and nothing is compared.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from programs import WIDTH, Net, batch  # type: ignore[import-not-found]  # of this folder
from torch import nn

NUM_STEPS = 6
SLOW_CYCLES = 60_000_000
"""About 30 ms."""
Tensor = Any
Seen = dict[str, list[Tensor]]


@dataclass
class How:
    is_slow: bool = False
    is_mended: bool = False
    num_steps: int = NUM_STEPS
    is_kept: bool = True
    """Keep the gradients of all steps."""


def slow_down(stream: Any) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW_CYCLES)


def fsdp2_hook(how: How, own_group: bool) -> Seen:
    """own_group: the hook has a communicator of its own, as replicas have; else FSDP2's, which NCCL keeps in
    order, and what is slow comes behind the hook's all-reduce."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, size = Net().cuda(), dist.get_world_size()
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    stream, group = torch.cuda.Stream(), dist.new_group() if own_group else None

    def hook(grad: Tensor) -> None:
        if how.is_mended:
            grad.record_stream(stream)
        if how.is_slow and own_group:
            slow_down(stream)
        dist.all_reduce(grad.div_(size), group=group)
        if how.is_slow and not own_group:
            slow_down(stream)

    for module in (*model.blocks, model):
        module.set_all_reduce_hook(hook, stream=stream)
    return train(how, model, lambda p: p.grad.to_local(), lambda p: p.to_local())


def ddp_mixed(how: How, what: str, **options: Any) -> Seen:
    """what: what is slow, the optimizer or the cast of gradients."""
    from torch.distributed.algorithms.ddp_comm_hooks import mixed_precision_hooks as hooks
    from torch.nn.parallel.distributed import _MixedPrecision

    shipped: Callable[..., torch.futures.Future[torch.Tensor]] = hooks._reducer_allreduce_and_upcast_hook

    # DDP asks for these annotations.
    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        if how.is_mended:
            for parameter in bucket.parameters():
                parameter.grad.record_stream(state.upcast_stream)
        if how.is_slow and what == "cast":
            slow_down(state.upcast_stream)
        return shipped(state, bucket)

    hooks._reducer_allreduce_and_upcast_hook = hook
    try:
        model = nn.parallel.DistributedDataParallel(
            Net().cuda(),
            device_ids=[torch.cuda.current_device()],
            mixed_precision=_MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16),
            **options,
        )
    finally:
        hooks._reducer_allreduce_and_upcast_hook = shipped
    copies: Any = model._mp_stream

    def before_step() -> None:
        if how.is_mended:
            copies.wait_stream(torch.cuda.current_stream())

    def before_optimizer() -> None:
        if how.is_slow and what == "optimizer":
            slow_down(torch.cuda.current_stream())

    return train(how, model, lambda p: p.grad, lambda p: p, before_step, before_optimizer)


def train(
    how: How,
    model: nn.Module,
    gradient: Callable[[Tensor], Tensor],
    value: Callable[[Tensor], Tensor],
    before_step: Callable[[], None] = lambda: None,
    before_optimizer: Callable[[], None] = lambda: None,
) -> Seen:
    """Train; the host never waits for the device."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen: Seen = {"losses": [], "gradients": []}
    batches = [batch(n) for n in range(how.num_steps)]
    torch.cuda.synchronize()
    for x, y in batches:
        before_step()
        loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        seen["losses"].append(loss.detach())
        if how.is_kept:
            seen["gradients"] += [gradient(p).float().clone() for p in model.parameters()]
        before_optimizer()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    seen["parameters"] = [value(p.detach()).float() for p in model.parameters()]
    return seen


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Norm of the difference over the first's norm; nan where one has a NaN."""
    apart = torch.stack([(x.double() - y.double()).norm() for x, y in zip(a, b, strict=True)])
    return float(apart.norm() / torch.stack([x.double().norm() for x in a]).norm())


FORMS: dict[str, Callable[[How], Seen]] = {
    "fsdp2_hook, slow hook of another group": lambda how: fsdp2_hook(how, own_group=True),
    "fsdp2_hook, slow behind its all-reduce": lambda how: fsdp2_hook(how, own_group=False),
    "ddp_mixed, slow optimizer": lambda how: ddp_mixed(how, "optimizer"),
    "ddp_mixed, slow cast": lambda how: ddp_mixed(how, "cast"),
    "ddp_mixed, slow cast, gradients in buckets": lambda how: ddp_mixed(
        how, "cast", gradient_as_bucket_view=True
    ),
}


ROWS = {
    "mended": How(is_mended=True),
    "mended, again": How(is_mended=True),
    "as it is": How(),
    "as it is, again": How(),
    "slow": How(is_slow=True),
    "slow, mended": How(is_slow=True, is_mended=True),
}


def compare() -> None:
    """Run each form in all ways; print what differs from the first, which lacks no order."""
    is_told = dist.get_rank() == 0
    if is_told:
        print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {WIDTH} wide, {NUM_STEPS} steps")
        print("norm of what differs from `mended`, of its norm, and the first step in which it does")
    for name, run in FORMS.items():
        first: Seen = {}
        for row, how in ROWS.items():
            torch.manual_seed(0)
            try:
                seen = run(how)
            except Exception as error:
                if is_told:
                    print(f"{name:44} {row:16} {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            first = first or seen
            if is_told and seen is not first:
                far = "  ".join(f"{what} {difference(first[what], seen[what])}" for what in first)
                print(f"{name:44} {row:16} {far}", flush=True)
        if is_told and first:
            losses = " ".join(f"{float(loss):.4f}" for loss in first["losses"])
            print(f"{name:44} losses, mended   {losses}", flush=True)


def difference(a: list[Tensor], b: list[Tensor]) -> str:
    """How far apart, and the first step: 0 where all bits agree."""
    places = [n for n, (x, y) in enumerate(zip(a, b, strict=True)) if not torch.equal(x, y)]
    step = f"({places[0] * NUM_STEPS // len(a)})" if places else ""
    return f"{distance(a, b) if places else 0:9.3g} {step:3}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", choices=("fsdp2_hook", "ddp_mixed"))
    parser.add_argument("--mended", action="store_true")
    parser.add_argument("--steps", type=int, default=36)
    arguments = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    if arguments.check is None:
        compare()
    else:
        how = How(is_mended=arguments.mended, num_steps=arguments.steps, is_kept=False)
        next(run for name, run in FORMS.items() if name.startswith(arguments.check))(how)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
