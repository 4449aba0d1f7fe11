import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from aorta.config.structs import ModelConfig
from aorta.training.model import Rope, Transformer, initial_value, train_flops_per_token

CONFIG = ModelConfig(hidden=16, ffn=24, num_heads=4, num_kv_heads=2, num_layers=2, vocab_size=32)
CPU = torch.device("cpu")


def make_model() -> Transformer:
    model = Transformer(CONFIG, seq_len=8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, CONFIG, 0, CPU))
    return model


def test_a_token_does_not_see_later_ones():
    model = make_model()
    x_BSD = torch.randn(1, 8, 16)
    changed_BSD = x_BSD.clone()
    changed_BSD[:, 5:] += 1
    before, _ = model.blocks[0](x_BSD)
    after, _ = model.blocks[0](changed_BSD)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_rotary_scores_depend_on_distance_only():
    rope = Rope(head_dim=8, seq_len=16, theta=100.0)
    query_C, key_C = torch.randn(2, 8)
    query_BHSC = rope.rotate(query_C.expand(1, 1, 16, 8))
    key_BHSC = rope.rotate(key_C.expand(1, 1, 16, 8))
    score_SS = (query_BHSC @ key_BHSC.transpose(-1, -2))[0, 0]
    torch.testing.assert_close(score_SS[9, 4], score_SS[5, 0], rtol=1e-4, atol=1e-5)
    assert not torch.isclose(score_SS[9, 4], score_SS[9, 5])


def test_initial_values_depend_on_name_and_seed():
    def value(name, seed):
        return initial_value(name, torch.Size((4, 6)), CONFIG, seed, CPU)

    assert torch.equal(value("a.weight", 0), value("a.weight", 0))
    assert not torch.equal(value("a.weight", 0), value("b.weight", 0))
    assert not torch.equal(value("a.weight", 0), value("a.weight", 1))


@pytest.mark.heavy
@pytest.mark.parametrize("num_experts", [0, 4])
def test_flops_are_those_that_torch_counts(num_experts):
    """torch counts attention without the causal half, so compare with the other half added."""
    config = ModelConfig(
        hidden=16, ffn=24, num_heads=4, num_kv_heads=4, num_layers=2, vocab_size=32, num_experts=num_experts
    )
    model = Transformer(config, seq_len=8)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    token_BS = torch.randint(0, 32, (2, 8))
    with (
        FlopCounterMode(display=False) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        loss, aux_loss = model(token_BS, token_BS)
        (loss + aux_loss).backward()
    causal_half_per_token = 3 * 2 * 2 * 16 * 8 / 2 * config.num_layers
    expected = 16 * (train_flops_per_token(config, 8) + causal_half_per_token)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-6)
