"""Every parallel form has the loss, the gradients and the gradient norm of one process.

What is compared: the mean over dp ranks and micro-batches of (cross entropy + weighted load-balancing
loss), in fp32, with dropless experts or with experts whose capacity is never reached. The balancing loss
is not linear in the batch, so both sides compute it per dp rank and micro-batch: the single process
takes the same micro-batches one after another and averages.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from aorta.config.layout import Layout, validate
from aorta.config.load import config_from_settings
from aorta.config.structs import Config
from aorta.training.model import Transformer, initial_value
from aorta.training.parallel import clip_grad_norm, make_meshes
from aorta.training.setup import SyntheticTokens, build_model
from tests.dist.launch import run_ranks

CPU = torch.device("cpu")
NUM_MICRO_BATCHES = 2

DENSE = {"hidden": 16, "ffn": 24, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2, "vocab_size": 32}
DROPLESS = {**DENSE, "num_experts": 4, "num_active_experts": 2, "aux_loss_weight": 0.1}
CAPACITY = {**DROPLESS, "capacity_factor": 4.0}

FORMS = {
    "ddp": (2, DENSE, {"mode": "ddp"}),
    "ddp-moe": (2, DROPLESS, {"mode": "ddp"}),
    "fsdp": (2, DENSE, {"mode": "fsdp", "forward_prefetch": 1, "backward_prefetch": 2}),
    "fsdp-no-reshard": (2, DENSE, {"mode": "fsdp", "reshard_after_forward": False}),
    "tp": (2, DENSE, {"mode": "ddp", "dp": 1, "tp": 2}),
    "fsdp-of-1-with-tp": (2, DENSE, {"mode": "fsdp", "dp": 1, "tp": 2}),
    "ep": (2, DROPLESS, {"mode": "ddp", "ep": 2}),
    "ep-capacity": (2, CAPACITY, {"mode": "ddp", "ep": 2}),
    "fsdp-ep": (2, DROPLESS, {"mode": "fsdp", "ep": 2}),
    "fsdp-tp": (4, DENSE, {"mode": "fsdp", "tp": 2}),
    "fsdp-x-ep": (4, DROPLESS, {"mode": "fsdp", "ep": 2}),
    "fsdp-x-ep-capacity": (4, CAPACITY, {"mode": "fsdp", "ep": 4}),
    "ddp-x-ep": (4, DROPLESS, {"mode": "ddp", "ep": 2}),
    "tp-moe": (2, DROPLESS, {"mode": "ddp", "dp": 1, "tp": 2}),
    "tp-moe-capacity": (2, CAPACITY, {"mode": "fsdp", "dp": 1, "tp": 2}),
    "fsdp-x-tp-moe": (4, DROPLESS, {"mode": "fsdp", "tp": 2}),
    "tp-x-ep": (4, DROPLESS, {"mode": "fsdp", "tp": 2, "ep": 2}),
    "tp-x-ep-capacity": (4, CAPACITY, {"mode": "fsdp", "tp": 2, "ep": 2}),
}


def make_config(form: str, recompute: bool = False) -> tuple[Config, Layout]:
    world_size, model, parallel = FORMS[form]
    config = config_from_settings(
        {
            "training": {
                "precision": "fp32",
                "batch_size": 2,
                "grad_accum_steps": NUM_MICRO_BATCHES,
                "activation_checkpointing": recompute,
            },
            "data": {"seq_len": 8},
            "model": model,
            "parallel": parallel,
        }
    )
    return config, validate(config, world_size)


def micro_batch(config: Config, dp_rank: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = SyntheticTokens(
        config.model.vocab_size, config.data.seq_len, config.training.batch_size, 0, dp_rank
    )
    batch = tokens.batch(0, index)
    return batch[:, :-1], batch[:, 1:]


def one_process(form: str) -> tuple[float, dict[str, torch.Tensor], float]:
    config, layout = make_config(form)
    model = Transformer(config.model, config.data.seq_len)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, config.model, 0, CPU))
    total = torch.zeros(())
    for dp_rank in range(layout.dp):
        for index in range(NUM_MICRO_BATCHES):
            loss, aux_loss = model(*micro_batch(config, dp_rank, index))
            objective = loss + config.model.aux_loss_weight * aux_loss
            total = total + objective / (layout.dp * NUM_MICRO_BATCHES)
    total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
    return total.item(), gradients, norm.item()


def parallel_ranks(
    forms: list[str], recompute: bool
) -> dict[str, tuple[float, dict[str, torch.Tensor], float]]:
    """On each rank: the mean loss, whole gradients, the norm before clipping and that the clip worked."""
    return {form: parallel_rank(form, recompute) for form in forms}


def parallel_rank(form: str, recompute: bool) -> tuple[float, dict[str, torch.Tensor], float]:
    config, layout = make_config(form, recompute)
    meshes = make_meshes(layout, "cpu")
    model = build_model(config, layout, meshes, CPU)
    dp_rank = meshes.dp.get_local_rank()
    total = torch.zeros(())
    for index in range(NUM_MICRO_BATCHES):
        with model.micro_batch(is_last=index == NUM_MICRO_BATCHES - 1):
            loss, aux_loss = model.module(*micro_batch(config, dp_rank, index))
            objective = (loss + config.model.aux_loss_weight * aux_loss) / NUM_MICRO_BATCHES
            objective.backward()
        total += objective.detach()
    dist.all_reduce(total, group=meshes.dp.get_group())
    gradients = {
        name: whole(p.grad).clone() for name, p in model.plain.named_parameters() if p.grad is not None
    }
    norm = clip_grad_norm(model.plain.parameters(), max_norm=0.1)
    clipped = clip_grad_norm(model.plain.parameters(), max_norm=None)
    torch.testing.assert_close(clipped, torch.tensor(0.1), rtol=1e-4, atol=0)
    return total.item() / layout.dp, gradients, norm.item()


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@functools.cache
def measured(world_size: int, recompute: bool = False):
    forms = [form for form, (ranks, _, _) in FORMS.items() if ranks == world_size]
    return run_ranks(parallel_ranks, world_size, forms, recompute)


def assert_equal(form: str, results: list) -> None:
    loss, gradients, norm = one_process(form)
    for rank_result in results:
        rank_loss, rank_gradients, rank_norm = rank_result[form]
        assert rank_loss == pytest.approx(loss, rel=1e-5)
        assert rank_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                rank_gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
            )
        assert rank_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_form_matches_one_process(form):
    assert_equal(form, measured(FORMS[form][0]))


@pytest.mark.parametrize("form", [form for form, spec in FORMS.items() if spec[0] == 2])
def test_form_matches_with_activation_checkpointing(form):
    assert_equal(form, measured(2, recompute=True))
