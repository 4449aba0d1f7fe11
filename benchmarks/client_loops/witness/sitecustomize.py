"""Watches a training process from outside, with or without aorta: losses, parameters, calls, collectives.

Python imports it at its start because its folder is on PYTHONPATH. Where WITNESS_OUT is set, every process
that imports torch writes one JSON there when it ends or destroys its process group: the value that each
backward pass began with, a hash of the parameters after each call of an optimizer, how many collectives the
process groups had counted then, and what PyTorch's Flight Recorder holds. Nothing of it comes from aorta.

WITNESS_SEED: seed of torch, random and numpy, for programs that set none.
WITNESS_DEVICES: as many CPUs are devices of an accelerator, for programs that ask for GPUs.
"""

import atexit
import os
import sys

TYPE_CHECKING = False  # typing would have to be imported
if TYPE_CHECKING:
    from typing import Any


class Finder:
    """Has a function called after torch is imported."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name != "torch":
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                watch(spec.loader)
                return spec
        return None


def watch(loader: "Any") -> None:
    """Begin once the module is executed."""
    execute = loader.exec_module

    def exec_module(module: "Any") -> None:
        execute(module)
        Witness(module)

    loader.exec_module = exec_module


class Witness:
    """Notes of what one process does."""

    def __init__(self, torch: "Any") -> None:
        from torch.optim import optimizer

        self.torch = torch
        self.losses: list[float] = []
        self.digests: list[str] = []
        self.counts: list[int] = []
        self.before: int | None = None
        """Collectives when the process first had a group and an optimizer, or a backward pass."""
        self.has_optimizer = False
        self.rank: int | None = None
        self.groups: dict[str, int] = {}
        self.traced: dict[str, int] = {}
        self.pid = os.getpid()
        os.register_at_fork(after_in_child=self.forked)
        optimizer.register_optimizer_step_post_hook(self.called)
        self.watch_backward()
        self.watch_optimizer()
        self.watch_groups()
        if "WITNESS_SEED" in os.environ:
            seed(torch, int(os.environ["WITNESS_SEED"]))
        if "WITNESS_DEVICES" in os.environ:
            pretend_devices(torch, int(os.environ["WITNESS_DEVICES"]))
        atexit.register(self.write)

    def forked(self) -> None:
        self.pid = os.getpid()
        self.losses, self.digests, self.counts, self.groups, self.traced = [], [], [], {}, {}
        self.before = None

    def called(self, optimizer: "Any", *_: "Any") -> None:
        import hashlib

        value = hashlib.sha256()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                local = parameter.detach()
                local = local.to_local() if hasattr(local, "to_local") else local
                value.update(local.float().contiguous().numpy().tobytes())
        self.digests.append(value.hexdigest()[:12])
        self.counts.append(sum(self.sequence_numbers().values()))

    def trains(self) -> None:
        if self.before is None:
            self.before = sum(self.sequence_numbers().values())

    def watch_optimizer(self) -> None:
        from torch.distributed import distributed_c10d

        original = self.torch.optim.Optimizer.__init__

        def initialize(*args: "Any", **named: "Any") -> None:
            original(*args, **named)
            self.has_optimizer = True
            if distributed_c10d.is_initialized():
                self.trains()

        self.torch.optim.Optimizer.__init__ = initialize

    def watch_backward(self) -> None:
        original = self.torch.Tensor.backward

        def backward(tensor: "Any", *args: "Any", **named: "Any") -> "Any":
            self.trains()
            if tensor.numel() == 1:
                self.losses.append(float(tensor.detach()))
            return original(tensor, *args, **named)

        self.torch.Tensor.backward = backward

    def watch_groups(self) -> None:
        from torch.distributed import distributed_c10d

        destroy, initialize = distributed_c10d.destroy_process_group, distributed_c10d.init_process_group

        def destroy_process_group(*args: "Any", **named: "Any") -> "Any":
            self.look()
            self.write_document()  # some launchers end their workers without handlers
            return destroy(*args, **named)

        def init_process_group(*args: "Any", **named: "Any") -> "Any":
            result = initialize(*args, **named)
            if self.has_optimizer:
                self.trains()
            return result

        modules: tuple[Any, ...] = (distributed_c10d, self.torch.distributed)
        for module in modules:
            module.destroy_process_group = destroy_process_group
            module.init_process_group = init_process_group

    def sequence_numbers(self) -> dict[str, int]:
        from torch.distributed import distributed_c10d

        numbers: dict[str, int] = {}
        groups: list[Any] = list(distributed_c10d._world.pg_map)
        for group in groups:
            try:
                numbers[group.group_name] = group._get_sequence_number_for_group()
            except RuntimeError:
                numbers[group.group_name] = 0  # a backend of one rank that counts nothing
        return numbers

    def look(self) -> None:
        import json

        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]
        from torch.distributed import distributed_c10d

        if distributed_c10d.is_initialized():
            self.rank = distributed_c10d.get_rank()
            self.groups = self.sequence_numbers() | {
                name: number for name, number in self.groups.items() if name not in self.sequence_numbers()
            }
        traced: dict[str, int] = {}
        for entry in json.loads(_dump_fr_trace_json()).get("entries", []):
            traced[entry["profiling_name"]] = traced.get(entry["profiling_name"], 0) + 1
        if sum(traced.values()) >= sum(self.traced.values()):  # it may be emptied with the groups
            self.traced = traced

    def write(self) -> None:
        if os.getpid() == self.pid:
            self.look()
            self.write_document()

    def write_document(self) -> None:
        import json

        rank = self.rank if self.rank is not None else int(os.environ.get("RANK", -1))
        document = {
            "rank": rank,
            "argv": sys.argv,
            "losses": self.losses,
            "digests": self.digests,
            "counts": self.counts,
            "before": self.before or 0,
            "groups": self.groups,
            "traced": self.traced,
        }
        if self.losses or self.digests or self.traced:
            path = os.path.join(os.environ["WITNESS_OUT"], f"rank{rank}_{os.getpid()}.json")
            with open(path, "w") as file:
                json.dump(document, file)


def seed(torch: "Any", number: int) -> None:
    import random

    torch.manual_seed(number)
    random.seed(number)
    try:
        import numpy

        numpy.random.seed(number)
    except ImportError:
        pass


def pretend_devices(torch: "Any", count: int) -> None:
    """CPUs in the place of GPUs, as far as small programs look."""
    accelerator = torch.accelerator
    accelerator.is_available = lambda: True
    accelerator.device_count = lambda: count
    accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")
    accelerator.set_device_index = accelerator.device_index = lambda *_: None
    torch.cuda.set_device = lambda *_: None
    torch.cuda.device_count = lambda: count

    def is_device(value: "Any") -> bool:
        return (isinstance(value, int) and not isinstance(value, bool)) or str(value).startswith("cuda")

    def on_cpu(original: "Any") -> "Any":
        def to(self: "Any", *args: "Any", **named: "Any") -> "Any":
            if "device" in named and is_device(named["device"]):
                named["device"] = "cpu"
            return original(self, *("cpu" if is_device(value) else value for value in args), **named)

        return to

    torch.Tensor.to = on_cpu(torch.Tensor.to)
    torch.nn.Module.to = on_cpu(torch.nn.Module.to)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    wrapper = torch.nn.parallel.DistributedDataParallel
    initialize = wrapper.__init__

    def without_devices(self: "Any", module: "Any", *_: "Any", **named: "Any") -> None:
        named.pop("device_ids", None)
        named.pop("output_device", None)
        initialize(self, module, **named)

    wrapper.__init__ = without_devices
    from torch.distributed import distributed_c10d

    original = distributed_c10d.init_process_group

    def init_process_group(*args: "Any", **named: "Any") -> "Any":
        named.pop("device_id", None)
        if args or "backend" in named:
            args, named["backend"] = args[1:], "gloo"
        return original(*args, **named)

    distributed_c10d.init_process_group = torch.distributed.init_process_group = init_process_group


if os.environ.get("WITNESS_OUT"):
    sys.meta_path.insert(0, Finder())
