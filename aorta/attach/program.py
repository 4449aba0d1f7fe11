"""What the program made: data loaders, wrappers and optimizers, their arguments and the lines that made them.

Plain data for run.json, so that advice can say what is set where, and not offer what is in force. Objects are
described when they are made and not kept. Imports nothing heavy: hooks.py loads it with torch.
"""

import _thread
import linecache
import math
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from aorta.launcher import num_local_ranks
from aorta.records.libraries import OWN, library_of, program_frame

MOST = 32
"""Descriptions of a kind that are kept; a program may make a loader in every epoch."""
MOST_FILES = 64
"""That are read for a line, within a step."""
ALIGNED = 8
"""Elements of two bytes, 16 bytes in all, at multiples of which a GPU's fast kernels want rows to begin. Of
four bytes they are half as many."""
SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
"""Microseconds of CPU time, and in how many; of cgroups of version 2 and 1."""
STAT = "/proc/stat"
"""Linux: what each CPU has done since the system began; 15 us to read on two, up to 1 ms on many."""
USAGES = (("/sys/fs/cgroup/cpu.stat", 1e6), ("/sys/fs/cgroup/cpuacct/cpuacct.usage", 1e9))
"""Of cgroups of version 2 and 1: the CPU time of the container's processes, of which as many are a second."""
MOST_APART_S = 5.0
"""That the program waits for what is done on a thread beside it, of some ms."""
LEAST_S = 1.0
"""In which ticks of 10 ms tell how much CPUs idle."""
FSDP_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
FSDP1_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"
FSDP1_PREFETCHES = ("forward_prefetch", "backward_prefetch")
MADE_AT = re.compile(r":(\d+) in (\w+)")
"""Line and function, in the reason of a recompilation: '# train.py:47 in forward'."""
VARIES = re.compile(r"\S+: (?:tensor '(?P<tensor>[^']+)' (?P<what>\w+)|(?P<value>[\w.\[\]']+) == )")
"""What differed, without its value, in such a reason: '0/7: self.seen == 7'."""
LOADER_ARGUMENTS = ("num_workers", "batch_size", "pin_memory", "persistent_workers", "prefetch_factor")
OPTIMIZER_ARGUMENTS = ("foreach", "fused", "capturable")
DDP_ARGUMENTS = (
    "broadcast_buffers",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
)


class ProgramNotes:
    """Descriptions of what one process made, each with `site`, the line of the program, and `times`."""

    def __init__(self) -> None:
        self._loaders: list[dict[str, Any]] = []
        self._wrappers: list[dict[str, Any]] = []
        self._optimizers: list[dict[str, Any]] = []
        self._units: list[dict[str, Any]] = []
        self._by_dataset: dict[int, dict[str, Any]] = {}
        self._iterator = 0
        """The iterator that gave the last batch."""
        self._modes: dict[str, Any] = {}
        self._core_times: CoreTimes | None = None
        """As they were with the modes."""
        self._profiled: tuple[float, float, weakref.ref[Any]] | None = None
        """When the calls of the program's cProfile were counted, how many there were, and it."""
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._replicas: weakref.WeakSet[Any] = weakref.WeakSet()

    def loader_made(self, loader: Any) -> None:
        described = {name: getattr(loader, name, None) for name in LOADER_ARGUMENTS}
        described |= {"kind": type(loader).__name__, "dataset": type(loader.dataset).__name__}
        described["is_on_device"] = _is_on_device(loader.dataset)
        kept = self._kept(self._loaders, described)
        if kept is not None:
            kept.setdefault("num_batches", 0)
            kept.setdefault("num_epochs", 0)
            self._by_dataset[id(loader.dataset)] = kept

    def batch_requested(self, iterator: Any) -> None:
        """Count batches by loader: the one with most is that of the training loop."""
        kept = self._by_dataset.get(id(iterator._dataset))
        if kept is not None:
            kept["num_batches"] += 1
            if id(iterator) != self._iterator or iterator._num_yielded == 0:
                self._iterator = id(iterator)
                kept["num_epochs"] += iterator._num_yielded == 0

    def ddp_made(self, wrapper: Any) -> None:
        self._replicas.add(wrapper)
        described = {name: getattr(wrapper, name, None) for name in DDP_ARGUMENTS}
        buffers = [*wrapper.module.buffers()]
        described |= {
            "kind": type(wrapper).__name__,
            "bucket_cap_mb": getattr(wrapper, "bucket_bytes_cap", 0) / (1 << 20),
            "num_buffers": len(buffers),
            "buffer_bytes": sum(buffer.nbytes for buffer in buffers),
            **_sizes(wrapper.module.parameters()),
        }
        self._kept(self._wrappers, described)

    def unit_made(self, group: Any) -> None:
        """A unit of fully_shard: the parameters that it gathers at once."""
        parameters = [entry.sharded_param for entry in getattr(group, "fsdp_params", ())]
        policy = getattr(group, "mp_policy", None)
        described = {
            "kind": "fully_shard",
            "reshard_after_forward": getattr(group, "post_forward_mesh_info", None) is not None,
            "reduce_dtype": _text(getattr(policy, "reduce_dtype", None)),
            "param_dtype": _text(getattr(policy, "param_dtype", None)),
            "is_offloaded": type(getattr(group, "offload_policy", None)).__name__ == "CPUOffloadPolicy",
            **_sizes(parameters),
        }
        self._kept(self._units, described)

    def flat_unit_made(self, wrapper: Any) -> None:
        """A unit of FullyShardedDataParallel; a wrapper around others alone is none."""
        handle = getattr(wrapper, "_handle", None)
        if handle is None:
            return
        policy = wrapper.mixed_precision
        described = {
            "kind": type(wrapper).__name__,
            "sharding_strategy": getattr(wrapper.sharding_strategy, "name", None),
            "prefetches": all(getattr(wrapper, name, None) for name in FSDP1_PREFETCHES),
            "reduce_dtype": _text(getattr(policy, "reduce_dtype", None)),
            "param_dtype": _text(getattr(policy, "param_dtype", None)),
            "is_offloaded": bool(getattr(getattr(wrapper, "cpu_offload", None), "offload_params", False)),
            **_sizes([handle.flat_param]),
            "num_parameters": len(handle.flat_param._param_infos),
        }
        self._kept(self._units, described)

    def optimizer_made(self, optimizer: Any) -> None:
        self.optimizers.add(optimizer)
        described = {name: optimizer.defaults.get(name) for name in OPTIMIZER_ARGUMENTS}
        described["kind"] = type(optimizer).__name__
        parameters = [entry for group in optimizer.param_groups for entry in group["params"]]
        described |= _sizes(parameters) | _groups_of(optimizer) | {"odd_shape": _odd_shape(parameters)}
        self._kept(self._optimizers, described)

    def _kept(self, kind: list[dict[str, Any]], described: dict[str, Any]) -> dict[str, Any] | None:
        """Count it where it is there already; None where there is no room."""
        described["site"] = _site()
        for other in kind:
            if described.items() <= other.items():
                other["times"] += 1
                return other
        if len(kind) >= MOST:
            return None
        kind.append(described | {"times": 1})
        return kind[-1]

    def read_modes(self, torch: Any) -> None:
        """Read switches of torch that cost time; called within the loop, where they are in force.

        What raises leaves the rest unread, and its reason: no recording ends for that.
        """
        try:
            self._read_modes(torch)
        except Exception as error:
            self._modes["unread"] = f"{type(error).__name__}: {error}"

    def _read_modes(self, torch: Any) -> None:
        dynamo = sys.modules.get("torch._dynamo.utils")
        counters = getattr(dynamo, "counters", {})
        frames = counters.get("frames", {}).get("ok", 0)  # but those with fullgraph=True
        # What torch.compile was asked for, by its mode or its options, of each call that has run.
        backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
        configs = [getattr(one, "config", None) for one in backends.values()]
        hooks = [hook for one in self._replicas for hook, _ in getattr(one, "_comm_hooks", None) or ()]
        self._modes = {
            "anomaly_detection": torch.is_anomaly_enabled(),
            "float32_matmul_precision": float32_matmul_precision(torch),
            "compiled_frames": int(frames or counters.get("stats", {}).get("unique_graphs", 0)),
            "cuda_graphs": any(isinstance(one, dict) and one.get("triton.cudagraphs") for one in configs),
            "comm_hook": bool(hooks),
            "comm_hook_name": None if not hooks else _name_of(hooks[0]),
            "cpu_multiplies": _types_of_cpu(torch),
            "slowed_by": _slowed_by(torch),
            "num_threads": torch.get_num_threads(),
            "num_interop_threads": torch.get_num_interop_threads(),
            "num_local_ranks": num_local_ranks(0),
            **_cores(),
            "threads_at": _line_with("set_num_threads(", [*sys.modules.values()]),
        }
        if self._modes.get("num_cores_around"):
            self._modes["bound_at"] = _line_with("sched_setaffinity(", [*sys.modules.values()])
        if self._modes["anomaly_detection"]:
            self._modes["anomaly_at"] = _line_with("detect_anomaly(", [*sys.modules.values()])
        if hooks:
            self._modes["comm_hook_at"] = _line_with(".register_comm_hook(", [*sys.modules.values()])
        self._core_times = _core_times()
        profile = sys.getprofile()
        num = None if profile is None else _apart(_num_profiled, profile)
        if num is not None:  # it is cProfile, before Python 3.12
            self._profiled = time.monotonic(), num, weakref.ref(profile)
            self._modes["profiled_call_ns"] = _apart(_profiled_call_ns)
        self.read_fallen_back()

    def read_fallen_back(self) -> None:
        """Called at the end again: by then torch may have given up compiling a function."""
        self._modes["fallen_back"] = _fallen_back()

    def read_profiled_calls(self) -> None:
        """Note how many calls a second the program's cProfile has seen since the modes were read."""
        if self._profiled is not None:
            began_s, num_before, profile = self._profiled
            num = _apart(_num_profiled, profile())
            if num is not None and num > num_before:
                per_s = (num - num_before) / (time.monotonic() - began_s)
                self._modes["profiled_calls_per_s"] = round(per_s)

    def read_idle_cores(self) -> None:
        """Note how many of the process's cores nobody has had since the modes were read, and how many it had
        itself."""
        begin, end = self._core_times, _core_times()
        if begin is None or end is None or end.s - begin.s < LEAST_S:
            return
        idle, own = ((now - then) / (end.s - begin.s) for now, then in zip(end[1:3], begin[1:3], strict=True))
        most = self._modes["num_cores"]
        if end.of_container_s is not None and begin.of_container_s is not None:
            most -= (end.of_container_s - begin.of_container_s) / (end.s - begin.s)
        self._modes |= {"idle_cores": round(max(min(idle, most), 0.0), 3), "own_cores": round(own, 3)}

    def described(self) -> dict[str, Any]:
        """For run.json."""
        return {
            "loaders": self._loaders,
            "wrappers": self._wrappers,
            "units": self._units,
            "optimizers": self._optimizers,
            "modes": self._modes,
        }


def _fallen_back() -> list[dict[str, Any]]:
    """Functions that were compiled as often as torch does at most, and that run eagerly where none of that
    fits. Looks at what torch._dynamo keeps, where the program has loaded it."""
    found: list[dict[str, Any]] = []
    with suppress(Exception):  # of torch's own tables, which another version may keep otherwise
        most = sys.modules["torch._dynamo.config"].recompile_limit
        entries_of = sys.modules["torch._C._dynamo.eval_frame"]._debug_get_cache_entry_list
        for code, reasons in [*sys.modules["torch._dynamo.utils"].guard_failures.items()]:
            entries = entries_of(code)
            ids = [entry.compile_id for entry in entries]
            newest = max(ids, key=lambda one: one.frame_compile_id, default=None)
            # A guard of the newest has failed, and nothing was compiled for it.
            reason = next((one for one in reasons if one.startswith(f"{newest}: ")), None)
            if reason is None or len(entries) < most or len(found) >= MOST:
                continue
            made, varies = MADE_AT.search(reason), VARIES.match(reason)
            is_own = made is not None and made[2] == code.co_name
            name = varies and (varies["value"] or f"the {varies['what']} of {varies['tensor']}")
            line = int(made[1]) if made is not None and is_own else code.co_firstlineno
            at = {"file": code.co_filename, "line": line, "function": code.co_qualname}
            found.append({**at, "times": len(entries), "varies": name})
    return found


def _slowed_by(torch: Any) -> dict[str, tuple[str, int] | None]:
    """What looks at each call of Python, each line or each allocation while the thread trains, or leaves its
    operators slower ways, and the line that asks for it."""
    from aorta.device.backend import accelerator

    tracing = sys.modules.get("tracemalloc")
    asked = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    has_device = accelerator().is_initialized()
    history = asked is not None and has_device and asked()
    in_order = torch.are_deterministic_algorithms_enabled()
    is_on = {
        ("tracer", "settrace("): sys.gettrace() is not None,
        ("profile", "Profile("): sys.getprofile() is not None or _is_monitored(),
        ("tracemalloc", "tracemalloc.start("): tracing is not None and tracing.is_tracing(),
        ("memory_history", "_record_memory_history("): history,
        ("mkldnn", "backends.mkldnn."): not torch.backends.mkldnn.enabled,
        ("cudnn_benchmark", "cudnn.benchmark"): has_device and torch.backends.cudnn.benchmark,
        ("deterministic", "use_deterministic_algorithms("): in_order,
        ("filled", "fill_uninitialized_memory"): in_order
        and torch.utils.deterministic.fill_uninitialized_memory,
    }
    modules = [*sys.modules.values()] if any(is_on.values()) else []
    return {name: _line_with(text, modules) for (name, text), is_one in is_on.items() if is_one}


def _cores() -> dict[str, Any]:
    """That the process may use, by its mask and its container's quota, and of these whole ones, of which a
    processor may show each as two; whether it has the mask of the process that started it, and with it the
    cores of the ranks beside it; and where it is bound to some of that one's cores, how many these are. None
    where nobody tells."""
    if not hasattr(os, "sched_getaffinity"):
        return {"num_cores": os.cpu_count(), "num_whole_cores": None, "shares_cores": None}
    mask, limit = os.sched_getaffinity(0), _quota()
    whole, shares, around = None, None, None
    with suppress(OSError):
        whole = min(len({Path(SIBLINGS.format(cpu)).read_text() for cpu in mask}), limit)
    with suppress(OSError):
        of_parent = os.sched_getaffinity(os.getppid())
        shares = of_parent == mask
        around = min(len(of_parent), limit) if of_parent > mask else None
    cores = {"num_cores": min(len(mask), limit), "num_whole_cores": whole, "shares_cores": shares}
    return cores | ({"num_cores_around": around} if around else {})


def _is_monitored() -> bool:
    """Whether a profiler is on that has no function: cProfile of Python 3.12 and later."""
    tools = getattr(sys, "monitoring", None)
    return tools is not None and tools.get_tool(tools.PROFILER_ID) is not None


def _num_profiled(profile: Any) -> int:
    """Calls that a cProfile has seen, but those of the recorder."""
    entries = ((getattr(entry.code, "co_filename", ""), entry.callcount) for entry in profile.getstats())
    return sum(num for path, num in entries if library_of(path) != OWN)


def _profiled_call_ns() -> float:
    """What cProfile adds to a call in a burst of 1 ms."""
    import cProfile  # which the program has loaded

    def called(text: str) -> int:
        return len(text)

    took_ns: list[int] = []
    for profile in (None, cProfile.Profile()) * 5:
        if profile is not None:
            profile.enable()
        began_ns = time.perf_counter_ns()
        for _ in range(500):
            called("")
        took_ns.append(time.perf_counter_ns() - began_ns)
        if profile is not None:
            profile.disable()
    return max(min(took_ns[1::2]) - min(took_ns[::2]), 0) / 1000


def float32_matmul_precision(torch: Any) -> str:
    """'highest', 'high' or 'medium'. Where a program sets one backend's precision, as
    TrainingArguments(tf32=True) does, torch's function raises: that of CUDA's products, then."""
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def _apart(work: Callable[..., float], *given: Any) -> float | None:
    """What it gives on a thread of its own, at whose calls nothing of the program looks; None: it fails."""
    found: list[float] = []
    done = _thread.allocate_lock()

    def run() -> None:
        with suppress(Exception):
            found.append(work(*given))
        done.release()

    done.acquire()
    _thread.start_new_thread(run, ())  # not of threading, whose threads the program may have profiled
    done.acquire(timeout=MOST_APART_S)
    return found[0] if found else None


def _types_of_cpu(torch: Any) -> list[str] | None:
    """Of two bytes, that the CPU has instructions for; None where torch does not tell. Without these products
    take 17 times as long as in fp32 (a core of an AMD EPYC with AVX2)."""
    try:
        tells = torch.ops.mkldnn
        found = {"bf16": tells._is_mkldnn_bf16_supported(), "fp16": tells._is_mkldnn_fp16_supported()}
    except (AttributeError, RuntimeError):
        return None
    return [name for name, is_there in found.items() if is_there]


class CoreTimes(NamedTuple):
    """Seconds so far."""

    s: float
    idle_s: float
    """Of the CPUs of the process's mask, in which none of the machine's processes had them."""
    own_s: float
    """CPU time of the process."""
    of_container_s: float | None
    """The same of all processes in its container; None where that may use the whole mask."""


def _core_times() -> CoreTimes | None:
    """None where the system does not tell."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        mask = os.sched_getaffinity(0)
        rows = [row.split() for row in Path(STAT).read_text().splitlines() if row.startswith("cpu")]
        ticks = [int(row[4]) + int(row[5]) for row in rows if row[0] in {f"cpu{one}" for one in mask}]
        of_container_s = _container_s() if _quota() < len(mask) else None
        if len(ticks) == len(mask) and (of_container_s is not None or _quota() >= len(mask)):
            idle_s = sum(ticks) / os.sysconf("SC_CLK_TCK")
            return CoreTimes(time.monotonic(), idle_s, time.process_time(), of_container_s)
    return None


def _container_s() -> float | None:
    for path, per_s in USAGES:
        with suppress(OSError, ValueError):
            return int(Path(path).read_text().replace("usage_usec", "").split()[0]) / per_s
    return None


def _quota() -> int:
    """Cores that the container's processes have together; as many as there are without a limit."""
    for paths in QUOTAS:
        with suppress(OSError, ValueError):  # 'max' is no number, and -1 no quota
            quota, period = (int(each) for path in paths for each in Path(path).read_text().split())
            if quota > 0:
                return max(round(quota / period), 1)
    return os.cpu_count() or 1


def _line_with(text: str, modules: Iterable[Any]) -> tuple[str, int] | None:
    """The only line of the program's modules with this text, not in a comment; None of a program of many
    files, too."""
    loaded = (getattr(one, "__dict__", {}).get("__file__") for one in modules)  # asks no lazy one
    paths = {path for path in loaded if isinstance(path, str) and path.endswith(".py")}
    own = [path for path in sorted(paths) if not library_of(path)]
    found = [
        (path, number)
        for path in (own if len(own) <= MOST_FILES else ())
        for number, line in enumerate(linecache.getlines(path), 1)
        if text in line.partition("#")[0]
    ]
    return found[0] if len(found) == 1 else None


def _is_on_device(dataset: Any) -> bool:
    """Whether a data set holds tensors of a device, from which it takes items."""
    dataset = getattr(dataset, "dataset", dataset)  # of a Subset
    with suppress(Exception):  # of the program's own class
        held = [one for value in vars(dataset).values() for one in _entries(value)]
        return any(getattr(getattr(one, "device", None), "type", "cpu") != "cpu" for one in held)
    return False


def _entries(value: Any) -> list[Any]:
    """Of a tuple or dict such as a data set has of its columns; else the value."""
    entries = [*value.values()] if isinstance(value, dict) else value
    is_of_columns = isinstance(entries, tuple | list) and len(entries) <= MOST
    return [*entries] if is_of_columns else [value]


def _sizes(parameters: Any) -> dict[str, Any]:
    bytes_of: dict[str, int] = {}
    found = [*parameters]
    for entry in found:
        dtype = str(_text(entry.dtype))
        bytes_of[dtype] = bytes_of.get(dtype, 0) + entry.numel() * entry.element_size()
    return {
        "num_parameters": len(found),
        "parameter_bytes": sum(bytes_of.values()),
        "bytes_of_dtypes": bytes_of,
    }


def _odd_shape(parameters: Iterable[Any]) -> list[int] | None:
    """Of the largest matrix of which a dimension is no multiple of ALIGNED."""
    shapes = [[*map(int, one.shape)] for one in parameters if one.dim() == 2]
    odd = [shape for shape in shapes if min(shape) > 1 and any(size % ALIGNED for size in shape)]
    return max(odd, key=math.prod, default=None)


def _groups_of(optimizer: Any) -> dict[str, int]:
    """How many groups its parameters are in, and how many these could be: as many as have other options."""
    groups = optimizer.param_groups
    options = {tuple(_plain(group.get(name)) for name in optimizer.defaults) for group in groups}
    return {"num_groups": len(groups), "num_unlike_groups": len(options)}


def _plain(value: Any) -> Any:
    """What two options are compared by; a tensor by itself, as its value may be a device's."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value if value is None or isinstance(value, bool | int | float | str) else id(value)


def _name_of(hook: Any) -> str:
    function = getattr(hook, "func", hook)  # of a partial
    return str(getattr(function, "__name__", type(function).__name__))


def _text(value: Any) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")


def _site() -> str | None:
    """'train.py:41'; None where no line of the program called."""
    frame = program_frame()
    return None if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
