"""Units of FSDP that are too many: what they cost, and which modules would be units instead."""

import pytest

from aorta.account.judge.judged import judge
from aorta.account.load.open import load_run
from aorta.why.causes.losses.units import units_of
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


def test_units_of_the_older_kind_are_made_by_a_policy(tmp_path):
    unit = {"kind": "FullyShardedDataParallel", "num_parameters": 2}
    (cause,) = named(tmp_path / "run", device_runs_dry(LINEARS), **unit)
    assert "auto_wrap_policy=ModuleWrapPolicy({their class})" in cause.change


@pytest.mark.parametrize(
    ("names", "unit"),
    [
        pytest.param(BLOCKS, {"num_parameters": 12}, id="blocks"),
        pytest.param(LINEARS, {"num_parameters": 12, "times": 8}, id="gathers-of-tensor-parallel-layers"),
        pytest.param(LINEARS, {}, id="nobody-watched"),
    ],
)
def test_what_no_larger_unit_would_hold_is_no_loss_of_units(tmp_path, names, unit):
    assert named(tmp_path / "run", device_runs_dry(names), **unit) == []


def test_a_device_that_is_never_idle_loses_nothing_to_many_units(tmp_path):
    """Each waits a little for its bytes alone."""
    assert named(tmp_path / "run", device_runs_dry(LINEARS, 0.0, 5.0), num_parameters=2) == []
