"""Activations in the host's memory between the passes: what they save and what their copies cost."""

import msgspec
import pytest

from aorta.errors import ConfigError
from aorta.hardware.part import load_hardware
from aorta.projection.memory import layer_activation_bytes, memory, offloaded_bytes
from aorta.projection.model import load_model
from aorta.projection.plan import Plan

EIGHT = {"dp": 8, "global_batch_size": 16, "seq_len": 4096, "sharding": "ddp"}
LAYERS = 32


def with_link(hardware, rate):
    link = msgspec.structs.replace(hardware.host_link, sustained_bytes_per_s=rate)
    return msgspec.structs.replace(hardware, host_link=link)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_memory_saved_by_hand(share):
    """All layers but one: what is being copied lies on both sides."""
    model = load_model("llama3-8b")
    plain, saving = (memory(model, Plan(**EIGHT, activation_offload=x), 1e15) for x in (0.0, share))
    assert plain.moment == saving.moment == "loss"
    layer = layer_activation_bytes(model, Plan(**EIGHT), "dense")
    saved = plain.parts["activations"] - saving.parts["activations"]
    assert saved == pytest.approx(share * (LAYERS - 1) * layer)


def test_a_layer_that_runs_backward_has_all_of_its_activations_back():
    model = load_model("llama3-8b")
    many = memory(model, Plan(**EIGHT | {"micro_batch_size": 2}, activation_offload=1.0), 1e15)
    layer = layer_activation_bytes(model, Plan(**EIGHT | {"micro_batch_size": 2}), "dense")
    assert many.parts["activations"] >= layer


def test_copies_beside_the_compute_cost_nothing_where_the_link_is_fast(price, h200):
    fast = price("llama3-8b", with_link(h200, 1e13), **EIGHT, activation_offload=1.0)
    assert fast.step_s == price("llama3-8b", **EIGHT).step_s


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_copies_over_a_slow_link_by_hand(price, h200, sharding):
    """Both directions of both micro-batches, once nothing hides the rest: bytes over the rate."""
    plan = EIGHT | {"sharding": sharding}
    layer = layer_activation_bytes(load_model("llama3-8b"), Plan(**plan), "dense")
    slow, slower = (
        price("llama3-8b", with_link(h200, rate), **plan, activation_offload=0.5).step_s
        for rate in (1e9, 5e8)
    )
    assert slower - slow == pytest.approx(2 * 2 * 0.5 * LAYERS * layer / 1e9, rel=1e-6)


def test_pipelines_wait_as_well(price, h200):
    plan = EIGHT | {"dp": 4, "pp": 2, "sharding": "zero1"}
    plain = price("llama3-8b", **plan)
    slow = price("llama3-8b", with_link(h200, 1e9), **plan, activation_offload=1.0)
    model = load_model("llama3-8b")
    half = offloaded_bytes(model, Plan(**plan, activation_offload=1.0), range(LAYERS // 2))
    # Four micro-batches and one more through the other stage; compute hides a small part.
    assert slow.step_s - plain.step_s == pytest.approx(5 * 2 * half / 1e9, rel=0.12)
    assert slow.breakdown_s["exposed_offload"] > 0.5 * slow.step_s
    assert sum(slow.breakdown_s.values()) == pytest.approx(slow.step_s)


def test_the_share_is_bounded_and_every_part_has_a_link():
    with pytest.raises(ConfigError, match="between 0 and 1"):
        Plan(**EIGHT, activation_offload=1.5).check(load_model("llama3-8b"))
    for name in ("a100", "b200", "mi300x"):
        assert "host_link.sustained_bytes_per_s" in load_hardware(name).sources
