"""Programs of these tests' rank processes. Every function is called on each rank of a gloo group."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import aorta
from aorta.attach import hooks
from aorta.attach.settings import AttachSettings


def records(folder: str, rank: int) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (Path(folder) / f"rank_{rank}_metrics.jsonl").read_text().splitlines()
    ]


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def _all_reduce_positional_async() -> None:
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, dist.ReduceOp.SUM, None, True)
    assert work is not None
    work.wait()
    assert tensor[0] == dist.get_world_size()


def _all_reduce() -> None:
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor[0] == dist.get_world_size()


def _functional() -> None:
    out = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    assert (out + 0)[0] == dist.get_world_size()


def _compiled() -> None:
    def double_and_sum(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    out = torch.compile(double_and_sum, backend="aot_eager")(torch.ones(4))
    assert out[0] == 2 * dist.get_world_size() + 1


def _compiled_in_place() -> None:
    """One that torch.compile rewrites, and one at which its graph breaks."""

    def sum_twice(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        work = dist.all_reduce(y, async_op=True)
        assert work is not None
        work.wait()
        return y + 1

    out = torch.compile(sum_twice, backend="aot_eager")(torch.ones(4))
    assert out[0] == 2 * dist.get_world_size() ** 2 + 1


def _dtensor() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.arange(4.0)
    whole = distribute_tensor(local, mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
    assert torch.equal(whole.to_local(), local)


def _object() -> None:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"rank": dist.get_rank()})
    assert [item["rank"] for item in gathered] == list(range(dist.get_world_size()))


def _coalesced() -> None:
    a, b = torch.ones(4), torch.ones(6)
    with dist._coalescing_manager():
        dist.all_reduce(a)
        dist.all_reduce(b)
    assert a[0] == b[0] == dist.get_world_size()


def _batched_p2p() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.zeros(4)
    for request in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((4,), float(rank)), (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
    ):
        request.wait()
    assert received[0] == (rank - 1) % size


def _all_to_all() -> None:
    size = dist.get_world_size()
    received = torch.empty(size)
    dist.all_to_all_single(received, torch.full((size,), float(dist.get_rank())))
    assert received.tolist() == list(range(size))


def _ddp() -> None:
    model = DistributedDataParallel(_network())
    model(torch.ones(2, 8)).sum().backward()


def _fsdp() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(_network(), mesh=mesh)
    model(torch.ones(2, 8)).sum().backward()


def _inference() -> None:
    with torch.inference_mode():
        _all_reduce()


def _barrier() -> None:
    dist.barrier()


def _monitored_barrier() -> None:
    dist.monitored_barrier()


PATHS = {
    "sync": _all_reduce,
    "async": _all_reduce_positional_async,
    "functional": _functional,
    "compiled": _compiled,
    "compiled_in_place": _compiled_in_place,
    "dtensor": _dtensor,
    "object": _object,
    "coalesced": _coalesced,
    "batched_p2p": _batched_p2p,
    "all_to_all": _all_to_all,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "inference": _inference,
    "barrier": _barrier,
    "monitored_barrier": _monitored_barrier,
}


def operations_by_path(folder: str) -> dict[str, list[str]]:
    """The operations recorded for each path, one step per path, in order."""
    for path in PATHS.values():
        path()  # what a first use sets up is not what is asked
    with aorta.instrument(folder) as recorder:
        for path in PATHS.values():
            with recorder.step():
                path()
    _all_reduce()  # and without the instrument again
    lines = records(folder, dist.get_rank())
    return {
        name: [call["op"] for call in line["collectives"]] for name, line in zip(PATHS, lines, strict=True)
    }


def everything_is_restored(folder: str) -> list[str]:
    """Return what the instrument left behind; nothing, if all is well."""
    before = dict(vars(dist.ProcessGroup))
    with aorta.instrument(folder) as recorder, recorder.step():
        _all_reduce()
        assert dict(vars(dist.ProcessGroup)) != before
        assert "interception/switch.py" in torch._C._dispatch_dump("c10d::allreduce_")
    after = dict(vars(dist.ProcessGroup))
    left = [name for name in before if after.get(name) is not before[name]]
    registrations = torch._C._dispatch_dump("c10d::allreduce_")
    if "interception/switch.py" in registrations:
        left.append("kernel")
    with aorta.instrument(folder) as recorder, recorder.step():
        _all_reduce()  # and it can be put in again
    return left


def everybody_still_listens(folder: str) -> dict[str, tuple[list[str], list[str]]]:
    """Return what a dispatch mode and a profiler see of the paths, without and with the instrument."""
    paths = (_all_reduce, _all_reduce_positional_async, _fsdp, _all_to_all)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(str(func))
            return func(*args, **(kwargs or {}))

    def by_mode() -> list[str]:
        heard.clear()
        with Mode():
            for path in paths:
                path()
        return [name for name in heard if name.startswith("c10d")]

    def by_profiler() -> list[str]:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for path in paths:
                path()
        return sorted(e.name for e in profiler.events() if e.name.startswith(("c10d::", "gloo:")))

    heard: list[str] = []
    without = by_mode(), by_profiler()
    with aorta.instrument(folder) as recorder, recorder.step():
        recorded = by_mode(), by_profiler()
    return {"mode": (without[0], recorded[0]), "profiler": (without[1], recorded[1])}


def other_tensors(folder: str) -> dict[str, list[str]]:
    """Tensors that the dispatcher treats in its own way, reduced beside a plain one."""
    group = dist.group.WORLD
    assert group is not None
    seen = {}
    with aorta.instrument(folder) as recorder:
        for name, make in {
            "parameter": lambda: nn.Parameter(torch.ones(4)),
            "requires grad": lambda: torch.ones(4, requires_grad=True),
            "inference": lambda: torch.inference_mode()(torch.ones)(4),
            "complex": lambda: torch.ones(4, dtype=torch.complex64),
            "negative view": lambda: torch.ones(4, dtype=torch.complex64).conj().imag,
            "sparse": lambda: torch.eye(2).to_sparse(),
        }.items():
            with recorder.step(), torch.no_grad():
                values = make()
                before = values.to_dense().clone()
                dist.all_reduce(values)
                assert torch.equal(values.to_dense(), before * dist.get_world_size()), name
    lines = records(folder, dist.get_rank())
    for name, line in zip(
        ("parameter", "requires grad", "inference", "complex", "negative view", "sparse"), lines, strict=True
    ):
        seen[name] = [call["op"] for call in line["collectives"]]
    return seen


def works_behave(folder: str) -> dict[str, Any]:
    with aorta.instrument(folder) as recorder, recorder.step():
        tensor = torch.ones(4)
        first = dist.all_reduce(tensor, async_op=True)
        assert first is not None
        answers: dict[str, Any] = {"waits twice": first.wait() and first.wait()}
        answers["completed"] = first.is_completed()
        answers["result"] = float(first.result()[0][0])
        future = dist.all_reduce(torch.ones(2), async_op=True)
        assert future is not None
        answers["future"] = float(future.get_future().wait()[0][0])
        late = dist.all_reduce(torch.ones(2), async_op=True)
        dist.all_reduce(torch.ones(2), async_op=True)  # nobody ever waits for this one
    assert late is not None
    answers["waits after the recorder has closed"] = late.wait()
    dist.barrier()
    return answers


def works_that_nobody_waits_for(folder: str) -> tuple[int, float]:
    """How many real works are kept after 400 of them, and whether one that is held still answers."""
    from aorta.record.interception.works import TimedWork

    with aorta.instrument(folder) as recorder:
        held = None
        for _ in range(4):
            with recorder.step():
                for _ in range(100):
                    held = dist.all_reduce(torch.ones(2), async_op=True)
                dist.barrier()
        kept = sum(work._inner is not None for work in TimedWork._alive)
        assert held is not None
        answer = float(held.result()[0][0])
    return kept, answer


def a_stall_is_seen(folder: str) -> list[dict[str, Any]]:
    """Rank 1 comes 0.4 s late to the second step's all-reduce."""
    with aorta.instrument(folder) as recorder:
        for step in range(2):
            with recorder.step():
                if step == 1 and dist.get_rank() == 1:
                    time.sleep(0.4)
                _all_reduce()
    return [line["overlap"] for line in records(folder, dist.get_rank())]


def overlap_is_seen(folder: str) -> dict[str, Any]:
    """An asynchronous all-reduce that rank 1 joins after 0.2 s; both ranks work meanwhile."""
    with aorta.instrument(folder) as recorder:
        dist.barrier()  # after what takes a while when the machine is busy
        with recorder.step():
            if dist.get_rank() == 1:
                time.sleep(0.2)
                _all_reduce()
            else:
                tensor = torch.ones(4)
                work = dist.all_reduce(tensor, async_op=True)
                time.sleep(0.5)
                assert work is not None
                work.wait()
    return dict(records(folder, dist.get_rank())[0]["overlap"])


def paused_for_a_while(folder: str) -> dict[str, Any]:
    """Steps 1 and 2 run without the instrument, and 0.3 s pass."""
    with aorta.instrument(folder) as recorder:
        start_s = time.monotonic()
        for step in range(4):
            if step == 1:
                recorder.pause()
                before_pause_ms = (time.monotonic() - start_s) * 1e3
                off = "interception/switch.py" not in torch._C._dispatch_dump("c10d::allreduce_")
            if step == 3:
                time.sleep(0.3)
                recorder.resume()
            if step in (0, 3):
                with recorder.step(global_step=step):
                    _all_reduce()
            else:
                _all_reduce()
    first, second = records(folder, dist.get_rank())
    return {
        "off": off,
        "steps": [first["global_step"], second["global_step"]],
        "collectives": [first["num_collectives"], second["num_collectives"]],
        "first_ms": first["step_ms"],
        "before_pause_ms": before_pause_ms,
        "apart_s": (second["start_unix_ns"] - first["start_unix_ns"]) / 1e9,
    }


def killed_in_the_middle(folder: str) -> int:
    """Rank 1 kills itself with SIGKILL in step 5; rank 0 fails in the collective and closes."""
    with aorta.instrument(folder) as recorder:
        try:
            for step in range(8):
                with recorder.step():
                    _all_reduce()
                    if dist.get_rank() == 1 and step == 5:
                        time.sleep(0.3)
                        os.kill(os.getpid(), 9)
        except RuntimeError:
            pass
    return len(records(folder, dist.get_rank()))


def blocked_main_thread(folder: str) -> int:
    """Rank 0 waits for rank 1 in a receive; how many finished steps are in its file meanwhile."""
    with aorta.instrument(folder) as recorder:
        for _ in range(3):
            with recorder.step():
                _all_reduce()
        with recorder.step():
            if dist.get_rank() == 0:
                dist.recv(torch.empty(1), src=1)
                return 0
            time.sleep(0.5)
            written = len(records(folder, 0))
            dist.send(torch.ones(1), dst=0)
            return written


def two_runs_one_late_rank(folder: str) -> int:
    """Rank 1 ends the first run half a second after rank 0; the lines of the second."""
    with aorta.instrument(folder) as recorder:
        with recorder.step():
            _all_reduce()
        time.sleep(0.5 * dist.get_rank())
    with aorta.instrument(folder) as recorder:
        for _ in range(2):
            with recorder.step():
                _all_reduce()
    return len(records(folder, dist.get_rank()))


def a_folder_that_cannot_be_cleared(folder: str) -> str:
    """Return what each rank is told when rank 0 cannot move an earlier run aside."""
    from aorta.errors import RecordError
    from aorta.record import run_folder

    def fails(*_: object) -> None:
        raise RecordError(f"planted on rank {dist.get_rank()}")

    run_folder.move_aside = fails  # type: ignore[assignment]
    try:
        run_folder.claim_folder(Path(folder), dist.get_rank(), 2)
    except RecordError as error:
        return str(error)
    return "claimed"


def full_disk(folder: str) -> int:
    """Training goes on when nothing can be written; the steps done."""
    from aorta.records.writer import LineWriter

    done = 0
    with aorta.instrument(folder) as recorder:
        assert recorder._output is not None
        recorder._output.folder.steps.close()
        recorder._output.folder.steps = LineWriter(os.open("/dev/full", os.O_WRONLY), "/dev/full")
        for _ in range(20):
            with recorder.step():
                _all_reduce()
                done += 1
            time.sleep(0.01)
    return done


def train_digests(folder: str, forms: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """By form, without the instrument and with it."""
    return {
        name: [train_digest(f"{folder}/{name}", recorded=recorded, **form) for recorded in (False, True)]
        for name, form in forms.items()
    }


def train_digest(folder: str, parallel: dict[str, Any], model: dict[str, Any], recorded: bool) -> str:
    """Losses and parameters of 6 steps, as one string that is equal only if every bit is."""
    import hashlib

    from aorta.config.layout import resolve_layout
    from aorta.config.load import config_from_settings
    from aorta.launcher import launched_rank
    from aorta.training.setup import BatchFeed, set_arithmetic
    from aorta.training.trainer import TrainingRun

    settings = {
        "parallel": parallel,
        "model": {"hidden": 32, "ffn": 48, "num_layers": 2, "vocab_size": 64, **model},
        "data": {"seq_len": 16},
        "training": {"deterministic": True, "batch_size": 2},
    }
    config = config_from_settings(settings)
    set_arithmetic(config)
    ranks = launched_rank()
    device = torch.device("cpu")
    run = TrainingRun(config, ranks, resolve_layout(config, ranks.world_size), device)
    feed = BatchFeed(config, run.dp_rank, device, 0)
    losses = []
    if recorded:
        with aorta.instrument(folder) as recorder:
            for number in range(6):
                with recorder.step() as step:
                    loss, norm, lr = run.step(number, feed)
                    step.log(loss=loss, grad_norm=norm, lr=lr)
                    losses.append(float(loss))
    else:
        losses = [float(run.step(number, feed)[0]) for number in range(6)]
    digest = hashlib.sha256(repr([loss.hex() for loss in losses]).encode())
    for parameter in run.form.plain.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(local.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class _Holding:
    """Dies on the thread of gloo that drops the work it belongs to, while that thread holds gloo's queue."""

    def __init__(self, dies: threading.Event) -> None:
        self._dies = dies

    def __del__(self) -> None:
        self._dies.set()
        time.sleep(0.1)  # lets go of the interpreter lock, and not of the queue


def _hold_queue() -> None:
    """On rank 0, return while a thread of gloo holds its queue and will need the interpreter lock."""
    group = dist.group.WORLD
    assert group is not None
    dies = threading.Event()
    tensor: Any = torch.ones(1)
    if dist.get_rank() == 1:
        time.sleep(0.05)  # rank 0 lets go of its work before it ends
        group._get_backend(torch.device("cpu")).allreduce([tensor]).wait()
        return
    tensor.holding = _Holding(dies)
    work = group._get_backend(torch.device("cpu")).allreduce([tensor])
    del work, tensor
    assert dies.wait(30)


def _launches() -> dict[str, Callable[[], Any]]:
    """Each operator, and where one has several ways to its backend, each of those."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    cpu = torch.device("cpu")
    listed = [torch.ones(2), torch.ones(4)]
    wide = [torch.ones(2 * size), torch.ones(4 * size)]

    def point_to_point(receive: Callable[[], Any]) -> Any:
        if rank == 0:  # the one whose launch is looked at
            return receive()
        return dist.isend(torch.ones(2), 0)

    def send() -> Any:
        return dist.isend(torch.ones(2), 1) if rank == 0 else dist.irecv(torch.ones(2), 0)

    return {
        "allreduce": lambda: dist.all_reduce(torch.ones(2), async_op=True),
        "allreduce sync": lambda: dist.all_reduce(torch.ones(2)),
        "allreduce premul": lambda: dist.all_reduce(
            torch.ones(2), dist._make_nccl_premul_sum(2.0), async_op=True
        ),
        "allreduce sparse": lambda: dist.all_reduce(torch.eye(2).to_sparse(), async_op=True),
        "allreduce functional": lambda: functional.all_reduce(torch.ones(2), "sum", group),
        "allreduce_coalesced": lambda: group.allreduce_coalesced(
            [torch.ones(2), torch.ones(3)], c10d.AllreduceCoalescedOptions()
        ),
        "allgather_into_tensor_coalesced": lambda: group.allgather_into_tensor_coalesced(wide, listed),
        "allgather_into_tensor_coalesced of one": lambda: functional.all_gather_tensor(
            torch.ones(2), 0, group
        ),
        "reduce_scatter_tensor_coalesced": lambda: group.reduce_scatter_tensor_coalesced(listed, wide),
        "reduce_scatter_tensor_coalesced of one": lambda: functional.reduce_scatter_tensor(
            torch.ones(2 * size), "sum", 0, group
        ),
        "all_gather coalesced functional": lambda: functional.all_gather_into_tensor_coalesced(listed, group),
        "allgather_base": lambda: dist.all_gather_into_tensor(wide[0], listed[0], async_op=True),
        "reduce_scatter_base": lambda: dist.reduce_scatter_tensor(listed[0], wide[0], async_op=True),
        "reduce_scatter_base premul": lambda: dist.reduce_scatter_tensor(
            listed[0], wide[0], dist._make_nccl_premul_sum(2.0), async_op=True
        ),
        "allgather": lambda: dist.all_gather([torch.ones(2) for _ in range(size)], listed[0], async_op=True),
        "allgather_coalesced": lambda: group._get_backend(cpu).allgather_coalesced(
            [[torch.ones(2)] for _ in range(size)], [torch.ones(2)]
        ),
        "reduce_scatter": lambda: dist.reduce_scatter(
            listed[0], [torch.ones(2) for _ in range(size)], async_op=True
        ),
        "alltoall": lambda: dist.all_to_all(
            [torch.ones(2) for _ in range(size)], [torch.ones(2) for _ in range(size)], async_op=True
        ),
        "alltoall_base": lambda: dist.all_to_all_single(torch.ones(size), torch.ones(size), async_op=True),
        "broadcast": lambda: dist.broadcast(torch.ones(2), 0, async_op=True),
        "reduce": lambda: dist.reduce(torch.ones(2), 0, async_op=True),
        "reduce premul": lambda: dist.reduce(
            torch.ones(2), 0, dist._make_nccl_premul_sum(2.0), async_op=True
        ),
        "gather": lambda: dist.gather(
            listed[0], [torch.ones(2) for _ in range(size)] if rank == 0 else None, 0, async_op=True
        ),
        "scatter": lambda: dist.scatter(
            listed[0], [torch.ones(2) for _ in range(size)] if rank == 0 else None, 0, async_op=True
        ),
        "barrier": lambda: dist.barrier(async_op=True),
        "monitored_barrier": lambda: dist.monitored_barrier(),
        "send": send,
        "recv": lambda: point_to_point(lambda: dist.irecv(torch.ones(2), 1)),
        "recv_anysource": lambda: point_to_point(lambda: dist.irecv(torch.ones(2), None)),
        "coalesced": _coalesced,
    }


def launches_while_the_queue_is_held(folder: str) -> list[int]:
    """Each launch while a thread holds gloo's queue that needs the interpreter lock to go on.

    The numbers of collectives that were recorded. The launch that is under way is named in a file.
    """
    with aorta.instrument(folder, overhead="off") as recorder:
        for name, launch in _launches().items():
            (Path(folder) / f"launch_{dist.get_rank()}").write_text(name)
            dist.barrier()
            _hold_queue()
            with recorder.step():
                try:
                    work = launch()
                    if isinstance(work, torch.Tensor):
                        work + 0
                    elif hasattr(work, "wait"):
                        work.wait()
                except RuntimeError as error:
                    # gloo has no such operation; of PREMUL_SUM it says so only when the work runs.
                    if "premul" not in name and "does not support" not in str(error):
                        raise
    return [line["num_collectives"] for line in records(folder, dist.get_rank())]


def what_many_steps_leave(folder: str) -> dict[str, list[int]]:
    """Count what the recorder holds after 20 and after 120 steps, by container."""
    from aorta.record.interception import works as futures
    from aorta.record.interception.works import TimedWork

    ddp = DistributedDataParallel(_network())
    group = dist.group.WORLD
    assert group is not None

    def step() -> None:
        ddp(torch.ones(2, 8)).sum().backward()  # takes futures in C++
        taken = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(2)]
        torch.futures.wait_all([work.get_future() for work in taken if work is not None])
        dist.all_reduce(torch.ones(2), async_op=True)  # and nobody waits
        (functional.all_gather_tensor(torch.ones(2), 0, group) + 1).sum()
        dist.barrier()

    held: dict[str, list[int]] = {}
    with aorta.instrument(folder) as recorder:
        journal = recorder.journal
        for number in range(120):
            with recorder.step():
                step()
            if number not in (19, 119):
                continue
            TimedWork.settle_forgotten()
            deadline_s = time.monotonic() + 30
            while journal.closed and time.monotonic() < deadline_s:
                time.sleep(0.01)
            for name, container in {
                "works": TimedWork._alive,
                "shells": TimedWork._shells,
                "promises": futures._promises,
                "in flight": journal._in_flight,
                "groups": journal.groups(),
                "groups by id": journal._groups_by_id,
                "names": journal._num_named,
                "seen": journal.num_seen,
                "closed": journal.closed,
            }.items():
                held.setdefault(name, []).append(len(container))
    return held


def waits_through_futures(folder: str) -> dict[str, dict[str, Any]]:
    """Rank 0 stands still 0.4 s for rank 1 in each way to wait for a future; the overlap of each step."""

    def all_reduce() -> Any:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work is not None
        return work.get_future()

    def polled() -> None:
        future = all_reduce()
        while not future.done():
            time.sleep(0.01)

    def handed_over() -> None:
        waited = threading.Event()
        all_reduce().add_done_callback(lambda _: waited.set())
        waited.wait()

    group = dist.group.WORLD
    assert group is not None
    ways: dict[str, Callable[[], Any]] = {
        "wait": lambda: all_reduce().wait(),
        "then": lambda: all_reduce().then(lambda future: future.value()).then(lambda _: 1).wait(),
        "collect_all": lambda: torch.futures.collect_all([all_reduce(), all_reduce()]).wait(),
        "wait_all": lambda: torch.futures.wait_all([all_reduce(), all_reduce()]),
        "wait_tensor": lambda: torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", group.group_name)
        ),
        "async tensor": lambda: functional.all_reduce(torch.ones(2), "sum", group) + 1,
        "autograd": lambda: functional.all_gather_tensor_autograd(torch.ones(2), 0, group) + 1,
        "polled": polled,
        "handed over": handed_over,
    }
    for way in ways.values():
        way()  # what a first use loads takes a while, beside its collective
    with aorta.instrument(folder) as recorder:
        for way in ways.values():
            dist.barrier()
            with recorder.step():
                if dist.get_rank() == 1:
                    time.sleep(0.4)
                way()
    lines = records(folder, dist.get_rank())
    return {
        name: {**line["overlap"], "reason": line["not_measured"].get("overlap")}
        for name, line in zip(ways, lines, strict=True)
    }


def futures_in_ddp(folder: str) -> list[str | None]:
    """Why steps of DDP have no overlap, with and without communication hooks; None: they have."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def python_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    plain, hooked, shipped = (DistributedDataParallel(_network()) for _ in range(3))
    hooked.register_comm_hook(None, python_hook)
    shipped.register_comm_hook(None, default_hooks.allreduce_hook)
    with aorta.instrument(folder) as recorder:
        for model in (plain, hooked, shipped):
            with recorder.step():
                model(torch.ones(2, 8)).sum().backward()
    return [line["not_measured"].get("overlap") for line in records(folder, dist.get_rank())]


def last_step_of_ddp(folder: str) -> list[str | None]:
    """Why the last step of each of 10 short runs has no overlap; None: it has."""
    model = DistributedDataParallel(_network())
    reasons = []
    for run in range(10):
        with aorta.instrument(f"{folder}/{run}") as recorder, recorder.step():
            model(torch.ones(2, 8)).sum().backward()
        reasons.append(records(f"{folder}/{run}", dist.get_rank())[0]["not_measured"].get("overlap"))
    return reasons


def late_where_left_out(folder: str, num_steps: int = 56) -> None:
    """Steps by DDP with the hooks of `aorta run`: rank 1 sleeps in those that the overhead leaves out."""
    attachment = hooks.Attachment(AttachSettings(output=str(folder)))
    attachment.imported("torch", torch)
    model = DistributedDataParallel(_network())
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(num_steps):
        recorder = None if attachment.session is None else attachment.session._recorder
        step = None if recorder is None else recorder.journal.current
        if recorder is not None:  # else a slow step has one rank record the next ones out of turn
            recorder._sampling.meter.has_room = lambda *of, **named: False
        if step is not None and step.left_out is not None and dist.get_rank() == 1:
            time.sleep(0.06)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    attachment.take_off(None)
