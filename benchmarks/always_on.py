"""What stays on in steps that the overhead leaves out? All hooks on and off in turn, in one process.

    python -m aorta run -o /tmp/run --no-report -- python benchmarks/always_on.py

A loop of 0.3 ms. Blocks of steps take turns: as `aorta run` has it, without the notes of the host, without
the step's end, without the writing of lines, and with nothing of aorta's in the training thread. Rows: the
middle over blocks of each block's lower fifth, which other programs on the machine hardly touch. At last what
run.json would say of the 4000 steps before, which nothing has disturbed.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from aorta.attach import hooks

ROUNDS, STEPS, WARM = 25, 150, 10


def loop() -> Callable[[int], list[float]]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x = torch.nn.Linear(256, 256), torch.randn(32, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    def steps(number: int) -> list[float]:
        lengths_s = []
        for _ in range(number):
            start_s = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            lengths_s.append(time.perf_counter() - start_s)
        return lengths_s

    return steps


def main() -> None:
    steps = loop()
    steps(4000)
    attachment = hooks.attachment
    assert attachment is not None, "run this under `aorta run`"
    session = attachment.session
    recorder = session._recorder
    stated = recorder._sampling.record()
    watch, sink = recorder._sources.host_watch, recorder._output._sink

    @contextmanager
    def instead(owner: object, name: str, stub: object) -> Iterator[None]:
        setattr(owner, name, stub)
        yield
        delattr(owner, name)

    @contextmanager
    def without_notes() -> Iterator[None]:
        watch.uninstall()
        yield
        watch.install()

    @contextmanager
    def bare() -> Iterator[None]:
        with without_notes():
            modules: tuple[Any, ...] = (torch.autograd, torch.autograd.graph)
            engine = modules[1]._engine_run_backward
            registered: list[tuple[Any, Any]] = [
                (kept, dict(kept))
                for kept in (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
            ]
            for module in modules:
                module._engine_run_backward = engine.__wrapped__
            for kept, _ in registered:
                kept.clear()
            yield
            for kept, before in registered:
                kept.update(before)
            for module in modules:
                module._engine_run_backward = engine

    kinds: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "as it is": nullcontext,
        "without the step's end": lambda: instead(session, "optimizer_ended", lambda *_: None),
        "without notes of the host": without_notes,
        "without lines": lambda: instead(sink, "_put_left_out", lambda *_: None),
        "bare": bare,
    }
    lower_us: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(ROUNDS):
        for kind, context in kinds.items():
            with context():
                steps(WARM)
                lengths_s = sorted(steps(STEPS))
            steps(WARM)
            lower_us[kind].append(1e6 * lengths_s[STEPS // 5])
    for kind, values in lower_us.items():
        print(f"{kind:28}{statistics.median(values):8.1f} us   {min(values):8.1f} us the quickest block")
    low, high = (1e3 * end * stated.always_on_ms / stated.always_on for end in stated.always_on_interval)
    print(f"run.json: {1e3 * stated.always_on_ms:.1f} us a step stay on [{low:.1f}, {high:.1f}]")


if __name__ == "__main__":
    main()
