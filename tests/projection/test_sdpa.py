from functools import cache

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aorta.errors import ProjectionError
from aorta.hardware.names import hardware_names
from aorta.hardware.part import load_hardware
from aorta.projection.sdpa import AttentionSize, TileSdpa

GPUS = st.sampled_from(hardware_names())
FAMILIES = st.sampled_from(["flash", "cudnn"])
LENGTHS = st.integers(1, 20_000)
HEADS = st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128])
ROUNDING = 1 + 1e-9


@cache
def tile_model(gpu: str) -> TileSdpa:
    return TileSdpa(load_hardware(gpu))


def priced(gpu="h200", **changed):
    size = {
        "batch": 1, "seq_q": 4096, "seq_kv": 4096, "num_heads": 32, "num_kv_heads": 32, "head_dim_qk": 128,
        "head_dim_v": 128, "dtype": "bf16", "causal": False, "backward": False, "family": "flash",
    } | changed  # fmt: skip
    backward, family = size.pop("backward"), size.pop("family")
    return tile_model(gpu).simulate(AttentionSize(**size), backward, family)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(5, 5), (3, 7)])
def test_scores_are_the_pairs_of_the_mask(causal, seq_q, seq_kv):
    mask = np.tril(np.ones((seq_q, seq_kv)), seq_kv - seq_q) if causal else np.ones((seq_q, seq_kv))
    assert AttentionSize(2, seq_q, seq_kv, 4, 2, 8, 8, "bf16", causal).scores == mask.sum() * 8


@pytest.mark.heavy
@given(GPUS, FAMILIES, st.booleans(), st.booleans(), LENGTHS, HEADS, st.sampled_from([1, 2, 4, 8]))
def test_gqa_is_never_slower_than_mha(gpu, family, causal, backward, length, heads, shared):
    kv_heads = max(1, heads // shared)
    common = {
        "seq_q": length, "seq_kv": length, "num_heads": heads, "causal": causal, "backward": backward,
        "family": family,
    }  # fmt: skip
    gqa = priced(gpu, num_kv_heads=kv_heads, **common)
    mha = priced(gpu, num_kv_heads=heads, **common)
    assert gqa.time_s <= mha.time_s * ROUNDING


@pytest.mark.heavy
@given(GPUS, FAMILIES, st.booleans(), LENGTHS, HEADS)
def test_causal_is_never_slower_than_full(gpu, family, backward, length, heads):
    common = {
        "seq_q": length, "seq_kv": length, "num_heads": heads, "num_kv_heads": heads, "backward": backward,
        "family": family,
    }  # fmt: skip
    assert priced(gpu, causal=True, **common).time_s <= (
        priced(gpu, causal=False, **common).time_s * ROUNDING
    )


@pytest.mark.heavy
@given(GPUS, FAMILIES, st.booleans(), st.booleans(), LENGTHS, HEADS, st.integers(1, 4000))
def test_a_longer_sequence_is_never_faster_beyond_a_wave(gpu, family, causal, backward, length, heads, more):
    """Full attention: never faster, exactly. Causal: the idle tail depends on how tiles fill the units, so
    the total work is what cannot shrink; the time may by at most half of its longest tile, 50 %."""
    common = {
        "num_heads": heads,
        "num_kv_heads": heads,
        "causal": causal,
        "backward": backward,
        "family": family,
    }
    short = priced(gpu, seq_q=length, seq_kv=length, **common)
    long = priced(gpu, seq_q=length + more, seq_kv=length + more, **common)
    slack = 1.5 if causal else ROUNDING
    assert short.time_s <= long.time_s * slack


@pytest.mark.heavy
@given(GPUS, FAMILIES, st.booleans(), LENGTHS, HEADS)
def test_more_bandwidth_is_never_slower(gpu, family, backward, length, heads):
    hardware = load_hardware(gpu)
    memory = msgspec.structs.replace(
        hardware.memory,
        sustained_hbm_bytes_per_s=2 * hardware.memory.sustained_hbm_bytes_per_s,
        l2_bytes_per_s=2 * hardware.memory.l2_bytes_per_s,
    )
    faster = TileSdpa(msgspec.structs.replace(hardware, memory=memory))
    asked = (AttentionSize(1, length, length, heads, heads, 128, 128), backward, family)
    assert faster.simulate(*asked).time_s <= tile_model(gpu).simulate(*asked).time_s * ROUNDING


@pytest.mark.heavy
@given(GPUS, FAMILIES, st.booleans(), st.booleans(), LENGTHS, HEADS)
@example("h20", "cudnn", False, True, 12110, 32)
@example("h20", "cudnn", False, False, 65536, 128)
def test_no_kernel_beats_the_data_sheet(gpu, family, causal, backward, length, heads):
    compute = load_hardware(gpu).compute
    size = AttentionSize(1, length, length, heads, heads, 128, 128, "bf16", causal)
    boost = compute.peak_flops["bf16"] * compute.boost_clock_hz / compute.clock_hz
    flops = 2 * size.scores * 128 * (5 if backward else 2)  # QK^T and PV; QK^T again, dP, dV, dQ, dK
    assert flops / tile_model(gpu).simulate(size, backward, family).time_s <= boost


def test_causal_counts_half_once():
    """A tool counted the whole square for causal attention: twice too slow on long sequences."""
    full = priced(seq_q=32768, seq_kv=32768, family="cudnn").time_s
    causal = priced(seq_q=32768, seq_kv=32768, causal=True, family="cudnn").time_s
    assert causal / full == pytest.approx(0.5, abs=0.03)


def test_families_differ_by_two():
    assert priced(family="flash").time_s / priced(family="cudnn").time_s == pytest.approx(1.9, abs=0.3)


def test_a_narrow_v_costs_less_than_a_wide_one():
    """Latent attention: D_qk = 192, D_v = 128."""
    assert priced(head_dim_qk=192).time_s < priced(head_dim_qk=192, head_dim_v=192).time_s


def test_backward_is_about_two_and_a_half_forwards():
    forward = priced(seq_q=16384, seq_kv=16384).time_s
    assert 2.2 < priced(seq_q=16384, seq_kv=16384, backward=True).time_s / forward < 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param({"num_kv_heads": 3}, "num_kv_heads = 3 must divide num_heads = 32", id="kv-heads"),
        pytest.param({"causal": True, "seq_kv": 5}, "needs seq_kv of at least seq_q", id="short-keys"),
        pytest.param({"batch": 0}, "batch of at least 1", id="empty"),
    ],
)
def test_what_cannot_be_priced_is_refused(changed, message):
    with pytest.raises(ProjectionError, match=message):
        priced(**changed)
