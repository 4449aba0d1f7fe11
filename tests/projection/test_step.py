import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aorta.errors import AortaError
from aorta.hardware.part import load_hardware
from aorta.projection.model import load_model
from aorta.projection.plan import Plan
from aorta.projection.prices import Pricer
from aorta.projection.search import candidates
from aorta.projection.software import load_stack
from aorta.projection.step import micro_batches, project
from aorta.projection.streams import run

DENSE = {"dp": 8, "global_batch_size": 16, "seq_len": 4096}


def plans(name, gpus=16):
    layout = {"nodes": gpus // 8, "gpus_per_node": 8, "global_batch_size": 64, "seq_len": 4096}
    layout |= {"dtype": "bf16", "fp8_scaling": "tensor", "task": "pretrain"}
    fixed = {"layout": layout, "overrides": {}, "compile_blocks": False, "changes": {}}
    return list(candidates(load_model(name), load_hardware("h200"), load_stack("megatron"), fixed))


PLANS = [(name, plan) for name in ("llama3-8b", "mixtral-8x7b") for plan in plans(name)]


@pytest.mark.parametrize("depths", [(0, 1), (2, 1), (0, 3), (4, 4)])
def test_a_deeper_prefetch_changes_little_where_the_network_is_the_bound(price, depths):
    """Gathers that go first leave reductions for later: the link is busy all the same."""
    job = {"dp": 8, "global_batch_size": 8, "seq_len": 512, "sharding": "fsdp2", "stack": "eager"}
    forward, backward = depths
    usual = price("llama3-8b", **job).step_s
    deeper = price("llama3-8b", **job, forward_prefetch=forward, backward_prefetch=backward).step_s
    assert deeper == pytest.approx(usual, rel=0.01)


def test_a_prefetch_without_sharded_weights_is_refused(price):
    with pytest.raises(AortaError, match="--forward-prefetch needs --sharding fsdp2"):
        price("llama3-8b", dp=8, global_batch_size=8, forward_prefetch=2)


@pytest.mark.heavy
@given(st.sampled_from(PLANS))
def test_breakdown_adds_up_to_the_step(h200, choice):
    name, plan = choice
    found = project(load_model(name), plan, Pricer(h200, plan))
    assert sum(found.breakdown_s.values()) == pytest.approx(found.step_s)
    assert min(found.breakdown_s.values()) > -1e-9
    assert found.low_s < found.step_s < found.high_s


def faster(hardware, part, name, factor):
    section = getattr(hardware, part)
    return msgspec.structs.replace(
        hardware, **{part: msgspec.structs.replace(section, **{name: getattr(section, name) * factor})}
    )


@pytest.mark.heavy
@given(
    st.sampled_from(PLANS),
    st.sampled_from(
        [
            ("memory", "sustained_hbm_bytes_per_s"),
            ("scale_up", "sustained_gpu_bytes_per_s"),
            ("scale_out", "sustained_nic_bytes_per_s"),
        ]
    ),
)
def test_more_bandwidth_is_never_slower(h200, choice, what):
    name, plan = choice
    model = load_model(name)
    before = project(model, plan, Pricer(faster(h200, *what, 0.6), plan)).step_s
    after = project(model, plan, Pricer(h200, plan)).step_s
    assert after <= before * 1.0001


@pytest.mark.heavy
def test_a_device_that_catches_up_on_the_host_is_paced_by_it(h200):
    """With slower memory the device trails the host for longer; the step gets no shorter by that."""
    layout = dict(
        nodes=2, dp=1, tp=8, pp=1, cp=2, ep=8, micro_batch_size=2, global_batch_size=64, recompute="full"
    )
    plan = Plan(seq_len=4096, sharding="zero1", stack="megatron", expert_tp_size=1, **layout)
    model = load_model("mixtral-8x7b")
    memory = [faster(h200, "memory", "sustained_hbm_bytes_per_s", share) for share in (0.6, 0.8, 1.0, 1.2)]
    times = [project(model, plan, Pricer(hardware, plan)).step_s for hardware in memory]
    assert times == sorted(times, reverse=True)


def test_grouped_queries_are_never_slower_than_full_heads(price):
    model = load_model("llama3-8b")
    full = msgspec.structs.replace(model, num_kv_heads=model.num_heads)
    assert price("", model=model, **DENSE).step_s <= price("", model=full, **DENSE).step_s


@pytest.mark.parametrize("less", [{"recompute": "selective"}, {"recompute": "full"}])
def test_recomputation_costs_time(price, less):
    assert price("llama3-8b", **DENSE, **less).step_s > price("llama3-8b", **DENSE).step_s


def test_part_of_the_layers_recomputed_is_in_between(price):
    steps = [
        price("llama3-8b", **DENSE, recompute="full", recompute_layers=count).step_s for count in (8, 16, 32)
    ]
    assert steps == sorted(steps)


def test_fp8_is_faster_but_not_below_what_is_not_fp8(price):
    bf16 = price("llama3-8b", **DENSE)
    fp8 = price("llama3-8b", **DENSE, dtype="fp8")
    assert fp8.step_s < bf16.step_s
    assert fp8.breakdown_s["fp8_cast"] > 0
    floor = sum(bf16.breakdown_s[part] for part in ("elementwise", "attention", "optimizer"))
    assert fp8.step_s > floor + bf16.breakdown_s["gemm"] / 2.2


def test_micro_batches_of_fsdp_each_gather(price):
    one = price("llama3-8b", dp=8, global_batch_size=8, sharding="fsdp2", stack="eager")
    many = price("llama3-8b", dp=8, global_batch_size=64, sharding="fsdp2", stack="eager")
    assert many.breakdown_s["fsdp_copy"] == pytest.approx(8 * one.breakdown_s["fsdp_copy"])
    assert many.breakdown_s["optimizer"] == pytest.approx(one.breakdown_s["optimizer"])


def test_extrapolated_micro_batches_are_those_simulated(h200):
    """Nine micro-batches from three simulated against all nine laid out."""
    plan = Plan(dp=8, global_batch_size=72, sharding="fsdp2", stack="eager")
    pricer = Pricer(h200, plan)
    found = project(load_model("llama3.2-1b"), plan, pricer)
    lanes, _ = micro_batches(found.model, found.stage, plan, pricer, plan.num_micro_batches)
    laid_out_s = run(lanes.tasks, pricer.contention).total_s
    assert laid_out_s + found.breakdown_s["optimizer"] == pytest.approx(found.step_s, rel=0.01)


def test_what_if_of_hidden_fsdp_traffic(price):
    shared = {**DENSE, "sharding": "fsdp2"}
    none, all_ = (price("llama3-8b", **shared, fsdp_overlap=x) for x in (0.0, 1.0))
    assert all_.breakdown_s["exposed_dp_comm"] == 0
    assert none.breakdown_s["exposed_dp_comm"] > 0.01
    assert all_.step_s < price("llama3-8b", **shared).step_s < none.step_s


@pytest.mark.parametrize("vpp", [1, 2])
def test_what_if_of_hidden_fsdp_traffic_reaches_a_pipeline(price, vpp):
    shared = {"pp": 2, "vpp": vpp, "dp": 4, "global_batch_size": 16, "sharding": "fsdp2"}
    none, half, full = (price("llama3-8b", **shared, fsdp_overlap=x) for x in (0.0, 0.5, 1.0))
    assert full.breakdown_s["exposed_dp_comm"] == 0
    assert full.step_s < half.step_s < none.step_s
    assert half.breakdown_s["exposed_dp_comm"] == pytest.approx(none.breakdown_s["exposed_dp_comm"] / 2)
    assert full.step_s < price("llama3-8b", **shared).step_s < none.step_s


@pytest.mark.parametrize("sharding", ["fsdp2", "zero3"])
@pytest.mark.parametrize("stack", ["eager", "megatron"])
def test_what_if_of_fsdp_traffic_counts_each_micro_batch(price, sharding, stack):
    shared = {"dp": 8, "sharding": sharding, "stack": stack, "fsdp_overlap": 0.0}
    one, five = (price("llama3-8b", global_batch_size=8 * count, **shared) for count in (1, 5))
    assert five.breakdown_s["exposed_dp_comm"] == pytest.approx(5 * one.breakdown_s["exposed_dp_comm"])


def test_lora_counts_no_flops_of_weight_gradients(price):
    """Frozen: 2N forward and 2N back to the input; attention has no weights and counts as always."""
    by_hand = 2 * 2 * (32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256)
    by_hand += 3 * 32 * 2 * 2 * 4096 * 4096 / 2
    found = price("llama3-8b", dp=8, global_batch_size=8, task="lora")
    assert found.model_flops_per_s == pytest.approx(found.tokens_per_s_per_gpu * by_hand)


def test_full_recompute_of_fsdp_gathers_forward_and_backward(h200):
    plan = Plan(dp=8, global_batch_size=8, sharding="fsdp2", stack="eager", recompute="full")
    pricer = Pricer(h200, plan)
    found = project(load_model("llama3-8b"), plan, pricer)
    lanes, _ = micro_batches(found.model, found.stage, plan, pricer, plan.num_micro_batches)
    gathers = [task for task in lanes.tasks if task.name.endswith("_all_gather")]
    assert len(gathers) == 1 + 32 + 32  # root, each layer forward, each layer backward


def test_small_eager_work_is_host_bound(price):
    tiny = {"gpus_per_node": 8, "tp": 8, "global_batch_size": 1, "seq_len": 512, "sharding": "ddp"}
    found = price("llama3.2-1b", **tiny, stack="eager")
    assert found.host_bound
    assert found.breakdown_s["host"] > 0
    assert not price("llama3-8b", **DENSE).host_bound


def test_data_parallel_traffic_is_hidden_where_there_is_room(price):
    shared = {"nodes": 8, "dp": 64, "global_batch_size": 64 * 8}
    exposed = price("llama3-8b", **shared).breakdown_s["exposed_dp_comm"]
    alone = price("llama3-8b", **shared, dp_overlap=False).breakdown_s["exposed_dp_comm"]
    assert exposed < 0.2 * alone  # no fixed share stays outside


@pytest.mark.parametrize("axis", ["tp", "ep", "dp"])
def test_links_of_the_hardware_file_reach_every_collective(price, h200, axis):
    slow = faster(h200, "scale_up", "sustained_gpu_bytes_per_s", 0.25)
    plan = {
        "tp": {"tp": 8, "global_batch_size": 8, "sharding": "ddp"},
        "ep": {"dp": 8, "ep": 8, "global_batch_size": 8},
        "dp": {"dp": 8, "global_batch_size": 8, "dp_overlap": False},
    }[axis]
    name = "mixtral-8x7b" if axis == "ep" else "llama3-8b"
    part = f"exposed_{axis}_comm"
    assert price(name, hardware=slow, **plan).breakdown_s[part] > 2 * price(name, **plan).breakdown_s[part]


def test_pipeline_transfers_cost_time(price, h200):
    plan = {"nodes": 2, "pp": 2, "dp": 8, "global_batch_size": 64}
    slow = faster(h200, "scale_out", "sustained_nic_bytes_per_s", 0.01)
    assert price("llama3-8b", hardware=slow, off=["dp_comm"], **plan).step_s > 1.02 * (
        price("llama3-8b", off=["dp_comm"], **plan).step_s
    )


def test_zero_bubble_is_not_slower(price):
    plan = {"pp": 8, "global_batch_size": 16}
    assert price("llama3-8b", **plan, schedule="zero-bubble").step_s < price("llama3-8b", **plan).step_s


def test_more_chunks_shrink_the_bubble(price):
    plan = {"pp": 8, "global_batch_size": 16}
    bubbles = [price("llama3-8b", **plan, vpp=vpp).breakdown_s["pipeline_bubble"] for vpp in (1, 2, 4)]
    assert bubbles[0] > bubbles[1] > bubbles[2] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"global_batch_size": 12}, "8 would work", id="batch-does-not-divide"),
        pytest.param({"global_batch_size": 4}, "8 would work", id="batch-below-one-each"),
        pytest.param({"dp": 4}, "GPUs, but", id="axes-do-not-fill-the-gpus"),
        pytest.param({"ep": 8}, "no experts", id="experts-of-a-dense-model"),
        pytest.param({"deepep": True}, "needs a model with experts", id="deepep-of-a-dense-model"),
        pytest.param({"vpp": 2}, "needs --pp", id="chunks-without-pipeline"),
        pytest.param({"fsdp_overlap": 0.5}, "needs --sharding", id="overlap-without-fsdp"),
        pytest.param({"schedule": "zero-bubble"}, "needs --pp", id="zero-bubble-without-pipeline"),
        pytest.param({"tp_overlap": True}, "needs --tp", id="overlap-without-tp"),
        pytest.param({"recompute": "full", "recompute_layers": 99}, "between 1 and 32", id="too-many-layers"),
    ],
)
def test_impossible_plans_are_errors(changes, message):
    plan = Plan(**({"dp": 8, "global_batch_size": 8} | changes))
    with pytest.raises(AortaError, match=message):
        plan.check(load_model("llama3-8b"))


def test_how_finely_the_host_is_seen_does_not_decide_the_step(price, monkeypatch):
    """A copy that waits for the reduction before it must not hold up the compute issued before the copy."""
    plan = {"gpus_per_node": 4, "dp": 4, "global_batch_size": 8, "sharding": "fsdp2", "stack": "eager"}
    found = []
    for parts in (1, 6, 10**6):
        monkeypatch.setattr("aorta.projection.streams.MOST_PARTS", parts)
        found.append(price("llama3-8b", **plan).step_s)
    assert max(found) == pytest.approx(min(found), rel=0.002)


@pytest.mark.parametrize("sharding", ["fsdp2", "zero1", "ddp"])
def test_a_host_that_costs_nothing_is_never_slower(price, sharding):
    plan = {"gpus_per_node": 4, "dp": 4, "global_batch_size": 8, "sharding": sharding, "stack": "eager"}
    assert price("llama3.2-1b", off=["host"], **plan).step_s <= price("llama3.2-1b", **plan).step_s * 1.001
