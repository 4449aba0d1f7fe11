"""Kernels of mixtures and hybrids: the model beside a sheet of measured ones.

    python benchmarks/projection/mixture_sheets.py benchmarks/results/mixtures_and_hybrids_h100.csv --gpu h100

A kernel shorter than 0.12 ms is left out: through autograd the host takes as long to launch it. Needs no GPU.
"""

import argparse
import csv
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from aorta.hardware import load_hardware
from aorta.projection.collectives import collective_time, rank_group
from aorta.projection.layers import block
from aorta.projection.model import ExpertShape, Model, StateSpace
from aorta.projection.ops import AttentionOp, GemmOp, Op
from aorta.projection.plan import Plan
from aorta.projection.prices import Pricer

LEAST_MS = 0.12
Compared = tuple[str, float, float]
"""Kind, projected and measured ms."""


def compared(path: Path, gpu: str) -> list[Compared]:
    """Every kernel of a sheet that is long enough to be the device's own time."""
    pricer = Pricer(load_hardware(gpu), Plan(gpus_per_node=1, global_batch_size=1))
    with path.open(encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if not line.get("error")]
    found = (one for line in lines for one in _of_line(line, pricer))
    return [one for one in found if one[2] >= LEAST_MS]


def _of_line(line: dict[str, str], pricer: Pricer) -> Iterator[Compared]:
    def number(name: str) -> int:
        return int(float(line[name]))

    def ms(op: Op) -> float:
        return pricer.price(op).seconds * 1e3

    kind = line["kind"]
    if kind == "grouped":
        experts, tokens, n, k = (number(name) for name in ("experts", "tokens_per_expert", "n", "k"))
        forward = GemmOp("experts", "forward", tokens, n, k, "TN", "bf16", experts)
        dgrad = forward._replace(phase="dgrad", n=k, k=n, layout="NN")
        wgrad = forward._replace(phase="wgrad", m=n, n=k, k=tokens, layout="NT")
        for name, op in (("forward", forward), ("dgrad", dgrad), ("wgrad", wgrad)):
            yield f"grouped {name}", ms(op) / pricer.factors.gemm, float(line[f"{name}_ms"])
    elif kind in ("scan", "convolution"):
        forward_ops, backward_ops = _state_space(line)
        yield f"{kind} forward", ms(forward_ops[kind]), float(line["forward_ms"])
        if kind == "scan":
            yield "scan backward", ms(backward_ops["scan_grad"]), float(line["backward_ms"])
    elif kind == "permute":
        ops = _routed(number("tokens"), number("active"), number("width"))
        yield "permute", ms(ops["permute"]), float(line["permute_ms"])
        yield "unpermute", ms(ops["unpermute"]), float(line["unpermute_ms"])
    elif kind in ("direct", "nccl"):
        ranks, sent = number("ranks"), number("sent_bytes")
        exchange = collective_time(
            "all_to_all",
            sent * ranks / (ranks - 1),
            rank_group(ranks, pricer.hardware),
            pricer.hardware,
            "pxn" if kind == "direct" else "auto",
        )
        for name in ("dispatch", "combine"):
            if line.get(f"{name}_ms"):
                yield f"{kind} {name}", exchange.time_s * 1e3, float(line[f"{name}_ms"])
    elif kind == "latent" and line["backend"] == "cudnn":
        heads, seq = number("heads"), number("seq")
        products = AttentionOp("attention", "forward", number("batch"), seq, seq, heads, heads, 192, 128)
        yield "latent forward", ms(products), float(line["forward_ms"])
        backwards = products._replace(phase="dgrad", backward=True, launches=3)
        yield "latent backward", ms(backwards), float(line["backward_ms"])


def _state_space(line: dict[str, str]) -> tuple[dict[str, Op], dict[str, Op]]:
    """Operations by name of a layer that holds the scan of a line."""
    heads, groups, width, state = (int(line[name]) for name in ("heads", "groups", "head_dim", "state"))
    shape = StateSpace(num_heads=heads, value_dim=width, key_dim=state, num_key_heads=groups)
    work = block(
        _model(state=shape, pattern="M"),
        Plan(gpus_per_node=1, micro_batch_size=int(line["batch"]), seq_len=int(line["seq"])),
        "state",
    )
    return {op.name: op for op in work.forward}, {op.name: op for op in work.backward}


def _routed(tokens: int, active: int, width: int) -> dict[str, Op]:
    """Operations by name of a layer of experts of that width."""
    experts = ExpertShape(num_experts=64, num_active=active, ffn=1024)
    work = block(_model(width, experts=experts), Plan(gpus_per_node=1, seq_len=tokens), "moe")
    return {op.name: op for op in work.forward}


def _model(hidden: int = 4096, **further: object) -> Model:
    usual = {"num_layers": 1, "num_heads": 16, "num_kv_heads": 16, "ffn": 1024, "vocab_size": 1024}
    return Model(name="sheet", source="a sheet of kernels", hidden=hidden, **(usual | further))  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sheet", type=Path)
    parser.add_argument("--gpu", default="h100")
    options = parser.parse_args()
    kinds: dict[str, list[float]] = defaultdict(list)
    for kind, projected, measured in compared(options.sheet, options.gpu):
        kinds[kind].append(projected / measured - 1)
    kinds["all"] = [error for errors in kinds.values() for error in errors]
    for kind, errors in kinds.items():
        sizes = np.abs(errors)
        print(
            f"{kind:20s}{len(errors):4d} kernels   {100 * np.median(sizes):5.1f} /"
            f"{100 * np.quantile(sizes, 0.9):6.1f} %   bias {100 * np.median(errors):+.1f} %"
        )


if __name__ == "__main__":
    main()
