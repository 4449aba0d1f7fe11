"""Work captured once as a CUDA or HIP graph and replayed on the stream that it was captured on."""

from collections.abc import Callable

import torch

from aorta.device.streams import DeviceStreams
from aorta.queues.workload import Context


def graphs_refusal(is_asked: bool, device_type: str) -> str | None:
    if is_asked and device_type == "cpu":
        return "--graphs captures CUDA or HIP graphs and this device is a CPU; leave it out"
    return None


def stream_of(context: Context, stream: int) -> torch.cuda.Stream:
    """torch's own."""
    assert isinstance(context.streams, DeviceStreams)
    return context.streams.raw(stream)


def capture(work: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """The work as a graph, to be replayed on this stream: it keeps the stream's workspace of the matrix
    library, which graphs on other streams must not share. `work` allocates nothing."""
    torch.cuda.synchronize(stream.device)
    with torch.cuda.stream(stream):
        work()  # libraries initialise themselves outside the capture
    torch.cuda.synchronize(stream.device)
    graph = torch.cuda.CUDAGraph()
    # Other threads (NCCL's watchdog) may query events meanwhile: that must not end the capture.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph
