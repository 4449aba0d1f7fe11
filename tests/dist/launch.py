"""Run a function on several gloo ranks of this machine."""

import multiprocessing
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SERVER_PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]


class RankFailure(AssertionError):
    """A rank raised, died or hung; the message holds its traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """[function(*args) on rank 0, on rank 1, ...], each in a process of its own with the default group ready.

    function is a module's top-level function (it is pickled by name) and so are args and results picklable.
    The processes are forked from a server that has imported torch, never from the caller. RANK,
    LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are set, MASTER_ADDR is not; `environment` is added.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_SERVER_PRELOAD)
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store_path = str(Path(folder) / "store")
        processes = [
            context.Process(
                target=_rank_main,
                args=(results, store_path, rank, world_size, environment or {}, function, args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(results, processes, timeout_s)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(results: Any, processes: list[Any], timeout_s: float) -> list[Any]:
    values: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline_s = time.monotonic() + timeout_s
    while len(values) < len(processes):
        try:
            rank, failure, payload = results.get(timeout=0.1)
        except queue.Empty:
            missing = [r for r in range(len(processes)) if r not in values and r not in failures]
            if time.monotonic() > deadline_s:
                raise RankFailure(_described(failures, processes, missing, timeout_s)) from None
            if failures or any(processes[r].exitcode is not None for r in missing):
                # One failure breaks the others' collectives: give them, and what is under way, a moment.
                deadline_s = min(deadline_s, time.monotonic() + 1.0)
            continue
        if failure is not None:
            failures[rank] = failure
        else:
            values[rank] = pickle.loads(payload)
        if len(failures) + len(values) == len(processes) and failures:
            raise RankFailure(_described(failures, processes, [], timeout_s))
    return [values[rank] for rank in range(len(processes))]


def _described(failures: dict[int, str], processes: list[Any], missing: list[int], timeout_s: float) -> str:
    lines = [f"rank {rank} of {len(processes)}:\n{failure}" for rank, failure in failures.items()]
    for rank in missing:
        code = processes[rank].exitcode
        state = f"did not finish (limit {timeout_s} s)" if code is None else f"ended with exit code {code}"
        lines.append(f"rank {rank} of {len(processes)} {state}")
    return "\n".join(lines)


def _rank_main(
    results: Any,
    store_path: str,
    rank: int,
    world_size: int,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    os.environ.pop("MASTER_ADDR", None)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        **environment,
    )
    try:
        store = FileStore(store_path, world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        # Pickled here: a Queue would pickle later, on a thread whose errors nobody sees.
        results.put((rank, None, pickle.dumps(function(*args))))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        raise SystemExit(1) from None
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves early breaks the others' connections
        dist.destroy_process_group()
