"""What is described of a program's loaders, wrappers and optimizers, and where they were made."""

import cProfile
import gc
import inspect
import itertools
import os
import sys
import tracemalloc
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Subset, TensorDataset

from aorta.attach import program
from aorta.attach.program import MOST, CoreTimes, ProgramNotes, _line_with
from aorta.records.reader import read_run
from tests.dist.launch import run_python

KILLED = """
import os, signal, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
os.kill(os.getpid(), signal.SIGKILL)
"""


class Columns:
    def __init__(self, rows, is_dict):
        self.of_rows = {"rows": rows} if is_dict else rows

    def __len__(self):
        return 6


@pytest.fixture
def notes():
    return ProgramNotes()


def here(offset=0):
    return f"test_program.py:{inspect.currentframe().f_back.f_lineno + offset}"


def test_a_loader_is_described_with_its_arguments_and_its_line(notes):
    notes.loader_made(DataLoader([1, 2, 3], batch_size=2))
    site = here(-1)
    (loader,) = notes.described()["loaders"]
    assert (loader["num_workers"], loader["batch_size"], loader["site"]) == (0, 2, site)


@pytest.mark.parametrize("of", ["tensors", "a dict", "attributes"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_loader_of_tensors_of_a_device_is_told(notes, of, device):
    rows = torch.zeros(6, 2, device=device)
    dataset = TensorDataset(rows) if of == "tensors" else Subset(Columns(rows, of == "a dict"), [0, 1])
    notes.loader_made(DataLoader(dataset, batch_size=2))
    (loader,) = notes.described()["loaders"]
    assert loader["is_on_device"] == (device == "meta")


def test_batches_and_epochs_tell_the_loader_that_the_loop_reads(notes):
    train, other = DataLoader([*range(6)], batch_size=2), DataLoader([1], num_workers=1)
    for loader in (train, other):
        notes.loader_made(loader)
    for _ in range(2):
        iterator = iter(train)
        for _ in range(3):
            notes.batch_requested(iterator)
            next(iterator)
    described = notes.described()["loaders"]
    assert [(row["num_batches"], row["num_epochs"]) for row in described] == [(6, 2), (0, 0)]


@pytest.mark.parametrize(
    ("own", "of_parent", "around"), [({0}, {0, 1}, 2), ({0, 1}, {0, 1}, None), ({2}, {0}, None)]
)
def test_a_process_that_is_bound_to_some_cores_tells_how_many_there_are(
    monkeypatch, notes, own, of_parent, around
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda number: of_parent if number else own)
    monkeypatch.setattr(program, "_quota", lambda: 8)
    notes.read_modes(torch)
    assert notes.described()["modes"].get("num_cores_around") == around


@pytest.mark.heavy
def test_a_run_that_is_killed_has_told_what_the_program_made(tmp_path):
    (tmp_path / "train.py").write_text(KILLED)
    recorded = ("-m", "aorta", "run", "--no-report", "-o", tmp_path / "run", "--", sys.executable)
    run_python(*recorded, tmp_path / "train.py")
    record = read_run(tmp_path / "run")
    assert record.finished_unix_ns is None
    (optimizer,) = record.program["optimizers"]
    assert (optimizer["kind"], optimizer["site"]) == ("SGD", "train.py:4")
    modes = record.program["modes"]
    assert min(modes[f"num_{of}"] for of in ("threads", "interop_threads", "cores")) >= 1
    assert (modes["num_local_ranks"], modes["shares_cores"]) == (None, True)


def test_what_is_made_again_and_again_is_one_description(notes):
    parameter = torch.zeros(4, requires_grad=True)
    for _ in range(3):
        notes.optimizer_made(torch.optim.SGD([parameter], lr=0.1, foreach=False))
    (optimizer,) = notes.described()["optimizers"]
    assert (optimizer["kind"], optimizer["foreach"], optimizer["times"]) == ("SGD", False, 3)
    assert (optimizer["num_parameters"], optimizer["parameter_bytes"]) == (1, 16)
    assert optimizer["bytes_of_dtypes"] == {"float32": 16}


def test_a_unit_of_fsdp_tells_how_it_is_sharded_and_what_it_holds(notes):
    flat = torch.zeros(24)
    flat._param_infos = ("weight", "bias")
    wrapper = SimpleNamespace(
        _handle=SimpleNamespace(flat_param=flat),
        mixed_precision=SimpleNamespace(param_dtype=torch.bfloat16, reduce_dtype=None),
        sharding_strategy=SimpleNamespace(name="FULL_SHARD"),
    )
    wrapper.forward_prefetch, wrapper.backward_prefetch = True, None
    notes.flat_unit_made(wrapper)
    site = here(-1)
    notes.flat_unit_made(SimpleNamespace(_handle=None))  # around others
    (row,) = notes.described()["units"]
    assert (row["sharding_strategy"], row["param_dtype"], row["reduce_dtype"]) == (
        "FULL_SHARD",
        "bfloat16",
        None,
    )
    assert (row["num_parameters"], row["parameter_bytes"], row["site"]) == (2, 96, site)
    assert row["prefetches"] is False


def test_a_unit_tells_whether_it_keeps_its_parameters_on_the_cpu(notes):
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for policy in (OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)):
        mesh = init_device_mesh("cpu", (1,))
        model = fully_shard(torch.nn.Linear(2, 2), mesh=mesh, offload_policy=policy)
        notes.unit_made(model._get_fsdp_state()._fsdp_param_group)
    dist.destroy_process_group()
    assert [row["is_offloaded"] for row in notes.described()["units"]] == [False, True]


@pytest.mark.parametrize(
    ("weight_decay", "unlike"),
    [
        pytest.param([0.0, 0.1, 0.1, 0.0], 2, id="with-and-without"),
        pytest.param([0.1, 0.2, 0.3, 0.4], 4, id="all-unlike"),
    ],
)
def test_an_optimizer_tells_how_many_of_its_groups_have_options_of_their_own(notes, weight_decay, unlike):
    groups = [
        {"params": [torch.zeros(1, requires_grad=True)], "weight_decay": each, "name": f"layer {place}"}
        for place, each in enumerate(weight_decay)
    ]
    notes.optimizer_made(torch.optim.AdamW(groups))
    (optimizer,) = notes.described()["optimizers"]
    assert (optimizer["num_groups"], optimizer["num_unlike_groups"]) == (4, unlike)


def test_a_replica_tells_its_buckets_and_buffers(notes):
    wrapper = torch.nn.Module()
    wrapper.module, wrapper.bucket_bytes_cap, wrapper._comm_hooks = torch.nn.BatchNorm1d(4), 1 << 20, []
    notes.ddp_made(wrapper)
    (row,) = notes.described()["wrappers"]
    assert (row["bucket_cap_mb"], row["num_buffers"], row["buffer_bytes"]) == (1.0, 3, 40)


def test_a_hook_that_a_replica_is_given_later_is_known(notes):
    replica = torch.nn.Module()
    replica.module, replica._comm_hooks = torch.nn.Linear(2, 2), []
    notes.ddp_made(replica)
    found = []
    for hooks in ([], [(partial(fp16_compress_hook), None)], [(allreduce_hook, None)]):
        replica._comm_hooks = hooks
        notes.read_modes(torch)
        modes = notes.described()["modes"]
        found.append((modes["comm_hook"], modes["comm_hook_name"]))
    assert found == [(False, None), (True, "fp16_compress_hook"), (True, "allreduce_hook")]


@pytest.mark.parametrize(
    ("shapes", "odd"),
    [
        pytest.param([(50257, 64), (101, 64), (50257,)], [50257, 64], id="the-largest"),
        pytest.param([(64, 3, 7, 7), (50304, 64), (1, 7)], None, id="convolutions-vectors-and-even-ones"),
    ],
)
def test_an_optimizer_tells_the_largest_matrix_with_an_odd_dimension(notes, shapes, odd):
    notes.optimizer_made(torch.optim.SGD([torch.zeros(shape, requires_grad=True) for shape in shapes], 0.1))
    (optimizer,) = notes.described()["optimizers"]
    assert optimizer["odd_shape"] == odd


def test_descriptions_are_bounded(notes):
    for size in range(1, MOST + 10):
        notes.loader_made(DataLoader([1], batch_size=size))
    assert len(notes.described()["loaders"]) == MOST


STAT = """cpu  900 0 900 900 900 0 0 0 0 0
cpu0 10 0 20 300 100 0 0 0 0 0
cpu1 10 0 20 999 999 0 0 0 0 0
cpu2 10 0 20 50 0 0 0 0 0 0
cpu10 10 0 20 777 0 0 0 0 0 0
intr 1009424 0 0
"""


@pytest.mark.parametrize(
    ("quota", "usage", "found"),
    [
        pytest.param(2, None, (4.5, None), id="no-limit"),
        pytest.param(1, "usage_usec 2500000\nuser_usec 1\n", (4.5, 2.5), id="a-limit"),
        pytest.param(1, None, None, id="a-limit-of-which-nobody-tells-the-use"),
    ],
)
def test_idle_time_is_of_the_cpus_of_the_mask(monkeypatch, tmp_path, quota, usage, found):
    """CPUs 0 and 2, which have idled for 400 and 50 ticks of 10 ms."""
    (tmp_path / "stat").write_text(STAT)
    if usage:
        (tmp_path / "cpu.stat").write_text(usage)
    monkeypatch.setattr(program, "STAT", str(tmp_path / "stat"))
    monkeypatch.setattr(program, "USAGES", ((str(tmp_path / "cpu.stat"), 1e6),))
    monkeypatch.setattr(program, "_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2})
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    times = program._core_times()
    assert (times and (times.idle_s, times.of_container_s)) == found


def test_a_system_that_does_not_tell_what_cpus_do_has_no_idle_cores(monkeypatch, notes):
    monkeypatch.setattr(program, "STAT", "/proc/no-such-file")
    monkeypatch.setattr(program, "LEAST_S", 0.0)
    notes.read_modes(torch)
    notes.read_idle_cores()
    assert "idle_cores" not in notes.described()["modes"]


@pytest.mark.parametrize(
    ("end", "found"),
    [
        pytest.param(CoreTimes(110.0, 35.0, 18.0, None), (2.5, 1.5), id="of-four"),
        pytest.param(CoreTimes(110.0, 35.0, 18.0, 24.0), (1.6, 1.5), id="of-its-container-s-four"),
        pytest.param(CoreTimes(110.0, 90.0, 18.0, None), (4.0, 1.5), id="never-more-than-there-are"),
        pytest.param(CoreTimes(100.5, 12.0, 4.0, None), None, id="too-short-for-ticks"),
        pytest.param(None, None, id="no-longer-told"),
    ],
)
def test_cores_that_nobody_had_are_counted_between_the_third_step_and_the_end(monkeypatch, notes, end, found):
    """In 10 s CPUs idled for 25, the process had 15 s, and its container 24."""
    begin = CoreTimes(100.0, 10.0, 3.0, None if end is None or end.of_container_s is None else 0.0)
    times = iter((begin, end))
    monkeypatch.setattr(program, "_core_times", lambda: next(times))
    notes.read_modes(torch)
    notes._modes["num_cores"] = 4
    notes.read_idle_cores()
    modes = notes.described()["modes"]
    told = (modes["idle_cores"], modes["own_cores"]) if "idle_cores" in modes else None
    assert told == found


@pytest.mark.parametrize(("num", "found"), [(1, True), (2, False)])
def test_the_line_that_sets_threads_is_found_where_there_is_one(tmp_path, num, found):
    paths = [tmp_path / f"train_{number}.py" for number in range(num)]
    for path in paths:
        path.write_text("# not torch.set_num_threads(4)\ntorch.set_num_threads(1)\n")
    modules = [SimpleNamespace(__file__=str(path)) for path in (*paths, Path(torch.__file__))]
    modules += [None, SimpleNamespace(__file__=None)]
    assert _line_with("set_num_threads(", modules) == ((str(paths[0]), 2) if found else None)


def test_switches_are_read_where_they_are_in_force(notes):
    with torch.autograd.set_detect_anomaly(True):
        notes.read_modes(torch)
    modes = notes.described()["modes"]
    assert modes["anomaly_detection"] is True
    assert "anomaly_at" in modes
    assert ("bf16" in modes["cpu_multiplies"]) == torch.ops.mkldnn._is_mkldnn_bf16_supported()


def test_the_precision_of_products_is_read_where_torch_refuses_to_tell_it(notes):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        notes.read_modes(torch)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert torch.get_float32_matmul_precision() == "highest"
    modes = notes.described()["modes"]
    assert (modes["float32_matmul_precision"], "unread" in modes) == ("high", False)


def test_a_switch_that_cannot_be_read_leaves_its_reason(monkeypatch, notes):
    def broken():
        raise ValueError("planted")

    monkeypatch.setattr(torch, "is_anomaly_enabled", broken)
    notes.read_modes(torch)
    notes.read_idle_cores()
    assert notes.described()["modes"] == {"unread": "ValueError: planted"}


def test_what_slows_each_call_or_allocation_is_read_where_it_is_on(notes):
    notes.read_modes(torch)
    off = notes.described()["modes"]["slowed_by"]
    tracemalloc.start(1)
    sys.setprofile(lambda *_: None)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.backends.mkldnn.flags(enabled=False):
            notes.read_modes(torch)
    finally:
        torch.use_deterministic_algorithms(False)
        sys.setprofile(None)
        tracemalloc.stop()
    assert off == {}
    assert notes.described()["modes"]["slowed_by"].keys() == {
        *("profile", "tracemalloc", "mkldnn"),
        *("deterministic", "filled"),
    }


def profiled(notes, work, profile=None):
    """What is noted of a program whose profiler is on while it works, and is told of at its end."""
    profile = profile or cProfile.Profile()
    profile.enable()
    notes.read_modes(torch)
    work(profile)
    profile.disable()
    notes.read_profiled_calls()
    return notes.described()["modes"]


def halved(number):
    return number / 2


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="cProfile has no function of the interpreter's there")
def test_calls_that_a_profiler_sees_are_counted_with_what_one_costs(notes, monkeypatch):
    times = itertools.count(100.0, 2.0)
    monkeypatch.setattr(program.time, "monotonic", lambda: next(times))
    modes = profiled(notes, lambda _: [halved(number) for number in range(50_000)])
    assert modes["slowed_by"].keys() == {"profile"}
    num_s = (modes["profiled_calls_per_s"] * 2, modes["profiled_calls_per_s"] * 4)  # other readings between
    assert num_s[0] <= 50_500
    assert num_s[1] >= 50_000
    assert 0 < modes["profiled_call_ns"] < 1e5


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="cProfile has no function of the interpreter's there")
def test_collections_of_garbage_do_not_change_the_count(notes):
    """Their callbacks are calls, too, which the tree that is walked through is sorted by."""
    profile, seen = cProfile.Profile(), []

    def callback(phase, info):
        seen.append(phase)

    gc.callbacks.append(callback)
    try:
        profile.enable()
        functions = [eval(f"lambda: {number}") for number in range(3000)]
        for function in functions * 2:
            function()
        counts = {program._apart(program._num_profiled, profile) for _ in range(20)}
        profile.disable()
    finally:
        gc.callbacks.remove(callback)
    assert min(counts) >= 6000
    assert max(counts) < 12_500  # with eval, and what it runs


def test_a_profiler_that_is_cleared_is_gone_or_is_a_function_has_no_count(notes):
    modes = profiled(notes, lambda profile: profile.clear())
    assert not modes.get("profiled_calls_per_s", 0)
    sys.setprofile(lambda *_: None)
    try:
        notes.read_modes(torch)
    finally:
        sys.setprofile(None)
    notes.read_profiled_calls()
    assert "profiled_calls_per_s" not in notes.described()["modes"]


def test_a_profiler_without_a_function_is_known_by_its_tool(notes, monkeypatch):
    """As cProfile of Python 3.12."""
    tools = SimpleNamespace(PROFILER_ID=2, get_tool=lambda number: "cProfile" if number == 2 else None)
    monkeypatch.setattr(sys, "monitoring", tools, raising=False)
    notes.read_modes(torch)
    assert notes.described()["modes"]["slowed_by"].keys() == {"profile"}


class Ramped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def forward(self, rows):
        self.seen += 1
        return torch.tanh(rows) * self.seen


@pytest.mark.parametrize("num_calls", [8, 9])
def test_a_function_is_noted_that_torch_no_longer_compiles_anew(notes, num_calls):
    compiled = torch.compile(Ramped(), backend="eager")
    notes.read_fallen_back()
    for _ in range(num_calls):
        compiled(torch.ones(3))
    before = notes.described()["modes"]["fallen_back"]
    notes.read_fallen_back()
    line = inspect.getsourcelines(Ramped.forward)[1] + 1
    at = {"file": __file__, "line": line, "function": "Ramped.forward"}
    assert before == []
    assert notes.described()["modes"]["fallen_back"] == (
        [{**at, "times": 8, "varies": "self.seen"}]
        if num_calls > torch._dynamo.config.recompile_limit
        else []
    )


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_program_that_compiles_is_noted_as_one(notes, is_whole):
    """torch counts no frames of one that may have no graph break."""
    torch.compile(lambda rows: rows * 2, backend="eager", fullgraph=is_whole)(torch.ones(3))
    notes.read_modes(torch)
    assert notes.described()["modes"]["compiled_frames"] == 1


def test_compilations_that_fit_what_comes_are_no_fallback(notes):
    compiled = torch.compile(torch.tanh, backend="eager", dynamic=True)
    for num in range(2, 14):
        compiled(torch.ones(num))
    notes.read_fallen_back()
    assert notes.described()["modes"]["fallen_back"] == []


def test_what_torch_keeps_otherwise_is_not_read(notes, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", None)
    notes.read_fallen_back()
    assert notes.described()["modes"]["fallen_back"] == []
