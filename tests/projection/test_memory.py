import msgspec
import pytest

from aorta.hardware.part import load_hardware
from aorta.projection.memory import layer_activation_bytes, memory
from aorta.projection.model import ExpertShape, Model, load_model
from aorta.projection.plan import Plan

GIB = 2**30


def used(name, gpu="h200", **plan):
    hardware = load_hardware(gpu)
    return memory(load_model(name), Plan(**plan), hardware.memory.hbm_bytes)


EIGHT = {"dp": 8, "global_batch_size": 8}
SAVING = {"recompute": "full"}


@pytest.mark.parametrize(
    ("sharding", "weights", "gradients", "optimizer"),
    [
        pytest.param("ddp", 2, 4, 12, id="ddp"),
        pytest.param("zero1", 2, 4, 12 / 8, id="zero1"),
        pytest.param("zero2", 2, 4 / 8, 12 / 8, id="zero2"),
        pytest.param("zero3", 2 / 8, 4 / 8, 12 / 8, id="zero3"),
    ],
)
def test_bytes_per_parameter_by_sharding(sharding, weights, gradients, optimizer):
    params = load_model("llama3-8b").num_params
    parts = used("llama3-8b", **EIGHT, sharding=sharding).parts
    assert parts["weights"] == pytest.approx(weights * params, rel=1e-3)
    assert parts["gradients"] == pytest.approx(gradients * params, rel=1e-3)
    assert parts["optimizer"] == pytest.approx(optimizer * params, rel=1e-3)


def test_software_of_unknown_norms_has_a_range():
    """Where rotation was not fused yet, norms may have been plain too: the most lies above the estimate, and
    the verdict goes by it. Fused software has no such doubt."""
    plain = used("llama3-8b", **EIGHT, plain_kernels=("rope",), gathered_logits=True)
    fused = used("llama3-8b", **EIGHT)
    assert plain.least_bytes < plain.total_bytes < plain.most_bytes
    assert fused.most_bytes == fused.total_bytes
    between = (plain.total_bytes + plain.most_bytes) / 2
    assert plain._replace(capacity_bytes=between).verdict == "tight"
    assert plain._replace(capacity_bytes=1.1 * plain.most_bytes).verdict == "fits"
    assert plain._replace(capacity_bytes=0.99 * plain.least_bytes).verdict == "does not fit"


def test_gradients_of_no_stated_type_may_be_in_bf16():
    unstated, stated = (used("llama3-8b", **EIGHT, grad_bytes=width) for width in (None, 4))
    half = 2 * load_model("llama3-8b").num_params
    assert stated.least_bytes - unstated.least_bytes == pytest.approx(half, rel=0.01)
    assert stated.total_bytes == unstated.total_bytes


def test_a_deeper_prefetch_holds_more_gathered_blocks():
    job = {**EIGHT, "sharding": "fsdp2", "stack": "eager", "seq_len": 16384}
    block = 2 * load_model("llama3-8b").layer_params("dense")
    one, three = (used("llama3-8b", **job, forward_prefetch=depth).parts["gathered"] for depth in (0, 3))
    assert three - one == pytest.approx(2 * block)


def test_gathered_logits_hold_the_whole_vocabulary():
    job = {"tp": 8, "global_batch_size": 1, "vocab_parallel": True}
    split, gathered = (
        used("llama3-8b", **job, gathered_logits=asked).parts["logits"] for asked in (False, True)
    )
    assert gathered == pytest.approx(8 * split)


def test_fsdp2_shards_weights_gradients_and_optimizer():
    whole = used("llama3-70b", nodes=8, dp=64, global_batch_size=64, sharding="fsdp2", stack="eager")
    static = sum(whole.parts[name] for name in ("weights", "optimizer"))
    assert static == pytest.approx(12 * load_model("llama3-70b").num_params / 64, rel=0.01)


@pytest.mark.parametrize(
    ("name", "gpu", "plan"),
    [
        # Configurations that were trained: Primus' 70B on eight MI300X, MLPerf's 405B on H100.
        pytest.param(
            "llama3-70b",
            "mi300x",
            {**EIGHT, "sharding": "zero3", "recompute": "full", "grad_bytes": 2},
            id="70b",
        ),
        pytest.param(
            "llama3-405b",
            "h100",
            {
                "nodes": 64,
                "dp": 4,
                "tp": 8,
                "pp": 8,
                "vpp": 8,
                "cp": 2,
                "global_batch_size": 1152,
                "seq_len": 8192,
                "dtype": "fp8",
                "fp8_weights": True,
                "grad_bytes": 2,
            },
            id="405b",
        ),
        pytest.param("llama3-8b", "h100", {**EIGHT, "sharding": "zero3"}, id="8b"),
        pytest.param("mixtral-8x7b", "mi300x", {**EIGHT, "ep": 8, "seq_len": 4096}, id="mixtral"),
    ],
)
def test_must_fit(name, gpu, plan):
    found = used(name, gpu, **plan)
    assert found.fits, found


@pytest.mark.parametrize(
    ("name", "gpu", "plan"),
    [
        pytest.param("llama3-70b", "h100", {**EIGHT, "sharding": "zero1"}, id="70b-weights-on-every-gpu"),
        pytest.param("llama3-8b", "h100", {**EIGHT, "sharding": "ddp", "seq_len": 8192}, id="8b-ddp"),
        pytest.param(
            "llama3-405b",
            "mi300x",
            {**EIGHT, "sharding": "zero3", "recompute": "full"},
            id="405b-on-one-node",
        ),
        pytest.param(
            "llama3-8b",
            "h100",
            {**EIGHT, "sharding": "zero3", "micro_batch_size": 8, "global_batch_size": 64, "seq_len": 8192},
            id="8b-activations",
        ),
    ],
)
def test_must_not_fit(name, gpu, plan):
    assert not used(name, gpu, **plan).fits


@pytest.mark.parametrize(
    ("shape", "plan", "peak_gib"),
    [
        # torch.cuda.max_memory_allocated of single-GPU runs, bf16 throughout.
        pytest.param((4096, 14336, 32, 8, 128256, 6), {}, 23.03, id="8b"),
        pytest.param((4096, 14336, 32, 8, 128256, 6), {"recompute": "full"}, 19.37, id="8b-recompute"),
        pytest.param((4096, 11008, 32, 32, 32000, 6), {}, 13.36, id="7b"),
        pytest.param((2048, 8192, 32, 8, 128256, 6), {}, 13.06, id="1b"),
        pytest.param(
            (4096, 14336, 32, 8, 128256, 6),
            {"micro_batch_size": 2, "global_batch_size": 2},
            32.81,
            id="8b-mbs2",
        ),
    ],
)
def test_peak_of_single_gpu_runs(shape, plan, peak_gib):
    hidden, ffn, heads, kv_heads, vocab, layers = shape
    model = Model(
        name="block stack",
        source="test",
        hidden=hidden,
        ffn=ffn,
        num_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=vocab,
        num_layers=layers,
    )
    fixed = {"gpus_per_node": 1, "global_batch_size": 1, "sharding": "ddp", "stack": "eager"}
    found = memory(model, Plan(**(fixed | plan)), 141e9)
    assert found.allocated_bytes / GIB == pytest.approx(peak_gib, rel=0.04)


MIXTURE = Model(
    name="block stack",
    source="test",
    hidden=4096,
    ffn=14336,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=32000,
    num_layers=2,
    experts=ExpertShape(num_experts=8, num_active=2, ffn=14336),
)


def test_peak_of_a_mixture_on_one_gpu():
    """26.40 GiB measured: a layer's gradients are larger than its activations, which are still there."""
    plan = Plan(gpus_per_node=1, global_batch_size=1, sharding="ddp", stack="eager")
    found = memory(MIXTURE, plan, 141e9)
    assert found.moment == "gradients"
    assert found.parts["activations"] > 0
    assert found.allocated_bytes / GIB == pytest.approx(26.40, rel=0.06)


@pytest.mark.parametrize(
    ("layers", "plan", "peak_gib"),
    [
        # Measured runs of several GPUs that were the first of their process: nothing of another run is left.
        pytest.param(8, {"dp": 4}, 20.90, id="dp4"),
        pytest.param(8, {"dp": 2}, 28.71, id="dp2"),
        pytest.param(8, {"dp": 4, "stack": "compiled"}, 20.04, id="dp4-compiled"),
    ],
)
def test_peak_of_fsdp2(layers, plan, peak_gib):
    model = msgspec.structs.replace(
        MIXTURE, experts=None, vocab_size=128256, num_layers=layers, name="8B blocks"
    )
    fixed = {
        "gpus_per_node": plan["dp"],
        "global_batch_size": plan["dp"],
        "sharding": "fsdp2",
        "stack": "eager",
    }
    found = memory(model, Plan(**(fixed | plan)), 141e9)
    assert found.allocated_bytes / GIB == pytest.approx(peak_gib, rel=0.045)


def test_the_first_reduction_is_the_peak_of_a_sharded_mixture():
    """Its layers hold most of the weights: one is reduced while the next has been gathered."""
    model = msgspec.structs.replace(MIXTURE, num_layers=3)
    plan = Plan(gpus_per_node=4, dp=4, global_batch_size=4, sharding="fsdp2", stack="eager")
    found = memory(model, plan, 141e9)
    assert found.moment == "first reduction"
    layer = model.layer_params("moe")
    assert found.parts["reduction_buffers"] == pytest.approx(layer * (2 + 4))
    assert found.parts["gathered"] == pytest.approx(2 * (layer + 2 * model.embedding_params))


@pytest.mark.parametrize(
    ("name", "gpu", "plan", "fits"),
    [
        # The same layout with and without what makes it fit.
        pytest.param("llama3-70b", "h100", {"tp": 8, "recompute": "full"}, False, id="70b-tp8-optimizer"),
        pytest.param("llama3-70b", "mi300x", {"tp": 8, "recompute": "full"}, True, id="70b-tp8-mi300x"),
        pytest.param("llama3-8b", "h100", {**EIGHT, "seq_len": 32768}, False, id="8b-32k"),
        pytest.param(
            "llama3-8b",
            "h100",
            {"cp": 8, "global_batch_size": 1, "seq_len": 32768, "sharding": "zero3"},
            True,
            id="8b-32k-cp8",
        ),
        pytest.param("qwen2.5-32b", "h200", {**EIGHT, **SAVING, "sharding": "zero1"}, False, id="32b-zero1"),
        pytest.param("qwen2.5-32b", "h200", {**EIGHT, **SAVING, "sharding": "zero3"}, True, id="32b-zero3"),
    ],
)
def test_pairs_of_what_fits_and_what_does_not(name, gpu, plan, fits):
    assert used(name, gpu, **plan).fits is fits


def test_recomputation_orders_activations():
    sizes = [
        used("llama3-8b", **EIGHT, recompute=how).parts["activations"]
        for how in ("none", "selective", "full")
    ]
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param("llama3-8b", {**EIGHT, "seq_len": 8192}, id="zero1"),
        pytest.param("llama3-8b", {**EIGHT, "sharding": "fsdp2", "stack": "eager"}, id="fsdp2"),
        pytest.param("llama3-8b", {**EIGHT, "sharding": "ddp", "stack": "eager"}, id="ddp"),
        pytest.param("llama3-8b", {"pp": 4, "dp": 2, "global_batch_size": 32}, id="pp"),
        pytest.param("mixtral-8x7b", {**EIGHT, "ep": 8}, id="mixture"),
    ],
)
def test_recomputing_more_layers_never_takes_more_memory(name, plan):
    """Where a pipeline rank does not end with whole layers of the even spread it may have fewer of more."""
    counts = range(1, load_model(name).num_layers + 1)
    totals = [used(name, **plan).total_bytes]
    totals += [used(name, **plan, recompute="full", recompute_layers=n).total_bytes for n in counts]
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] < totals[0]


def test_nothing_is_recomputed_at_the_loss():
    """llama3-8b, 4 x 8192 tokens: one of 32 layers keeps its input alone."""
    plan = {"dp": 8, "global_batch_size": 32, "micro_batch_size": 4, "seq_len": 8192}
    none = used("llama3-8b", **plan)
    one = used("llama3-8b", **plan, recompute="full", recompute_layers=1)
    assert none.moment == one.moment == "loss"
    layer = layer_activation_bytes(load_model("llama3-8b"), Plan(**plan), "dense")
    kept = 4 * 8192 * 4096 * 2
    assert none.parts["activations"] - one.parts["activations"] == pytest.approx(layer - kept)


def test_a_recomputed_layer_has_its_activations_again_while_it_runs_backward():
    """A pipeline's first rank has no logits: its peak is the backward pass of its last layer."""
    plan = {"pp": 4, "dp": 2, "global_batch_size": 32}
    found = used("llama3-70b", **plan, recompute="full")
    assert (found.rank, found.moment) == (0, "backward pass")
    kept = 4096 * 8192 * 2
    layer = layer_activation_bytes(load_model("llama3-70b"), Plan(**plan), "dense")
    # Four micro-batches in flight: inputs of 20 layers and the embedding's output; one layer is whole.
    assert found.parts["activations"] == pytest.approx(4 * 21 * kept + layer - kept)


def test_first_pipeline_rank_keeps_most_activations():
    found = used("llama3-8b", pp=4, dp=2, global_batch_size=32)
    assert found.rank == 0


def test_tensor_and_sequence_parallelism_split_activations():
    model = load_model("llama3-8b")
    one = layer_activation_bytes(model, Plan(sequence_parallel=False), "dense")
    eight = layer_activation_bytes(model, Plan(tp=8), "dense")
    assert eight == pytest.approx(one / 8, rel=1e-6)
