"""Microseconds of the host that fingerprints take on a device, by part.

python benchmarks/hazards/fingerprint_cost.py
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from aorta.check.device_order import DeviceOrder
from aorta.check.fingerprints import fingerprints, numbers
from aorta.check.numbering import Numbering, _unseen


def micros(run: Callable[[], Any], times: int = 300) -> float:
    for _ in range(20):
        run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        run()
    taken = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e6 * taken / times


def main() -> None:
    order, numbering = DeviceOrder([], lambda _: 0), Numbering(str)
    one = torch.randn(64 * 1024, device="cuda")
    many = [torch.randn(n, device="cuda") for n in (64, 256, 64 * 256, 64) * 7]
    numbering.order = order
    unseen: Any = _unseen(lambda _, run: run())
    for is_listening in (False, True):
        if is_listening:
            order.listen()
        parts = {
            "the context alone": lambda: unseen(numbering, lambda: None),
            "one tensor": lambda: fingerprints([one]),
            "one tensor, in the context": lambda: unseen(numbering, lambda: fingerprints([one])),
            "two parts, in the context": lambda: unseen(numbering, lambda: fingerprints([one], 2)),
            "28 tensors": lambda: fingerprints(many),
            "28 tensors, in the context": lambda: unseen(numbering, lambda: fingerprints(many)),
            "numbers of 28 tensors": lambda: numbers([fingerprints(many)]),
        }
        for name, run in parts.items():
            print(f"{'in a window' if is_listening else 'outside':12} {name:30} {micros(run):8.1f} us")
    order.stop()


if __name__ == "__main__":
    main()
