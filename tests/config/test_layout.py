from pathlib import Path

import pytest

from aorta.config.layout import Layout, validate
from aorta.config.load import config_from_settings, load_config
from aorta.errors import ConfigError

CONFIG_FILES = sorted(Path("config").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.name)
def test_every_config_file_loads_and_fits_four_ranks(path):
    assert validate(load_config(path), 4).world == 4


def test_the_config_files_are_there():
    names = {path.name for path in CONFIG_FILES}
    assert names >= {"default.yaml", "ddp.yaml", "fsdp.yaml", "tp.yaml", "fsdp_tp.yaml", "moe.yaml"}


@pytest.mark.parametrize(
    ("parallel", "world_size", "expected"),
    [
        ({}, 4, (4, 1, 1)),
        ({"dp": 0, "tp": 2}, 4, (2, 2, 1)),
        ({"dp": 2, "tp": 0}, 4, (2, 2, 1)),
        ({"dp": 2, "tp": 2}, 4, (2, 2, 1)),
        ({}, 1, (1, 1, 1)),
    ],
)
def test_an_open_axis_gets_what_the_world_leaves(parallel, world_size, expected):
    dp, tp, ep = expected
    layout = validate(config_from_settings({"parallel": parallel}), world_size)
    assert layout == Layout(world=world_size, dp=dp, tp=tp, ep=ep)


@pytest.mark.parametrize(
    ("settings", "world_size", "words"),
    [
        ({"parallel": {"dp": 3}}, 2, ["parallel.dp = 3", "3 ranks", "world has 2", "parallel.dp=null"]),
        ({"parallel": {"tp": 3}}, 2, ["parallel.tp = 3", "does not divide the 2 ranks"]),
        ({"parallel": {"tp": 0}}, 2, ["parallel.dp and parallel.tp"]),
        ({"parallel": {"ep": 2}}, 2, ["parallel.ep = 2", "set model.num_experts"]),
        (
            {"parallel": {"ep": 2}, "model": {"num_experts": 3}},
            2,
            ["model.num_experts = 3", "by parallel.ep"],
        ),
        ({"parallel": {"ep": 2}, "model": {"num_experts": 4}}, 3, ["parallel.ep = 2 must divide"]),
        ({"parallel": {"mode": "ddp", "tp": 2}}, 4, ["parallel.mode = ddp", "use parallel.mode=fsdp"]),
        (
            {"parallel": {"mode": "ddp", "static_graph": True}, "training": {"grad_accum_steps": 2}},
            2,
            ["parallel.static_graph = true", "training.grad_accum_steps = 2", "static_graph=false"],
        ),
        ({"parallel": {"tp": 4}}, 4, ["model.num_kv_heads = 2", "parallel.tp = 4"]),
        ({"model": {"hidden": 60, "num_heads": 8}}, 1, ["model.hidden = 60", "model.num_heads = 8"]),
        ({"model": {"num_kv_heads": 3}}, 1, ["model.num_kv_heads = 3"]),
        ({"model": {"num_experts": 2, "num_active_experts": 3}}, 1, ["num_active_experts = 3", "at most"]),
    ],
)
def test_an_impossible_layout_is_one_line_that_says_what_would_work(settings, world_size, words):
    with pytest.raises(ConfigError) as error:
        validate(config_from_settings(settings), world_size)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)
