"""What the rank processes of the GPU tests run: each on its own GPU, in an NCCL group."""

import faulthandler
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import aorta
from aorta.check.watch import HazardWatch
from aorta.hazards.findings import read_checked
from aorta.merge.lines import match_kernels
from aorta.record.interception.stalls import ASK_EVERY
from aorta.records.reader import read_run, read_steps
from aorta.records.schema import StepRecord
from aorta.traces.kineto import read_kineto
from tests.record.learned_steps import of_flight_recorder
from tests.record.sampled import record_every


def enter(
    rank: int, world_size: int, store: str, results: Any, function: Callable[..., Any], args: Any
) -> None:
    """store: path of the file by which the ranks meet; a port could be taken by somebody else meanwhile."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    faulthandler.dump_traceback_later(100, exit=True)  # a rank that hangs says where
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=world_size, device_id=device
    )
    try:
        results.put((rank, function(*args)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def ones(num: int = 1 << 20) -> torch.Tensor:
    return torch.ones(num, device="cuda")


def _size() -> int:
    return dist.get_world_size()


def _sync() -> None:
    x = ones()
    dist.all_reduce(x)
    assert bool((x == _size()).all())


def _async() -> None:
    x = ones()
    work = dist.all_reduce(x, dist.ReduceOp.SUM, None, True)
    assert work is not None
    work.wait()
    assert bool((x == _size()).all())


def _premul_sum() -> None:
    x = ones()
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    assert bool((x == 0.5 * _size()).all())
    out = torch.empty((1 << 20) // _size(), device="cuda")
    dist.reduce_scatter_tensor(out, ones(), dist._make_nccl_premul_sum(2.0))
    assert bool((out == 2.0 * _size()).all())


def _gather_and_scatter() -> None:
    x = ones()
    gathered = [torch.empty_like(x) for _ in range(_size())]
    dist.all_gather(gathered, x)
    assert all(bool((part == 1).all()) for part in gathered)
    whole = torch.empty(x.numel() * _size(), device="cuda")
    dist.all_gather_into_tensor(whole, x)
    part = torch.empty_like(x)
    dist.reduce_scatter_tensor(part, whole)
    assert bool((part == _size()).all())


def _rooted() -> None:
    x = ones() * (dist.get_rank() + 1)
    dist.broadcast(x, 0)
    assert bool((x == 1).all())
    dist.reduce(x, 0)


def _all_to_all() -> None:
    n = 1 << 18
    sent = torch.full((n * _size(),), float(dist.get_rank()), device="cuda")
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    assert received.view(_size(), n)[:, 0].tolist() == list(range(_size()))
    work = dist.all_to_all_single(received, sent, async_op=True)
    assert work is not None
    work.wait()


def _coalesced() -> None:
    a, b = ones(), ones(1 << 18)
    with dist._coalescing_manager(device=torch.device("cuda", torch.cuda.current_device())):
        dist.all_reduce(a)
        dist.all_reduce(b)
    assert bool((a == _size()).all())
    assert bool((b == _size()).all())
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    assert bool((b == _size() ** 2).all())


def _batched_p2p() -> None:
    rank = dist.get_rank()
    received = torch.zeros(1 << 18, device="cuda")
    sent = torch.full((1 << 18,), float(rank), device="cuda")
    operations = [
        dist.P2POp(dist.isend, sent, (rank + 1) % _size()),
        dist.P2POp(dist.irecv, received, (rank - 1) % _size()),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    assert bool((received == (rank - 1) % _size()).all())


def _functional_and_compiled() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    assert bool((body(ones()) == 2 * _size() + 1).all())
    assert bool((torch.compile(body, backend="aot_eager")(ones()) == 2 * _size() + 1).all())


def _objects_and_barrier() -> None:
    gathered: list[Any] = [None] * _size()
    dist.all_gather_object(gathered, dist.get_rank())
    assert gathered == list(range(_size()))
    dist.barrier()


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).cuda()


def _ddp() -> None:
    model = DistributedDataParallel(_network(), bucket_cap_mb=4)
    model(torch.ones(64, 1024, device="cuda")).sum().backward()


def _fsdp() -> None:
    mesh = init_device_mesh("cuda", (_size(),))
    model = _network()
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(64, 1024, device="cuda")).sum().backward()


PATHS = [
    _sync, _async, _premul_sum, _gather_and_scatter, _rooted, _all_to_all, _coalesced, _batched_p2p,
    _functional_and_compiled, _objects_and_barrier, _ddp, _fsdp,
]  # fmt: skip


def every_kernel_has_one_record(placement: Any) -> dict[str, Any]:
    """Run every path in a step of its own under a kernel trace; what has no partner, per path."""
    for path in PATHS:
        path()  # communicators and compiled code are made before the window
    records: list[StepRecord] = []
    with tempfile.TemporaryDirectory() as folder:
        with aorta.instrument(folder, placement=placement, kernels="off") as recorder:
            recorder.on_record(records.append)
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                for _ in range(2):  # the profiler may miss kernels at its start
                    with recorder.step():
                        _sync()
                    torch.cuda.synchronize()
                for path in PATHS:
                    with recorder.step():
                        path()
                    torch.cuda.synchronize()
                with recorder.step():
                    _sync()
                torch.cuda.synchronize()
        trace_path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace_path))
        trace = read_kineto(trace_path)
    by_path = {}
    for path, record in zip(PATHS, records[2:-1], strict=True):
        coverage = match_kernels([record], trace)
        by_path[path.__name__] = {
            "matched": len(coverage.matched),
            "records_without_kernel": coverage.records_without_kernel,
            "kernels_without_record": coverage.kernels_without_record,
            "untimed": [c.op for c in record.collectives or () if c.end_ms is None],
        }
    return by_path


def memory_is_not_reused_early(placement: Any) -> int:
    """Drop an asynchronous collective's input and overwrite freed memory before it has ended.

    Without the stash that a work keeps, the allocator would hand the block out while NCCL reads it.
    """
    wrong = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        aorta.instrument(folder, placement=placement, kernels="off") as recorder,
    ):
        for _ in range(20):
            with recorder.step():
                out = torch.empty((1 << 24) * _size(), device="cuda")
                source = ones(1 << 24)
                work = dist.all_gather_into_tensor(out, source, async_op=True)
                del source
                for _ in range(4):
                    torch.full((1 << 24,), -1.0, device="cuda")  # takes a freed block, if there is one
                assert work is not None
                work.wait()
                wrong += int((out != 1).sum())
    return wrong


def copies_of_inputs_are_not_reused_early(placement: Any) -> int:
    """A list reduce-scatter reads a copy of its inputs that only torch's work keeps."""
    wrong = 0
    num = 1 << 24
    with (
        tempfile.TemporaryDirectory() as folder,
        aorta.instrument(folder, placement=placement, kernels="off") as recorder,
    ):
        for _ in range(20):
            with recorder.step():
                out = torch.empty(num, device="cuda")
                parts = [ones(num) for _ in range(_size())]
                first = dist.all_reduce(ones(1 << 26), async_op=True)  # the group is busy for a while
                work = dist.reduce_scatter(out, parts, async_op=True)
                for _ in range(4):
                    torch.full((num * _size(),), -1.0, device="cuda")  # takes a freed block, if there is one
                assert first is not None
                assert work is not None
                first.wait()
                work.wait()
                wrong += int((out != _size()).sum())
    return wrong


def peak_memory(placement: Any, seeks: bool) -> tuple[int, int]:
    """Peak bytes of 30 functional collectives in a row, without and with the instrument.

    seeks: look for the group's stream. Otherwise another stream waits for every collective.
    """

    def body() -> None:
        x = ones(1 << 22)
        for _ in range(30):
            x = functional.all_reduce(x, "sum", dist.group.WORLD) / _size()
        x.sum()

    def peak(run: Callable[[], None]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    body()
    without = peak(body)
    with (
        tempfile.TemporaryDirectory() as folder,
        aorta.instrument(folder, placement=placement, kernels="off") as recorder,
    ):

        def recorded() -> None:
            with recorder.step():
                body()

        group = dist.group.WORLD
        assert group is not None
        recorder.journal.group(group).sought = not seeks
        recorded()
        return without, peak(recorded)


def device_memory_growth(placement: Any) -> dict[str, int]:
    """Bytes of the device that are in use beside those of 20 steps without the instrument: in the first and
    in the sixtieth recorded step, and what of the latter torch's allocator has. Of all its processes.
    """
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(100))).cuda(), bucket_cap_mb=0.05
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        model(ones(64 * 64).view(64, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def used() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    for _ in range(20):
        step()
    before, reserved, growth = used(), torch.cuda.memory_reserved(), {}
    with (
        tempfile.TemporaryDirectory() as folder,
        aorta.instrument(folder, placement=placement, kernels="on") as recorder,
    ):
        for number in range(1, 61):
            with recorder.step():
                step()
            if number in (1, 60):
                growth[f"step {number}"] = used() - before
    return growth | {"reserved": torch.cuda.memory_reserved() - reserved}


def the_groups_stream(num_streams_before: int) -> tuple[bool, int, list[float]]:
    """Many asynchronous collectives behind work; whether their group's stream was found, how far torch's turn
    of streams moved, and by how many ms the ends marked on it differ from a stream's that waits."""
    made = [torch.cuda.Stream() for _ in range(num_streams_before)]
    turn = torch.cuda.Stream().cuda_stream
    following = [torch.cuda.Stream().cuda_stream for _ in range(31)]
    later: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        aorta.instrument(folder, placement="native", kernels="off") as recorder,
    ):
        x = ones(1 << 22)
        for _ in range(12):
            with recorder.step():
                for _ in range(8):
                    torch.cuda._sleep(4_000_000)  # 2 ms: the host is well ahead, and finds works pending
                    work = dist.all_reduce(x, async_op=True)
                    assert work is not None
                    work.wait()
            torch.cuda.synchronize()  # what the search compared in this step has passed by the next
        (group,) = [group for group in recorder.journal.groups() if group.name == "default"]
        waits = torch.cuda.Stream()
        for _ in range(5):  # as many on a rank that has not found it: its peer would wait for ever
            torch.cuda._sleep(40_000_000)  # longer than the host takes for what follows
            work = dist.all_reduce(x, async_op=True)
            assert work is not None
            on_own, on_waiting = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if group.own_stream is not None:
                on_own.record(group.own_stream.stream)
            with torch.cuda.stream(waits):
                work.wait()
                on_waiting.record()
            torch.cuda.synchronize()
            if group.own_stream is not None:
                later.append(on_own.elapsed_time(on_waiting))
        found = group.own_stream is not None
    drawn = torch.cuda.Stream().cuda_stream
    assert len(made) == num_streams_before
    return found, [turn, *following].index(drawn), later


def waits_for_events() -> tuple[dict[str, int], float]:
    """Marks per wait of the compute stream, and by how many ms the one that has to wait stops it."""
    side, compute = torch.cuda.Stream(), torch.cuda.current_stream()
    passed = side.record_event()
    torch.cuda.synchronize()
    num_marks: dict[str, int] = {}
    records: list[StepRecord] = []

    def count(name: str, wait: Callable[[], object]) -> None:
        assert recorder.journal.current is not None
        stalls = recorder.journal.current.stalls
        before = len(stalls)
        wait()
        num_marks[name] = sum(1 if stall.end is stall.start else 2 for stall in stalls[before:])

    with tempfile.TemporaryDirectory() as folder, aorta.instrument(folder, kernels="off") as recorder:
        recorder.on_record(records.append)
        with recorder.step():
            pass
        with recorder.step(global_step=ASK_EVERY):
            count("passed", passed.wait)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(side):
                start.record()
                torch.cuda._sleep(36_000_000)
                end.record()
            pending = side.record_event()
            count("pending", lambda: compute.wait_event(pending))
            count("other stream", lambda: side.wait_event(compute.record_event()))
            torch.cuda.synchronize()
            count("passed, by the stream", lambda: compute.wait_event(pending))
    scale = 20 / start.elapsed_time(end)  # whatever the clock rate of the sleep
    return num_marks, scale * float(records[1].overlap.stalled_ms or 0)


def a_collective_is_captured(placement: Any) -> tuple[float, list[str | None]]:
    """Capture an all-reduce within a step and replay it twice; the value, and why calls have no times."""
    x = ones(8)
    graph = torch.cuda.CUDAGraph()
    with (
        tempfile.TemporaryDirectory() as folder,
        aorta.instrument(folder, placement=placement, kernels="off") as recorder,
    ):
        with recorder.step():
            dist.all_reduce(ones(8))
            side = torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    dist.all_reduce(x)
                torch.cuda.current_stream().wait_stream(side)
                work = dist.all_reduce(x, async_op=True)
                assert work is not None
                work.wait()
            dist.all_reduce(ones(8))
            assert recorder.journal.current is not None
            reasons = [call.reason for call in recorder.journal.current.calls]
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
    return float(x[0]), reasons


def the_device_is_never_set(placement: Any) -> tuple[float, int, list[str | None], bool]:
    """All tensors name cuda:<rank> while cuda:0 is current, before and after."""
    torch.cuda.set_device(0)
    records: list[StepRecord] = []
    x = torch.ones(8, device=torch.device("cuda", dist.get_rank()))
    with (
        tempfile.TemporaryDirectory() as folder,
        aorta.instrument(folder, placement=placement, kernels="off") as recorder,
    ):
        recorder.on_record(records.append)
        for _ in range(2):
            with recorder.step():
                dist.all_reduce(x)
                work = dist.all_reduce(x, async_op=True)
                assert work is not None
                work.wait()
        current = torch.cuda.current_device()
    torch.cuda.synchronize(x.device)
    torch.cuda.set_device(dist.get_rank())
    reasons = [record.not_measured.get("overlap") for record in records]
    return float(x[0]), current, reasons, all(record.overlap.compute_ms is None for record in records)


def every_third_step_is_recorded(placement: Any) -> list[tuple[int, int, bool, bool, int]]:
    """Of each step: collectives, of these timed, whether overlap is known, or a reason is, waits seen."""
    records: list[StepRecord] = []
    num_marks = []
    x = ones()
    with (
        tempfile.TemporaryDirectory() as folder,
        record_every(aorta.instrument(folder, placement=placement, kernels="off"), 3) as recorder,
    ):
        recorder.on_record(records.append)
        pending = None
        for _ in range(7):
            with recorder.step():
                if pending is not None:
                    pending.wait()  # launched in one step, waited for in the next
                dist.all_reduce(x)
                torch.cuda.Stream().wait_stream(torch.cuda.current_stream())
                torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
                pending = dist.all_reduce(x, async_op=True)
                assert recorder.journal.current is not None
                num_marks.append(len(recorder.journal.current.stalls) + len(recorder.journal.current.waits))
        assert pending is not None
        pending.wait()
        torch.cuda.synchronize()
    return [
        (
            record.num_collectives,
            sum(call.end_ms is not None for call in record.collectives or ()),
            record.overlap.exposed_ms is not None,
            "overlap" in record.not_measured,
            marks,
        )
        for record, marks in zip(records, num_marks, strict=True)
    ]


def a_graph_is_captured_beside(placement: Any) -> float:
    """Capture a graph while steps are still being read, and replay it."""
    x = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with (
        tempfile.TemporaryDirectory() as folder,
        aorta.instrument(folder, placement=placement, kernels="off") as recorder,
    ):
        for _ in range(4):
            with recorder.step():
                torch.cuda._sleep(50_000_000)
                dist.all_reduce(ones())
        torch.cuda.synchronize()
        with recorder.step():
            torch.cuda._sleep(200_000_000)
        with torch.cuda.graph(graph):
            for _ in range(30):
                x += 1
                time.sleep(0.01)  # the reading thread asks the device meanwhile
    graph.replay()
    torch.cuda.synchronize()
    return float(x)


def memory_of_checked_steps() -> tuple[list[list[int]], int, list[str], list[Any]]:
    """Where the memory of each step lies, the steps 2 and 3 of which are checked; what the check says."""
    watch, folder = HazardWatch(every=100, confirm=False), Path(tempfile.mkdtemp())
    rank = dist.get_rank()
    watch.opened(SimpleNamespace(output_dir=folder, rank=rank, world_size=2, store_prefix=""))  # type: ignore[arg-type]
    model = DistributedDataParallel(_network())
    optimizer = torch.optim.AdamW(model.parameters())
    addresses = []
    for step in range(8):
        watch.step_begins(step)
        loss = model(ones(64 * 1024).view(64, 1024)).square().mean()
        loss.backward()
        own = [loss.data_ptr(), *(p.grad.data_ptr() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
        addresses.append([*own, ones(1000).data_ptr(), ones(3 << 20).data_ptr()])
    watch.closing(None)  # type: ignore[arg-type]
    checked = read_checked(folder)[0]
    return addresses, checked.num_compared, checked.blind, checked.differences


def _tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cuda", (_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)) for _ in range(3))
    ).cuda()
    for block in model.children():
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def _model_of(kind: str) -> tuple[nn.Module, int]:
    """The model and the width of its inputs."""
    if kind == "tp":
        return _tensor_parallel(), 512
    model = _network()
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=4), 1024
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)
    return model, 1024


NUM_LEARNED_STEPS = 100
CHANGES_AT = 60


def learned_collectives(kind: str, folder: str) -> dict[str, Any]:
    """Train with every step recorded; what the lines say of each collective, and torch's flight recorder.

    kind: ddp, fsdp, tp; `changes` is ddp with a reduction of its own more from step CHANGES_AT on. folder: of
    both ranks, since run.json is rank 0's.
    """
    model, width = _model_of("ddp" if kind == "changes" else kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(number: int) -> None:
        model(torch.ones(64, width, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if kind == "changes" and number >= CHANGES_AT:
            dist.all_reduce(ones(64))

    for _ in range(3):
        step(0)
    seen = []
    with aorta.instrument(folder, overhead="off", kernels="on") as recorder:
        for number in range(NUM_LEARNED_STEPS):
            with recorder.step():
                step(number)
                seen.append(recorder._sources.looks)
            if number % 20 == 0:
                time.sleep(0.6)  # the lines come, and with them what refutes
        torch.cuda.synchronize()
        keys = {group.name: group.key for group in recorder.journal.groups()}
        happened = {name: of_flight_recorder(key) for name, key in keys.items()}
    lines = list(read_steps(Path(folder) / f"rank_{dist.get_rank()}_metrics.jsonl", []))
    dist.barrier()  # rank 0 has written run.json
    return {
        "seen": seen,
        "matched": read_run(Path(folder)).coverage["kernel_records"]["matched"],
        "happened": happened,
        "lines": [
            (
                line.calls_learned,
                None
                if line.collectives is None
                else [(c.group, c.op, c.bytes, c.start_ms is not None) for c in line.collectives],
            )
            for line in lines
        ],
    }
