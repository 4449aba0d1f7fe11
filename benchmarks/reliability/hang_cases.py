"""Programs of a few ranks, and what goes wrong in them: for hangs.py beside this file.

A program is a list of named actions per step. A fault changes the list of one rank in one step; the truth of
a case is who did it, and the collective that the others then stand in (or the first one that differs).
"""

import ctypes
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

Action = tuple[str, Callable[[], object]]
Fault = Callable[["Program", list[Action]], list[Action]]

USUAL_STEP, UNUSUAL_STEP = 7, 10
"""Every fifth step broadcasts and ends with a barrier: 5 and 10, not 7."""
FOREVER_S = 600.0


class Program:
    """A step is computing, an all-reduce, one within pairs of ranks, a gather and a reduce-scatter."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self.recorder: Any = None
        self.folder, self.limit_s = "", 0.0
        # On NCCL a small all-reduce and a large gather use buffers of different protocols: a rank that
        # gathers while the other reduces gets nothing from it, else both might go on with wrong data.
        numel = (1 << 22) if device.type == "cuda" else (1 << 10)
        self.values = torch.ones(1 << 10, device=device)
        self.shard = torch.ones(numel // world_size, device=device)
        self.gathered = torch.ones(self.shard.numel() * world_size, device=device)
        self.matrix = torch.ones(64, 64, device=device)
        self.pair: Any = None
        self.other_pair: Any = None
        if world_size == 4:
            self.pair = self._group_of(((0, 1), (2, 3)), "pair")
            self.other_pair = self._group_of(((0, 2), (1, 3)), "cross")

    def _group_of(self, groups: tuple[tuple[int, ...], ...], name: str) -> Any:
        made = {ranks: dist.new_group(list(ranks), group_desc=name) for ranks in groups}
        return next(group for ranks, group in made.items() if self.rank in ranks)

    def actions(self, step: int) -> list[Action]:
        actions: list[Action] = [
            ("compute", lambda: self.matrix @ self.matrix),
            ("all_reduce", lambda: dist.all_reduce(self.values)),
        ]
        if self.pair is not None:
            actions += [
                ("pair", lambda: dist.all_reduce(self.values[:256], group=self.pair)),
                ("cross", lambda: dist.all_reduce(self.values[:512], group=self.other_pair)),
            ]
        actions.append(("all_gather", lambda: dist.all_gather_into_tensor(self.gathered, self.shard)))
        if step % 5 == 0:
            actions.append(("broadcast", lambda: dist.broadcast(self.values[:16], 0)))
        actions.append(("reduce_scatter", lambda: dist.reduce_scatter_tensor(self.shard, self.gathered)))
        if step % 5 == 0:
            actions.append(("barrier", dist.barrier))
        return actions


class Pipeline(Program):
    """Each rank receives from the one before it and sends to the next one, then all reduce."""

    def actions(self, step: int) -> list[Action]:
        actions: list[Action] = []
        if self.rank > 0:
            actions.append(("recv", lambda: dist.recv(self.values, self.rank - 1)))
        actions.append(("compute", lambda: self.matrix @ self.matrix))
        if self.rank < self.world_size - 1:
            actions.append(("send", lambda: dist.send(self.values, self.rank + 1)))
        return [*actions, ("all_reduce", lambda: dist.all_reduce(self.values[:64]))]


class DataParallel(Program):
    """DDP with three layers, one of which a rank may leave out."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        super().__init__(rank, world_size, device)
        layers = torch.nn.ModuleList([torch.nn.Linear(64, 64) for _ in range(3)]).to(device)
        self.inputs = torch.ones(2, 64, device=device)
        self.leaves_out = False
        program = self

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = layers

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for index, layer in enumerate(self.layers):
                    if not (program.leaves_out and index == 1):
                        x = layer(x)
                return x

        self.model = torch.nn.parallel.DistributedDataParallel(Model(), bucket_cap_mb=0.016)

    def actions(self, step: int) -> list[Action]:
        return [("train", lambda: self.model(self.inputs).sum().backward())]


class Sharded(Program):
    """Two units of fully_shard."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        from torch.distributed.fsdp import fully_shard

        super().__init__(rank, world_size, device)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(2)]).to(device)
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.inputs = torch.ones(2, 64, device=device)

    def actions(self, step: int) -> list[Action]:
        return [("train", lambda: self.model(self.inputs).sum().backward())]


# ---- faults ------------------------------------------------------------------------------------


def skip(*names: str) -> Fault:
    return lambda _, actions: [action for action in actions if action[0] not in names]


def before(name: str, act: Callable[[Program], object]) -> Fault:
    def fault(program: Program, actions: list[Action]) -> list[Action]:
        place = [action[0] for action in actions].index(name)
        return [*actions[:place], ("fault", lambda: act(program)), *actions[place:]]

    return fault


def instead(name: str, act: Callable[[Program], object]) -> Fault:
    def fault(program: Program, actions: list[Action]) -> list[Action]:
        return [("fault", lambda: act(program)) if action[0] == name else action for action in actions]

    return fault


def swap(first: str, second: str) -> Fault:
    def fault(_: Program, actions: list[Action]) -> list[Action]:
        places = {action[0]: place for place, action in enumerate(actions)}
        a, b = places[first], places[second]
        actions = list(actions)
        actions[a], actions[b] = actions[b], actions[a]
        return actions

    return fault


def sleep(_: Program) -> None:
    time.sleep(FOREVER_S)


def stop(_: Program) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill(_: Program) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def deadlock(_: Program) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def keep_interpreter(_: Program) -> None:
    ctypes.PyDLL(None).sleep(int(FOREVER_S))


def wait_for_loader(_: Program) -> None:
    """A worker that never delivers."""
    batches: queue.Queue[int] = queue.Queue()
    batches.get()


def spin(_: Program) -> None:
    while True:
        pass


def write_checkpoint(program: Program) -> None:
    """To a storage that does not answer: a pipe that nobody reads."""
    path = os.path.join(program.folder, "storage")
    os.mkfifo(path)
    with program.recorder.pausing("checkpoint"), open(path, "wb") as file:
        file.write(b"")


def swallow(_: Program) -> None:
    raise _Swallowed


class _Swallowed(Exception):
    """Caught around the step: the rank goes on with the next one."""


SwallowedError = _Swallowed


def leave(_: Program) -> None:
    raise Left


class Left(Exception):
    """The loop is over for this rank: it waits for the others outside of it."""


def leave_out_layer(program: Program) -> None:
    assert isinstance(program, DataParallel)
    program.leaves_out = True


def evaluate_alone(program: Program) -> None:
    assert isinstance(program, Sharded)
    program.model(program.inputs)


# ---- the cases ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    fault: Fault
    op: str | None
    """Operation that must be named; None: none."""
    step: int = USUAL_STEP
    group: str = "default"
    ranks: int = 3
    rank: int = 1
    """Who does it."""
    program: type[Program] = Program
    is_decidable: bool = True
    """False where the reports cannot tell: then nobody may be blamed but the rank, or all that wait."""
    on_nccl: bool = False
    """Among the twelve that are run on two GPUs."""
    step_of_call: int | None = None
    """Step of the named collective where it is not the fault's."""
    hang: dict[str, Any] = field(default_factory=dict)
    """Further settings of the watchdog."""


DOUBLE = torch.float64

CASES = [
    Case("late", before("all_reduce", sleep), "all_reduce", on_nccl=True),
    Case("late_unusual_step", before("broadcast", sleep), "broadcast", UNUSUAL_STEP, on_nccl=True),
    Case("late_first_step", before("all_reduce", sleep), "all_reduce", 0),
    Case("late_rank_0", before("all_gather", sleep), "all_gather", rank=0, on_nccl=True),
    Case("late_in_pair", before("pair", sleep), "all_reduce", group="pair", ranks=4, rank=2),
    Case("skips_all_reduce", skip("all_reduce"), "all_reduce", on_nccl=True),
    Case("skips_all_gather", skip("all_gather"), "all_gather"),
    Case("skips_last_of_step", skip("reduce_scatter"), "reduce_scatter", on_nccl=True),
    Case("skips_broadcast", skip("broadcast"), "broadcast", UNUSUAL_STEP, on_nccl=True),
    Case("skips_barrier", skip("barrier"), "barrier", UNUSUAL_STEP),
    Case("skips_in_pair", skip("pair"), "all_reduce", group="pair", ranks=4, rank=3),
    Case("skips_whole_step", skip("all_reduce", "all_gather", "reduce_scatter"), "all_reduce", ranks=2),
    Case("two_ranks_skip_unusual", skip("broadcast"), "broadcast", UNUSUAL_STEP, ranks=2),
    Case("extra_all_reduce", before("all_gather", lambda p: dist.all_reduce(p.values)), "all_gather"),
    Case("extra_barrier", before("all_reduce", lambda _: dist.barrier()), "all_reduce", on_nccl=True),
    Case("extra_unusual", before("broadcast", lambda p: dist.all_reduce(p.values)), "broadcast",
         UNUSUAL_STEP),
    Case("other_op", instead("all_gather", lambda p: dist.broadcast(p.gathered, 0)), "all_gather",
         on_nccl=True),
    Case("other_op_unusual", instead("broadcast", lambda p: dist.all_reduce(p.values[:16])), "broadcast",
         UNUSUAL_STEP),
    Case("larger", instead("all_reduce", lambda p: dist.all_reduce(p.gathered.repeat(4))), "all_reduce"),
    Case("smaller", instead("all_reduce", lambda p: dist.all_reduce(p.values[:8])), "all_reduce"),
    Case("other_type", instead("all_reduce", lambda p: dist.all_reduce(p.values.to(DOUBLE))), "all_reduce"),
    Case("order", swap("all_reduce", "all_gather"), "all_reduce", on_nccl=True),
    Case("order_of_groups", swap("all_reduce", "pair"), "all_reduce", ranks=4, rank=3),
    Case("other_group", instead("cross", lambda p: dist.all_reduce(p.values[:512])), "all_gather", ranks=4),
    Case("missing_send", skip("send"), "recv", program=Pipeline),
    Case("missing_recv", skip("recv"), "send", program=Pipeline),
    Case("stopped", before("all_reduce", stop), "all_reduce", on_nccl=True),
    Case("killed", before("all_reduce", kill), "all_reduce"),
    Case("lock", before("all_gather", deadlock), "all_gather", on_nccl=True),
    Case("interpreter_lock", before("all_gather", keep_interpreter), "all_gather"),
    Case("spins", before("all_gather", spin), "all_gather"),
    Case("loader", before("compute", wait_for_loader), "all_reduce", on_nccl=True),
    Case("checkpoint", before("compute", write_checkpoint), "all_reduce",
         hang={"checkpoint_timeout_s": 4.0, "pause_timeout_s": 4.0}),
    Case("checkpoint_barrier", before("compute", lambda _: dist.barrier()), "all_reduce", rank=0),
    Case("swallows_an_error", before("all_gather", swallow), "all_gather"),
    Case("leaves_early", before("all_reduce", leave), "all_reduce"),
    Case("ddp_unused_layer", before("train", leave_out_layer), "all_reduce", program=DataParallel),
    Case("fsdp_evaluates_alone", before("train", evaluate_alone), "all_gather", program=Sharded, rank=0),
]  # fmt: skip


# ---- pauses of healthy programs ----------------------------------------------------------------


def nap(seconds: float, name: str | None = None) -> Callable[[Program], None]:
    def act(program: Program) -> None:
        if name is None:
            time.sleep(seconds)
            return
        with program.recorder.pausing(name):
            time.sleep(seconds)

    return act


def breakpoint_for(seconds: float) -> Callable[[Program], None]:
    """A debugger whose user thinks."""

    def act(_: Program) -> None:
        import io
        import pdb

        class Thinking(io.StringIO):
            def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
                time.sleep(seconds)
                return "continue\n"

        pdb.Pdb(stdin=Thinking(), stdout=io.StringIO(), nosigint=True).set_trace()
        time.sleep(0)  # where the debugger stops

    return act


@dataclass(frozen=True)
class Pause:
    """Longer than hang.timeout_s, or nearly: `act` on these ranks before the collectives of a step."""

    name: str
    act: Callable[[float], Callable[[Program], None]]
    """Length as a part of the watchdog's limit."""
    on: tuple[int, ...] = (0, 1)
    steps: tuple[int, ...] = (USUAL_STEP,)
    hang: dict[str, Any] = field(default_factory=dict)
    suspends: bool = False
    """The whole job is stopped (SIGSTOP) for twice the limit and goes on."""


PAUSES = [
    Pause("compile", lambda limit_s: nap(2 * limit_s), steps=(0,), hang={"start_timeout_s": 120.0}),
    Pause("compile_on_one_rank", lambda limit_s: nap(2 * limit_s), (1,), (0,), {"start_timeout_s": 120.0}),
    Pause("long_checkpoint", lambda limit_s: nap(2 * limit_s, "checkpoint")),
    Pause("checkpoint_of_rank_0", lambda limit_s: nap(2 * limit_s, "checkpoint"), on=(0,)),
    Pause("evaluation", lambda limit_s: nap(2 * limit_s, "validation")),
    Pause("announced_on_one_rank", lambda limit_s: nap(2 * limit_s, "download"), on=(1,)),
    Pause("slow_loader", lambda limit_s: nap(0.5 * limit_s), on=(1,), steps=(3, 4, 5, 6, 7)),
    Pause("straggler", lambda limit_s: nap(0.2 * limit_s), on=(0,), steps=tuple(range(12))),
    Pause("debugger", lambda limit_s: breakpoint_for(2 * limit_s), on=(0,)),
    Pause("suspended", lambda limit_s: nap(0.0), hang={"action": "report"}, suspends=True),
    Pause("collection_of_garbage", lambda limit_s: nap(0.6 * limit_s), steps=(4, 8)),
    Pause("long_end", lambda limit_s: nap(0.5 * limit_s), steps=(11,)),
]
