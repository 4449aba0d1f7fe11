import pytest
import torch
import torch.nn.functional as F

from aorta.config.structs import ModelConfig
from aorta.training.model import MixtureOfExperts, route


def make_mixture(capacity_factor: float | None) -> MixtureOfExperts:
    torch.manual_seed(0)
    config = ModelConfig(
        hidden=8, ffn=12, num_experts=4, num_active_experts=2, capacity_factor=capacity_factor
    )
    mixture = MixtureOfExperts(config)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixture


def token_by_token(mixture: MixtureOfExperts, x_BSD: torch.Tensor, capacity: int | None) -> torch.Tensor:
    """One token and one expert after another. Full experts turn tokens away in the order of the tokens."""
    x_ND = x_BSD.flatten(0, 1)
    weight_NK, expert_NK, _ = route(x_ND, mixture.router.weight, mixture.num_active)
    served = [0] * mixture.num_experts
    y_ND = torch.zeros_like(x_ND)
    experts = mixture.experts
    for n in range(len(x_ND)):
        for weight, e in zip(weight_NK[n], expert_NK[n].tolist(), strict=True):
            served[e] += 1
            if capacity is None or served[e] <= capacity:
                x_D = x_ND[n]
                y_ND[n] += weight * (
                    (F.silu(x_D @ experts.gate[e]) * (x_D @ experts.up[e])) @ experts.down[e]
                )
    return y_ND.view_as(x_BSD)


@pytest.mark.parametrize(
    ("capacity_factor", "capacity"),
    [(None, None), (4.0, None), (1.0, 6), (0.5, 3)],
    ids=["dropless", "never-full", "even-share", "half"],
)
def test_output_is_that_of_token_by_token_experts(capacity_factor, capacity):
    mixture = make_mixture(capacity_factor)
    x_BSD = torch.randn(2, 6, 8)  # 12 tokens x 2 experts each / 4 experts = 6 in an even share
    y_BSD, _ = mixture(x_BSD)
    torch.testing.assert_close(y_BSD, token_by_token(mixture, x_BSD, capacity))


def test_an_expert_without_tokens_gets_a_zero_gradient():
    mixture = make_mixture(None)
    x_BSD = torch.zeros(1, 1, 8)  # one token: two of the four experts see nothing
    y_BSD, aux_loss = mixture(x_BSD)
    (y_BSD.sum() + aux_loss).backward()
    assert all(parameter.grad is not None for parameter in mixture.parameters())


def test_balancing_loss_is_one_when_balanced_and_num_experts_when_one_takes_all():
    x_ND = torch.eye(4)
    *_, balanced = route(x_ND, torch.eye(4) * 50, 1)  # each token to an expert of its own
    *_, skewed = route(torch.ones(4, 4), torch.eye(4)[:, :1] * torch.tensor([50.0, 0, 0, 0]), 1)
    assert balanced.item() == pytest.approx(1.0)
    assert skewed.item() == pytest.approx(4.0)


def test_router_weights_sum_to_one_and_are_float32():
    weight_NK, expert_NK, _ = route(torch.randn(5, 8).bfloat16(), torch.randn(4, 8).bfloat16(), 2)
    assert weight_NK.dtype == torch.float32
    torch.testing.assert_close(weight_NK.sum(dim=1), torch.ones(5))
    assert (expert_NK[:, 0] != expert_NK[:, 1]).all()
