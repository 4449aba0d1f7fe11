"""Run a function or a command on several ranks of this machine, forked from a process that has torch loaded.

A rank that imports torch, FSDP and the training loop by itself takes 8 s of CPU before it does anything.
"""

import atexit
import fcntl
import multiprocessing
import os
import pickle
import queue
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.limits import LIMIT_S

_ROOT = Path(__file__).parents[2]
SHARED_BY_WORKERS: list[Path] = []
"""A folder of the test run, where it has several workers."""


class RankFailure(AssertionError):
    """A rank raised, died or hung; the message holds its traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = LIMIT_S,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """[function(*args) on rank 0, on rank 1, ...], each in a process of its own with the default group ready.

    function is a module's top-level function (it is pickled by name) and so are args and results picklable.
    The processes are forked from a server that has imported torch, never from the caller. RANK,
    LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE are set, MASTER_ADDR is not; `environment` is added.
    """
    context = _context()
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


@dataclass(frozen=True)
class RankCommand:
    """Ranks that run a command; their output as the launcher's pipes would have it."""

    processes: list[Any]
    folder: Path

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def exit_codes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]

    def wait(self, limit_s: float = LIMIT_S) -> None:
        """Until all have ended. As under torchrun, a rank that fails ends the others with SIGTERM."""
        deadline_s = time.monotonic() + limit_s
        while running := [process for process in self.processes if process.exitcode is None]:
            wait([process.sentinel for process in running], timeout=1.0)
            if time.monotonic() > deadline_s:
                raise RankFailure(f"did not end within {limit_s} s: {self.stderr}")
            if any(self.exit_codes):
                for process in running:
                    process.terminate()
                for process in running:
                    process.join(timeout=max(0.0, deadline_s - time.monotonic()))


@contextmanager
def started_command(
    main: Callable[[list[str]], int], arguments: list[str], num_ranks: int = 1, **environment: str
) -> Iterator[RankCommand]:
    """main(arguments) on ranks with the variables of torchrun; without them where num_ranks is 1.

    main is a module's top-level function; it makes its process group itself.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for stream in ("stdout", "stderr"):
            (folder / stream).touch()
        processes = []
        for rank in range(num_ranks):
            variables = dict(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks),
                LOCAL_WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            )  # fmt: skip
            variables = (variables if num_ranks > 1 else {}) | environment
            processes.append(
                _context().Process(
                    target=_command_main, args=(folder, variables, main, arguments), daemon=True
                )
            )
        for process in processes:
            process.start()
        try:
            yield RankCommand(processes, folder)
        finally:
            for process in processes:
                process.kill()
                process.join()


def run_command(
    main: Callable[[list[str]], int], arguments: list[str], num_ranks: int = 1, **environment: str
) -> tuple[list[int | None], str, str]:
    """The ranks' exit codes, their stdout and their stderr; see started_command."""
    with started_command(main, arguments, num_ranks, **environment) as command:
        command.wait()
        return command.exit_codes, command.stdout, command.stderr


def run_python(
    *arguments: object, cwd: Path | str | None = None, timeout_s: float = LIMIT_S, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """As `python ARGUMENTS` (-c CODE, -m MODULE or a script, then its arguments), forked with torch loaded.

    Not for what is about the interpreter's start: which modules a command loads, for example.
    """
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place = (str(cwd or Path.cwd()), dict(os.environ) | environment)
        process = _context().Process(target=_python_main, args=(folder, *place, words), daemon=True)
        process.start()
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout_s)
        texts = [path.read_text() if path.exists() else "" for path in (folder / "stdout", folder / "stderr")]
        return subprocess.CompletedProcess(words, process.exitcode or 0, *texts)


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.dist.forked_from"])
    with chdir(_ROOT):  # where the server finds what it loads
        if SHARED_BY_WORKERS:
            _join_server(SHARED_BY_WORKERS[0])
        else:
            forkserver.ensure_running()
    return context


def _join_server(folder: Path) -> None:
    """One server for all workers of a test run, as for a process and its children: its start takes 8 s of CPU.

    It ends with the last process that holds its pipe, whichever of the workers started it.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    place = folder / "fork_server"
    with (folder / "fork_server.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            pid, pipe, address = place.read_text().split()
            server._forkserver_alive_fd = os.open(f"/proc/{pid}/fd/{pipe}", os.O_WRONLY)
        except OSError:  # none yet, the worker that started it is gone, or this is no Linux
            config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
            config["tempdir"] = str(folder)  # or the address goes with this worker
            forkserver.ensure_running()
            place.write_text(f"{os.getpid()} {server._forkserver_alive_fd} {server._forkserver_address}")
        else:
            server._forkserver_address = address
            server.ensure_running = resource_tracker.ensure_running  # it cannot wait for another's child


def _python_main(folder: Path, cwd: str, environment: dict[str, str], words: list[str]) -> None:
    _open_streams(folder)
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["daemon"] = False  # as an interpreter it may have workers of its own
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    code = 0
    try:
        if words[0] == "-c":
            sys.argv = words[:1] + words[2:]
            exec(
                compile(words[1], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__}
            )
        elif words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # the program may have set its own
        code = 1
    # The end of an interpreter, which a forked process does not come to.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _open_streams(folder: Path) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    # The test run's own streams, which the server was started with, may be pytest's.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _command_main(
    folder: Path, variables: dict[str, str], main: Callable[[list[str]], int], arguments: list[str]
) -> None:
    _open_streams(folder)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    sys.exit(main(arguments))


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
