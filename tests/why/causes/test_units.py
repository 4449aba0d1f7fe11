"""Units of FSDP and buckets of DistributedDataParallel that are too many: what they cost, and which modules
would be units instead."""

import msgspec
import numpy as np
import pytest

from aorta.account.judge.judged import judge
from aorta.account.load.open import load_run
from aorta.why.causes.losses.units import buckets_of, units_of
from tests.records.run_folders import run_record
from tests.why.causes.runs import MIB, Host, causes, run_of

pytestmark = pytest.mark.heavy

LINEARS = [
    f"blocks.{block}.{name}"
    for block in range(8)
    for name in ("attention.q", "attention.k", "attention.v", "attention.o", "feed.up", "feed.down")
]
BLOCKS = [f"blocks.{block}" for block in range(8)]


def named(folder, make, **unit):
    """unit: what the program notes of the units that it made; nothing where it was not watched."""
    program = {"loaders": [], "units": [{"kind": "fully_shard", "times": 99, "site": "train.py:9"} | unit]}
    run = run_record(2, program=program if unit else None)
    return [
        one
        for one in causes(judge(load_run(run_of(folder, make, run), "run"), 1))
        if one.kind == "small_units"
    ]


@pytest.mark.parametrize(
    ("names", "num_merged", "level"),
    [
        pytest.param([*LINEARS, "root"], 9, "blocks.0, blocks.1, …", id="layers-of-blocks"),
        pytest.param(
            [f"layers.{i}.experts.{j}.w{k}" for i in range(4) for j in range(8) for k in range(3)],
            4,
            "layers.0, layers.1, …",
            id="small-experts",
        ),
        pytest.param([str(place) for place in range(20)], 1, "", id="layers-of-one-level"),
    ],
)
def test_units_of_a_module_of_the_next_level_become_one(names, num_merged, level):
    """All of 100 kB: even those of a whole layer are small."""
    units = units_of(dict.fromkeys(names, 1e5))
    assert (units.num, units.num_merged, units.level) == (len(names), num_merged, level)


@pytest.mark.parametrize(
    ("names", "size"),
    [
        pytest.param(BLOCKS, 100 * MIB, id="whole-blocks"),
        pytest.param(LINEARS[:6], 1e5, id="few"),
        pytest.param([f"blocks.{i}.{name}" for i in range(4) for name in ("a", "b")][:7], 1e5, id="two-each"),
    ],
)
def test_units_that_nothing_would_hold_are_none(names, size):
    assert units_of(dict.fromkeys(names, size)) is None


def test_an_expert_is_a_unit_where_it_is_large():
    names = [f"layers.{i}.experts.{j}.w{k}" for i in range(4) for j in range(8) for k in range(3)]
    assert units_of(dict.fromkeys(names, 8.0 * MIB)).level == "layers.0.experts.0, layers.0.experts.1, …"


def device_runs_dry(names, late_ms=0.4, work_ms=0.1):
    """Before each unit of a pass the device idles: the host is in the unit's hooks."""

    def make(rank, step, noise):
        host = Host()
        for unit in range(len(names)):
            host.idle(late_ms * noise.gauss(1, 0.01))
            host.comm(0.05, "all_gather", size=2 * MIB, module=unit, lead=0.0).work(work_ms)
        for unit in reversed(range(len(names))):
            host.idle(late_ms * noise.gauss(1, 0.01))
            host.comm(0.05, "all_gather", size=2 * MIB, module=unit, lead=0.0).work(2 * work_ms)
            host.comm(0.05, "reduce_scatter", size=2 * MIB, module=unit, lead=0.0)
        return host, {"source": "kernels", "modules": list(names)}

    return make


def test_a_unit_of_each_layer_costs_what_the_device_idles_for_it(tmp_path):
    """The device idles 48 x 0.8 ms, of which 8 units of 48 keep theirs: 32 ms go. Calls that are all alike
    tell no rate but their own, and so no latency."""
    (cause,) = named(tmp_path / "run", device_runs_dry(LINEARS), num_parameters=2)
    assert cause.ms == pytest.approx(32.0, rel=0.02)
    assert cause.line.text == "train.py:9"
    assert "each of blocks.0, blocks.1, … one unit" in cause.change
    assert "48 units become 8" in cause.change
    assert any(text.startswith("32.0 ms of the loss is the device idling") for text in cause.evidence)


def test_units_are_known_by_calls_where_no_step_has_its_segments(tmp_path):
    def make(rank, step, noise):
        host, changes = device_runs_dry(LINEARS)(rank, step, noise)
        return host, changes | {"active_segments": None}

    (cause,) = named(tmp_path / "run", make, num_parameters=2)
    assert cause.ms == pytest.approx(32.0, rel=0.02)


def test_launches_are_those_of_earlier_steps_where_later_ones_do_not_tell_them(tmp_path):
    def make(rank, step, noise):
        host, changes = device_runs_dry(LINEARS)(rank, step, noise)
        if step >= 8:
            host.calls = [(*call[:-1], None) for call in host.calls]
        return host, changes

    run = run_record(2, program={"units": [{"kind": "fully_shard", "times": 99, "num_parameters": 2}]})
    judged = judge(load_run(run_of(tmp_path / "run", make, run), "run"), 1)
    later = msgspec.structs.replace(judged, num_warmup=10, part_of=judged)
    (cause,) = [one for one in causes(later) if one.kind == "small_units"]
    assert cause.ms == pytest.approx(32.0, rel=0.02)


def test_units_of_the_older_kind_are_made_by_a_policy(tmp_path):
    unit = {"kind": "FullyShardedDataParallel", "num_parameters": 2}
    (cause,) = named(tmp_path / "run", device_runs_dry(LINEARS), **unit)
    assert "auto_wrap_policy=ModuleWrapPolicy({their class})" in cause.change


@pytest.mark.parametrize(
    ("names", "unit"),
    [
        pytest.param(BLOCKS, {"num_parameters": 12}, id="blocks"),
        pytest.param(LINEARS, {"num_parameters": 12, "times": 8}, id="gathers-of-tensor-parallel-layers"),
    ],
)
def test_what_no_larger_unit_would_hold_is_no_loss_of_units(tmp_path, names, unit):
    assert named(tmp_path / "run", device_runs_dry(names), **unit) == []


def test_units_of_a_program_that_nobody_watched_are_those_that_are_gathered_before_any_is_reduced(tmp_path):
    """As above; neither who made them is known nor where."""
    (cause,) = named(tmp_path / "run", device_runs_dry(LINEARS))
    assert cause.subject == "48 small units of FSDP, of 2.0 MiB each"
    assert cause.ms == pytest.approx(32.0, rel=0.02)
    assert cause.line is None
    assert cause.change.startswith("make each of blocks.0, blocks.1, … one unit with all that it holds")


@pytest.mark.parametrize("is_of_gathered", [False, True])
def test_what_is_reduced_before_the_next_is_gathered_is_of_no_units(tmp_path, is_of_gathered):
    """As tensor parallel layers do: what a first one gathers a second one reduces, or itself in its backward
    pass."""

    def make(rank, step, noise):
        host = Host()
        for place in range(0, len(LINEARS), 2):
            host.idle(1.0).comm(0.05, "all_gather", size=2 * MIB, module=place, lead=0.0).work(0.1)
            reduced = place + (not is_of_gathered)
            host.comm(0.05, "reduce_scatter", size=2 * MIB, module=reduced, lead=0.0).work(0.1)
        return host, {"source": "kernels", "modules": LINEARS}

    assert named(tmp_path / "run", make) == []


def test_a_device_that_is_never_idle_loses_nothing_to_many_units(tmp_path):
    """Each waits a little for its bytes alone."""
    assert named(tmp_path / "run", device_runs_dry(LINEARS, 0.0, 5.0), num_parameters=2) == []


BUCKETS = [f"bucket {place}: layers.{47 - place}.weight" for place in range(48)]


def of_buckets(folder, source="kernels", num_kernels=0, bucket_cap_mb=0.05, third=0.4):
    """The device idles 0.4 ms before each of 48 buckets of 2 MiB, of 0.2 ms in all, or another time before
    each third one."""

    def make(rank, step, noise):
        host = Host().work(5.0)
        for place in range(len(BUCKETS)):
            idle = 0.4 if place % 3 else third
            host.idle(idle * noise.gauss(1, 0.01)).comm(0.1, size=2 * MIB, module=place, lead=0.0).work(0.1)
        return host, {"source": source, "modules": BUCKETS}

    wrapper = {"kind": "DistributedDataParallel", "bucket_cap_mb": bucket_cap_mb, "site": "train.py:9"}
    program = {"loaders": [], "wrappers": [wrapper | {"parameter_bytes": 96 * MIB}]}
    run = run_record(2, program=None if bucket_cap_mb is None else program)
    judged = judge(load_run(run_of(folder, make, run), "run"), 1)
    kernels = {"kernel_count.gemm": np.full_like(judged.metrics["step_ms"], num_kernels)}
    judged = msgspec.structs.replace(judged, metrics={**judged.metrics, **(kernels if num_kernels else {})})
    return [one for one in causes(judged) if one.kind == "small_units"]


def test_small_buckets_cost_what_the_device_idles_for_them(tmp_path):
    """Of 48, 96 MiB in all, 5 would be left: one that is made small, and 4 of 25 MiB. 43 of 48 parts go of
    the 19.2 ms that the device idles; of calls that are all alike no latency is known. Of a step of 33.8 ms,
    9.8 ms of work are left, or as little of them as mending may be off."""
    (cause,) = of_buckets(tmp_path / "run")
    assert cause.subject == "48 small buckets of DistributedDataParallel, of 2.0 MiB each in train.py:9"
    assert cause.ms == pytest.approx(17.2, rel=0.03)
    assert cause.interval_ms == pytest.approx((17.2 * np.exp(-0.65), 33.8 - 9.8 * np.exp(-0.3)), rel=0.03)
    assert cause.change.endswith("at its default of 25, so that 48 buckets become 5: at train.py:9")
    assert cause.evidence[0].startswith("48 buckets are reduced one by one: each costs 0.4")
    assert cause.evidence[0].endswith(", and 43 need not be")


def test_buckets_of_a_program_that_nobody_watched_are_known_by_their_sizes(tmp_path):
    (cause,) = of_buckets(tmp_path / "run", bucket_cap_mb=None)
    assert cause.subject == "48 small buckets of DistributedDataParallel, of 2.0 MiB each"
    assert cause.change.endswith("at its default of 25, so that 48 buckets become 5")


@pytest.mark.parametrize("third", [0.4, 0.1], ids=["alike", "some-with-fewer-operators"])
def test_what_operators_between_buckets_cost_the_host_is_no_loss_of_buckets(tmp_path, third):
    """0.6 ms from one launch to the next, as a rule; half of 480 kernels in that pass: 5 for each bucket,
    which counts as 2. 2 of 7 parts of 43 x 0.6 ms."""
    (cause,) = of_buckets(tmp_path / "run", num_kernels=480, third=third)
    assert cause.ms == pytest.approx(43 * 0.6 * 2 / 7, rel=0.02)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"bucket_cap_mb": 25.0}, id="default-size"),
        pytest.param({"source": "host"}, id="no-device-idles"),
    ],
)
def test_what_buckets_do_not_cost_is_not_told_as_theirs(tmp_path, changes):
    assert of_buckets(tmp_path / "run", **changes) == []


@pytest.mark.parametrize(
    ("num", "size"),
    [pytest.param(7, 1e5, id="few"), pytest.param(12, 25.0 * MIB, id="as-large-as-by-default")],
)
def test_buckets_that_would_not_be_much_fewer_are_none(num, size):
    assert buckets_of({f"bucket {place}: a": size for place in range(num)}) is None
