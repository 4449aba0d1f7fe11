"""Any capturable strategy as one graph: the host submits once, whatever is in it."""

from collections.abc import Callable
from dataclasses import replace

import torch

from aorta.programs.execute.runtime.capture_stream import capture_stream
from aorta.programs.execute.strategies.base import (
    Strategy,
    StrategyBench,
    StrategyUnavailable,
    first_line,
    strategy_streams,
)


class Graphed(Strategy):
    """Replays a capture of another strategy's submit."""

    def __init__(self, bench: StrategyBench, make: Callable[[StrategyBench], Strategy]) -> None:
        """make builds the strategy on the streams that are captured. Raises Unavailable where capturing
        fails."""
        if not bench.on_device:
            raise StrategyUnavailable("a graph needs a device")
        stream = capture_stream(bench.device)
        stream.wait_stream(torch.cuda.current_stream(bench.device))
        with torch.cuda.stream(stream):
            inner_bench = replace(bench, streams=strategy_streams(bench.side, bench.device))
            self.inner = make(inner_bench)
            self.inner.submit()  # what is made at a first call must not be made in a capture
        torch.cuda.synchronize(bench.device)
        super().__init__(bench, **self.inner.settings)
        self.name = f"graph of {self.inner.name}"
        self.note = self.inner.note
        self.transport = self.inner.transport
        self.graph = torch.cuda.CUDAGraph()
        try:
            # Only this thread: the process group's watchdog asks for events all the time.
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.inner.submit()
        except RuntimeError as error:
            raise StrategyUnavailable(f"capture failed: {first_line(error)}") from None

    def submit(self) -> None:
        self.bench.submit(self.graph.replay)

    def result(self) -> torch.Tensor:
        return self.inner.result()

    def expected(self, product: torch.Tensor) -> torch.Tensor:
        return self.inner.expected(product)

    def poison(self) -> None:
        self.inner.poison()

    def operands_changed(self) -> None:
        self.inner.operands_changed()

    def close(self) -> None:
        self.graph.reset()
        self.inner.close()
