import pytest

from aorta.hardware.part import load_hardware
from aorta.projection import layers
from aorta.projection.model import load_model
from aorta.projection.ops import AttentionOp, CollectiveOp, GemmOp, Scan
from aorta.projection.plan import Plan
from aorta.projection.prices import Pricer


def ops(name, kind="dense", **plan):
    return layers.block(load_model(name), Plan(**plan), kind)


def gemms(work):
    return [op for op in (*work.forward, *work.backward) if isinstance(op, GemmOp)]


ONE_OF_A_KIND = (
    "llama3-8b", "llama3.2-1b", "qwen2.5-7b", "qwen3-235b-a22b", "mixtral-8x7b", "deepseek-v3", "kimi-k2",
    "deepseek-v2-lite", "gpt3-5b", "mpt-1b", "nemotron4-15b", "gpt-oss-20b", "gemma3-12b", "qwen2-57b-a14b",
    "llama4-maverick", "nemotron-h-8b", "nemotron-3-super-120b-a12b", "qwen3-next-80b-a3b",
)  # fmt: skip


def test_plain_norms_move_several_times_the_bytes(price):
    """Cast, square, mean, product, cast, product with the weight: 18 times the tensor against 2 forward."""
    one = {"global_batch_size": 1, "gpus_per_node": 1, "sharding": "ddp"}
    fused = price("llama3-8b", **one)
    plain = price("llama3-8b", **one, plain_kernels=("norm",))
    assert plain.breakdown_s["elementwise"] > 1.5 * fused.breakdown_s["elementwise"]
    assert plain.breakdown_s["gemm"] == fused.breakdown_s["gemm"]


def test_windows_without_a_fused_kernel_cost_the_whole_square(price):
    """gpt-oss: every second layer has a window, which a fused kernel makes cheap and GEMMs do not."""
    one = {"global_batch_size": 8, "dp": 8, "ep": 8}
    fused, mixed, unfused = (
        price("gpt-oss-20b", **one, attention=kind).breakdown_s["attention"]
        for kind in (None, "unfused_windows", "unfused")
    )
    assert fused < mixed < unfused


def test_sinks_cost_passes_over_the_output_where_no_kernel_takes_them():
    """Compiled flex attention on H100, 4 x 4096 tokens, 64 heads of 64: 0.190 and 0.547 ms more with sinks
    than without. Megatron's fused kernels take them in."""
    model = load_model("gpt-oss-120b")

    def sinks(stack):
        plan = Plan(gpus_per_node=1, micro_batch_size=4, stack=stack)
        work = layers.block(model, plan, "window moe")
        pricer = Pricer(load_hardware("h100"), plan)
        return [
            pricer.price(op).seconds * 1e3 for op in (*work.forward, *work.backward) if "sinks" in op.name
        ]

    assert sinks("compiled") == [pytest.approx(0.190, rel=0.1), pytest.approx(0.547, rel=0.1)]
    assert sinks("megatron") == []


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
@pytest.mark.parametrize("stack", ["eager", "megatron"])
@pytest.mark.parametrize(("task", "passes"), [("pretrain", 3), ("lora", 2)])
def test_flops_of_all_operations_are_those_of_the_model(name, stack, task, passes):
    model = load_model(name)
    experts = model.experts
    seq_len = 4096
    while experts and seq_len * experts.num_active % experts.num_experts > 8:  # experts get whole tokens
        seq_len += 2048
    one = {"gpus_per_node": 1, "global_batch_size": 1, "adapters": "none"}
    plan = Plan(**one, seq_len=seq_len, stack=stack, task=task)
    total = 0.0
    for layer in range(model.num_layers):
        work = layers.block(model, plan, model.layer_kind(layer))
        total += sum(op.flops for op in (*work.forward, *work.backward) if isinstance(op, GemmOp))
        total += sum(op.flops for op in work.forward if isinstance(op, AttentionOp | Scan))
    head = layers.output(model, plan)
    total += sum(op.flops for op in (*head.forward, *head.backward) if isinstance(op, GemmOp))
    per_token = passes * model.matrix_flops_per_token() + model.attention_flops_per_token(plan.seq_len)
    assert total == pytest.approx(per_token * plan.seq_len, rel=1e-3)


def test_tensor_parallel_gemms_have_their_true_shape():
    # All tokens and a part of the columns, not a part of the tokens and all columns.
    work = ops("llama3-8b", gpus_per_node=4, tp=4, global_batch_size=1)
    up = next(op for op in gemms(work) if op.name == "ffn_gate_up")
    down = next(op for op in gemms(work) if op.name == "ffn_down")
    assert (up.m, up.n, up.k) == (4096, 2 * 14336 // 4, 4096)
    assert (down.m, down.n, down.k) == (4096, 4096, 14336 // 4)


def test_every_linear_layer_has_forward_dgrad_and_wgrad():
    found = {op.name: (op.m, op.n, op.k, op.layout) for op in gemms(ops("llama3-8b", stack="eager"))}
    assert len(found) == 3 * 7
    assert found["ffn_down"] == (4096, 4096, 14336, "TN")
    assert found["ffn_down_dgrad"] == (4096, 14336, 4096, "NN")
    assert found["ffn_down_wgrad"] == (4096, 14336, 4096, "NT")


def test_latent_attention_has_6_forward_and_12_backward_gemms():
    work = ops("deepseek-v3")
    names = {"q_down", "q_up", "kv_down", "k_up", "v_up", "attention_out"}
    forward = [op for op in work.forward if isinstance(op, GemmOp) and op.name in names]
    backward = [op for op in work.backward if isinstance(op, GemmOp) and op.name.rsplit("_", 1)[0] in names]
    assert (len(forward), len(backward)) == (6, 12)
    attention = next(op for op in work.forward if isinstance(op, AttentionOp))
    assert (attention.qk_dim, attention.v_dim) == (192, 128)


@pytest.mark.parametrize(
    ("how", "batch", "calls"),
    [pytest.param("turbo", 8, 1, id="batched"), pytest.param("legacy", 1, 8, id="one-by-one")],
)
def test_grouped_gemm(how, batch, calls):
    work = ops("mixtral-8x7b", "moe", moe_grouped_gemm=how)
    up = next(op for op in gemms(work) if op.name == "experts_gate_up")
    assert (up.batch, up.launches, up.m) == (batch, calls, 4096 * 2 // 8)


def test_expert_parallel_keeps_the_rows_per_expert_times_ep():
    work = ops("mixtral-8x7b", "moe", dp=8, ep=8)
    up = next(op for op in gemms(work) if op.name == "experts_gate_up")
    assert (up.batch, up.m) == (1, 4096 * 2)
    exchanges = [op for op in (*work.forward, *work.backward) if isinstance(op, CollectiveOp)]
    assert [op.op for op in exchanges] == ["all_to_all"] * 4
    assert exchanges[0].size_bytes == 4096 * 2 * 4096 * 2


def test_deepep_sends_one_copy_per_place():
    plain = ops("mixtral-8x7b", "moe", dp=8, ep=8)
    deep = ops("mixtral-8x7b", "moe", dp=8, ep=8, deepep=True)
    sizes = [
        next(op.size_bytes for op in work.forward if isinstance(op, CollectiveOp)) for work in (plain, deep)
    ]
    assert sizes[1] / sizes[0] == pytest.approx(8 * (1 - (7 / 8) ** 2) / 2)


@pytest.mark.parametrize(
    ("sequence_parallel", "expected"),
    [
        pytest.param(True, ["all_gather", "reduce_scatter"] * 2, id="gather-and-scatter"),
        pytest.param(False, ["all_reduce"] * 2, id="all-reduce"),
    ],
)
def test_forward_collectives_of_tensor_parallelism(sequence_parallel, expected):
    work = ops("llama3-8b", gpus_per_node=4, tp=4, sequence_parallel=sequence_parallel, global_batch_size=1)
    assert [op.op for op in work.forward if isinstance(op, CollectiveOp)] == expected


def test_full_recompute_repeats_the_layer_but_its_last_sum():
    plan = Plan(gpus_per_node=4, tp=4, global_batch_size=1, recompute="full")
    work = layers.block(load_model("llama3-8b"), plan, "dense")
    again = layers.recomputed(work, plan, full=True)
    assert len(again) == len(work.forward) - 1
    assert sum(isinstance(op, CollectiveOp) for op in again) == 3


def test_lora_has_no_weight_gradients():
    """Of the frozen layers; the adapters beside them have theirs."""
    work = ops("llama2-70b", task="lora")
    grads = [op for op in gemms(work) if op.phase == "wgrad"]
    assert grads
    assert all("_adapter_" in op.name and 16 in (op.m, op.n) for op in grads)
    assert not [op for op in gemms(ops("llama2-70b", task="lora", adapters="none")) if op.phase == "wgrad"]


def test_fp8_casts_are_operations_of_their_own():
    names = [op.name for op in (*ops("llama3-8b", dtype="fp8").forward,)]
    assert sum(name.endswith("_to_fp8") for name in names) == 4
    bf16 = ops("llama3-8b")
    assert not [op for op in bf16.forward if op.name.endswith("_to_fp8")]
