import pytest

from aorta.errors import ConfigError
from aorta.projection.job.model import load_model, models

MODELS = models()


COUNTED = [name for name, model in MODELS.items() if model.num_params_published]
NAMED_BY_SIZE = ("mpt-", "gpt3-", "megatron-", "opt-", "nemotron3-")
"""Families without a published count: the size in the name is all there is, such as 2.7 for 2.65 billion."""
ROUNDED = [name for name, model in MODELS.items() if not model.num_params_published]


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_those_of_the_published_checkpoint(name):
    assert MODELS[name].num_params == MODELS[name].num_params_published


def test_parameters_are_those_that_publishers_round():
    """A shape that was written down wrong shows in the size of the model."""
    assert {"gpt3-175b", "mpt-7b", "nemotron-h-56b", "gpt-oss-120b", "qwen3-next-80b-a3b"} <= set(ROUNDED)
    for name in ROUNDED:
        model = MODELS[name]
        room = 0.035 if name.startswith(NAMED_BY_SIZE) else 0.01
        assert model.num_params == pytest.approx(model.num_params_rounded, rel=room), name


@pytest.mark.parametrize(
    ("name", "active_billion"),
    [
        pytest.param("mixtral-8x7b", 12.9, id="mixtral-8x7b"),
        pytest.param("mixtral-8x22b", 39.2, id="mixtral-8x22b"),
        pytest.param("deepseek-v3", 37.6, id="deepseek-v3"),  # 37 B without the input embedding
        pytest.param("qwen3-235b-a22b", 22.2, id="qwen3-235b"),
        pytest.param("qwen3-30b-a3b", 3.35, id="qwen3-30b"),
    ],
)
def test_active_parameters_are_those_published(name, active_billion):
    assert MODELS[name].num_active_params / 1e9 == pytest.approx(active_billion, rel=0.01)


def test_flops_of_llama3_8b_by_hand():
    per_layer = 2 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    output = 2 * 4096 * 128256
    attention = 32 * 2 * 2 * 4096 * 8192 / 2  # causal: half of S keys per query
    model = load_model("llama3-8b")
    assert model.matrix_flops_per_token() == 32 * per_layer + output
    assert model.train_flops_per_token(8192) == 3 * (32 * per_layer + output + attention)


def test_latent_attention_counts_its_own_widths():
    model = load_model("deepseek-v3")
    assert model.qk_dim == 192
    assert model.v_dim == 128
    assert len(model.attention_matrices) == 6
    assert model.attention_matrices["out"] == (128 * 128, 7168)


def test_alias_names_the_same_shapes():
    assert load_model("llama3.1-405b") == load_model("llama3-405b")


def test_unknown_model_names_the_near_one():
    with pytest.raises(ConfigError, match="did you mean 'llama3-8b'"):
        load_model("llama3-8")


def test_unknown_key_names_the_near_one(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: x\nvocabsize: 3\n")
    with pytest.raises(ConfigError, match="vocabsize is not a setting, did you mean 'vocab_size'"):
        load_model(str(path))


def test_vocabulary_has_no_default(tmp_path):
    # A silent default vocabulary made every Llama 3 too small in the tool that this one is compared with.
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: x\nsource: here\nhidden: 64\nnum_layers: 1\nnum_heads: 4\nnum_kv_heads: 4\nffn: 128\n"
    )
    with pytest.raises(ConfigError, match="vocab_size"):
        load_model(str(path))
