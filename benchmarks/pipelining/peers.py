"""Buffers that every rank can address, and signals between ranks that ride on them; one set a bench.

The buffers are torch's symmetric memory, without multicast. Constructing them is collective: all ranks must
construct the same ones in the same order. Signals are flags in memory that streams write and wait for by the
driver's stream memory operations, which occupy no compute unit: a wait that is a kernel would need a place on
the device, which a matrix multiply that fills it does not leave.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from aorta.device.streams import DeviceStreams
from aorta.programs.execute.collectives import gathered
from aorta.programs.execute.strategies import StrategyBench, need_symmetric_memory
from aorta.programs.language.expr import HostProgramError

HANDSHAKE_S = 2.0
"""Seconds in which the flags of all peers must have arrived."""
SIGNAL_BYTES = 4
WAIT_GREATER_EQUAL = 0
"""CU_STREAM_WAIT_VALUE_GEQ."""
WRITE_AFTER_EARLIER_WORK = 0
"""Default flags: the value is written when all earlier work of the stream is visible to everybody."""

SIGNAL_SLOTS = 256
"""Flags per sending rank, shared by all strategies of a bench."""


class Peers:
    """What strategies of one bench share: buffers by name and shape, signals for the bench's streams."""

    def __init__(self, bench: StrategyBench) -> None:
        self.bench = bench
        self._buffers: dict[tuple[str, tuple[int, ...]], SymmetricBuffer] = {}
        self._signals: FlagSignals | None = None

    def symmetric(self, name: str, shape: tuple[int, ...]) -> "SymmetricBuffer":
        """A buffer that all ranks address; the same one for the same name and shape.

        Collective when it is asked for the first time. Raises HostProgramError, or an error of torch's, where
        there is none.
        """
        bench = self.bench
        need_symmetric_memory(bench.device)
        if (name, shape) not in self._buffers:
            buffer = SymmetricBuffer(shape, bench.problem.dtype, bench.device, bench.group)
            self._buffers[name, shape] = buffer
        return self._buffers[name, shape]

    def signals(self, num_slots: int) -> "FlagSignals":
        """Signals between the ranks, which strategies use in turns. Collective; raises like symmetric()."""
        bench = self.bench
        need_symmetric_memory(bench.device)
        if num_slots > SIGNAL_SLOTS:
            raise HostProgramError(f"{num_slots} signals per rank are more than {SIGNAL_SLOTS} flags")
        if self._signals is None:
            assert isinstance(bench.streams, DeviceStreams)
            control = bench.control or bench.group
            self._signals = FlagSignals(SIGNAL_SLOTS, bench.streams, bench.device, bench.group, control)
        return self._signals


class SymmetricBuffer:
    """One buffer per rank, each readable and writable by all ranks."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        need_symmetric_memory(device)
        self.local = symmetric_memory.empty(*shape, dtype=dtype, device=device)
        self.handle: Any = symmetric_memory.rendezvous(self.local, group)
        if self.handle is None:
            raise HostProgramError("symmetric memory could not be shared: no peer access between the GPUs")
        self.group = group
        self.rank = dist.get_rank(group)
        self.of_rank: list[torch.Tensor] = [
            self.local if peer == self.rank else self.handle.get_buffer(peer, shape, dtype)
            for peer in range(dist.get_world_size(group))
        ]
        """Buffers by rank, as this rank addresses them."""


class FlagSignals:
    """Signals between ranks: numbers that grow by one per call, written and awaited without a kernel."""

    def __init__(
        self,
        num_slots: int,
        streams: DeviceStreams,
        device: torch.device,
        group: dist.ProcessGroup,
        control: dist.ProcessGroup,
    ) -> None:
        """num_slots: per sending rank. control: for agreements between hosts.

        Raises HostProgramError, on every rank, where flags written to a peer do not arrive.
        """
        self.num_slots = num_slots
        self.streams = streams
        ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        problem, self.memory = _stream_memory()
        # One more slot per sender for the handshake below.
        self.buffer = SymmetricBuffer((ranks, num_slots + 1), torch.int32, device, group)
        self.buffer.local.zero_()
        # No peer may write a flag before the zeros are there.
        torch.cuda.synchronize(device)
        dist.barrier(group=control)
        self.epoch = 0
        _raise_first(gathered(problem, control))
        _raise_first(gathered(self._handshake(device, group), control))

    def begin(self) -> None:
        """Begin a new call, whose signals are newer than all before."""
        self.epoch += 1

    def put(self, stream: int, peer: int, slot: int) -> None:
        """Signal peer once everything before on the stream is done and visible to it."""
        assert self.memory is not None
        self.memory.write(self.streams.raw(stream), self._address(peer, self.rank, slot), self.epoch)

    def wait(self, stream: int, sender: int, slot: int) -> None:
        """Make later work of the stream follow the sender's put of this call."""
        assert self.memory is not None
        self.memory.wait(self.streams.raw(stream), self._address(self.rank, sender, slot), self.epoch)

    def _address(self, owner: int, sender: int, slot: int) -> int:
        flags = self.buffer.of_rank[owner]
        return flags.data_ptr() + SIGNAL_BYTES * (sender * (self.num_slots + 1) + slot)

    def _handshake(self, device: torch.device, group: dist.ProcessGroup) -> str | None:
        """Write one flag to every peer and look for theirs from the host, which cannot hang.

        Returns the problem, or None where all have arrived.
        """
        stream, memory = torch.cuda.current_stream(device), self.memory
        assert memory is not None
        ranks = range(dist.get_world_size(group))
        try:
            for peer in ranks:
                memory.write(stream, self._address(peer, self.rank, self.num_slots), 1)
        except HostProgramError as error:
            return str(error)
        deadline_s = time.monotonic() + HANDSHAKE_S
        while time.monotonic() < deadline_s:
            if bool((self.buffer.local[:, self.num_slots] == 1).all()):
                return None
            time.sleep(0.001)
        return f"flags of other ranks did not arrive within {HANDSHAKE_S:.0f} s"


class StreamMemory:
    """The driver's write and wait operations on 32-bit values of device memory, a peer's included."""

    def __init__(self) -> None:
        """Raise HostProgramError where the driver has none."""
        if torch.version.hip:
            raise HostProgramError("HIP waits on signal memory only, which a peer cannot map")
        self._write = _function("cuStreamWriteValue32_v2")
        self._wait = _function("cuStreamWaitValue32_v2")

    def write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Queue a write of value, which happens once everything before it is done and visible."""
        _check(
            self._write(
                ctypes.c_void_p(stream.cuda_stream),
                ctypes.c_uint64(address),
                ctypes.c_uint32(value),
                ctypes.c_uint(WRITE_AFTER_EARLIER_WORK),
            ),
            "writing a flag",
        )

    def wait(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Make later work of the stream follow the flag reaching value; the comparison is cyclic."""
        _check(
            self._wait(
                ctypes.c_void_p(stream.cuda_stream),
                ctypes.c_uint64(address),
                ctypes.c_uint32(value),
                ctypes.c_uint(WAIT_GREATER_EQUAL),
            ),
            "waiting for a flag",
        )


def driver() -> ctypes.CDLL:
    """The CUDA driver's library. Raises HostProgramError where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise HostProgramError("the CUDA driver (libcuda.so.1) cannot be loaded") from None


def _function(name: str) -> Callable[..., Any]:
    function = getattr(driver(), name, None)
    if function is None:
        raise HostProgramError(f"the CUDA driver has no {name}: it is older than 11.7")
    function.restype = ctypes.c_int
    narrowed: Callable[..., Any] = function
    return narrowed


def _check(status: int, call: str) -> None:
    if status != 0:
        raise HostProgramError(f"{call} failed with CUDA driver status {status}")


def _stream_memory() -> tuple[str | None, StreamMemory | None]:
    """The operations, or the problem why there are none: the ranks agree before one of them raises."""
    try:
        return None, StreamMemory()
    except HostProgramError as error:
        return str(error), None


def _raise_first(problems: list[str | None]) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise HostProgramError(f"rank {rank}: {problem}")
