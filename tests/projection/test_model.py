import pytest

from aorta.errors import ConfigError
from aorta.projection.model import KINDS, MODEL_DIR, known_names, load_model, model_file, models, name_key

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
    """Parameters that one token passes, embeddings included."""
    model = MODELS[name]
    num_moe_layers = sum(KINDS[kind][1] == "moe" for kind in model.layer_kinds)
    idle = num_moe_layers * (model.experts.num_experts - model.experts.num_active) * model.expert_params
    assert (model.num_params - idle) / 1e9 == pytest.approx(active_billion, rel=0.01)


def test_flops_of_llama3_8b_by_hand():
    per_layer = 2 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336)
    output = 2 * 4096 * 128256
    attention = 32 * 2 * 2 * 4096 * 8192 / 2  # causal: half of S keys per query
    model = load_model("llama3-8b")
    assert model.matrix_flops_per_token() == 32 * per_layer + output
    assert model.train_flops_per_token(8192) == 3 * (32 * per_layer + output + attention)


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.flops_published])
def test_flops_are_those_that_vendors_count(name):
    """Within half a percent, except where the file says what the vendor counts otherwise."""
    model = MODELS[name]
    assert abs(model.flops_beside_published_pct()) < 0.5 or model.flops_published.difference


def test_differences_from_the_vendors_count_are_what_the_files_say():
    """NVIDIA's formula for hybrids: no routers, a scan of 7 x width x state, a width of twice the hidden."""
    nano = MODELS["nemotron-3-nano-30b-a3b"]
    scan = 7 * 5376 * 128 - nano.state.flops_per_token()
    wider = 23 * (2 * 3 * 2688 * (5376 - 64 * 64) + scan)
    routers = 23 * 2 * 2688 * 128
    theirs = nano.train_flops_per_token(8192) + 3 * (wider - routers)
    assert theirs == pytest.approx(nano.flops_published.flops_per_token, rel=1e-3)

    larger = MODELS["nemotron-3-super-120b-a12b"]
    assert larger.state.flops_per_token() == 7 * 2 * 4096 * 128
    routers_and_joins = (40 + 2) * 2 * 4096 * 512 + 2 * 2 * 4096 * 2 * 4096
    theirs = larger.train_flops_per_token(8192, mtp=True) - 3 * routers_and_joins
    assert theirs == pytest.approx(larger.flops_published.flops_per_token, rel=1e-3)


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


NAMES = """
llama-7b 6.74 | llama-13b 13.0 | llama-33b 32.5 | llama-65b 65.3 | LLaMA-7B 6.74 | llama1-7b 6.74
llama2-7b 6.74 | llama2-13b 13.0 | llama2-70b 69.0 | Llama-2-7b-hf 6.74 | Llama 2 70B 69.0
llama-2-70b-chat 69.0 | meta-llama/Llama-2-13b-chat-hf 13.0 | llama2_70b 69 | LLAMA2-7B 6.74
llama-2-7B 6.74 | llama2-34b 34 | llama 2 13b 13 | llama2_70b_lora 69 | codellama-7b 6.74
codellama-13b 13 | codellama-34b 33.7 | codellama-70b 69
llama3-8b 8.03 | llama3.1-8b 8.03 | Llama 3.1 8B 8.03 | meta-llama/Meta-Llama-3-8B 8.03
Meta-Llama-3.1-70B-Instruct 70.6 | llama3-70b 70.6 | llama3.1-70b 70.6 | llama3.3-70b 70.6
LLAMA3.1_405B 405.9 | llama3_8b 8.03 | llama31_8b 8.03 | llama3p1-405b 405.9 | llama3.2-1b 1.24
llama3.2-3b 3.21 | Llama-3.2-1B-Instruct 1.24 | llama-3-8b 8.03 | llama 3 70b 70.6 | llama31-405b 405.9
llama3.1-405b 405.9 | Llama3-405B 405.9 | llama3-1b 1.24 | llama3-3b 3.21 | Llama 3 8B 8.03
llama3_405b 405.9 | llama3.1-nemotron-70b 70.6 | llama-3.1-405b-instruct 405.9 | llama3-8b-instruct 8.03
llama4-scout 107.8 | llama4-maverick 400.7 | Llama-4-Scout-17B-16E 107.8
Llama-4-Maverick-17B-128E-Instruct 400.7 | llama4_scout 107.8 | llama4-17bx16e 107.8
llama4-17bx128e 400.7 | llama4-e16 107.8 | llama4-e128 400.7
qwen-7b 7.7 | qwen-14b 14.2 | qwen-72b 72.3 | qwen1.5-7b 7.7 | qwen1.5-14b 14.2 | qwen1.5-32b 32.5
qwen1.5-72b 72.3 | qwen1.5-110b 111 | qwen1.5-1.8b 1.84 | qwen1.5-4b 3.95 | qwen1.5-moe-a2.7b 14.3
qwen2-0.5b 0.494 | qwen2-1.5b 1.54 | qwen2-7b 7.62 | qwen2-72b 72.7 | qwen2-57b-a14b 57.4
Qwen2.5-0.5B 0.494 | qwen2.5-1.5b 1.54 | qwen2.5-3b 3.09 | qwen2.5-7b 7.62 | qwen2.5-14b 14.8
qwen2.5-32b 32.8 | qwen2.5-72b 72.7 | Qwen/Qwen2.5-72B-Instruct 72.7 | Qwen2.5-Coder-32B 32.8
qwen2.5-math-7b 7.62 | qwen2_5-7b 7.62 | qwen25-7b 7.62 | qwq-32b 32.8
qwen3-0.6b 0.596 | qwen3-1.7b 1.72 | qwen3-4b 4.02 | qwen3-8b 8.19 | qwen3-14b 14.8 | qwen3-32b 32.8
qwen3-30b-a3b 30.5 | qwen3-235b-a22b 235.1 | Qwen3-30B-A3B-Base 30.5 | qwen3-235b 235.1
Qwen3 235B A22B 235.1 | qwen3_30b_a3b 30.5 | qwen3-coder-480b-a35b 480 | qwen3-next-80b-a3b 80
Qwen3-30B-A3B-Instruct-2507 30.5 | qwen3-30b 30.5 | qwen3-moe-30b-a3b 30.5 | qwen3-moe-235b-a22b 235
qwen3-vl-30b-a3b 30.5 | qwen3 32b 32.8 | qwen3-32b-dense 32.8
gemma-2b 2.51 | gemma-7b 8.54 | gemma2-2b 2.61 | gemma2-9b 9.24 | gemma2-27b 27.2 | gemma-2-9b-it 9.24
gemma3-1b 1.0 | gemma3-4b 3.88 | gemma3-12b 11.8 | gemma3-27b 27 | google/gemma-3-27b-it 27
gemma3-27b-pt 27 | gemma-3-4b 3.88 | gemma1-2b 2.51 | gemma1-7b 8.54
mistral-7b 7.24 | Mistral-7B-v0.1 7.24 | mistral-7b-instruct-v0.2 7.24 | mistral-7b-v0.3 7.25
mistralai/Mistral-7B-Instruct-v0.3 7.25 | mistral-nemo-12b 12.2 | mistral-small-24b 23.6
mistral-large-123b 122.6 | mistral-large-2407 122.6 | Mistral-Small-3.1-24B-Instruct-2503 23.6
codestral-22b 22.2 | mistral-nemo-instruct-2407 12.2 | mistral 7b 7.24 | ministral-8b 8.02
mixtral-8x7b 46.7 | mixtral-8x22b 140.6 | Mixtral-8x7B-v0.1 46.7 | mixtral_8x7b 46.7
mixtral-8x22b-instruct-v0.1 140.6 | Mixtral 8x7B 46.7 | mixtral8x7b 46.7 | mixtral 8x22b 140.6
deepseek-llm-7b 6.91 | deepseek-67b 67.4 | deepseek-moe-16b 16.4 | deepseek-v2 235.7
deepseek-v2-lite 15.7 | DeepSeek-V2-Lite 15.7 | deepseek_v2_lite 15.7 | deepseek-v3 671
DeepSeek-V3-Base 671 | deepseek-ai/DeepSeek-V3 671 | deepseek-v3-0324 671 | deepseek-r1 671
deepseek_v3 671 | deepseek-v2.5 235.7 | DeepSeek V3 671 | dsv3 671 | deepseek-v3-671b 671
deepseek-671b 671 | deepseek-r1-distill-llama-8b 8.03 | deepseek-coder-6.7b 6.74
deepseek-coder-33b 33.3 | deepseek-v2-236b 235.7 | deepseek 16b 16.4 | deepseekv3-671b 671
nemotron3-4b 4.2 | nemotron3-8b 8.5 | nemotron4-15b 15.6 | nemotron4-340b 341 | Nemotron-4-340B 341
nemotron4 15b 15.6 | nemotron-h-8b 8.1 | nemotron-h-56b 56 | nemotronh-56b 56 | nemotronh_56b 56
nemotron-nano-9b-v2 8.9 | nemotron-nano-12b-v2 12.3 | nemotron-3-nano 31.6 | nemotron_3_nano 31.6
nemotron3-super 120 | minitron-4b 4.2 | llama-3.1-nemotron-nano-8b 8.03 | nemotron4_340b 341
nemotron-4 340B 341 | Nemotron 3 Nano 30B-A3B 31.6 | Nemotron-Nano-v2-9B 8.9
gpt2 0.124 | gpt2-small 0.124 | gpt2-medium 0.355 | gpt2-large 0.774 | gpt2-xl 1.56 | gpt2-1.5b 1.56
gpt3-126m 0.126 | gpt3-125m 0.126 | gpt3-350m 0.36 | gpt3-760m 0.76 | gpt3-1.3b 1.3 | gpt3-2.7b 2.7
gpt3-5b 5 | gpt3-6.7b 6.7 | gpt3-7b 6.7 | gpt3-13b 13 | gpt3-20b 20 | gpt3-22b 22 | gpt3-40b 40
gpt3-175b 175 | GPT-3 175B 175 | gpt3_175b 175 | gpt-175b 175 | gpt3-530b 530 | gpt3-1t 1000
gpt3-xl 1.3
megatron-1.7b 1.7 | megatron-3.6b 3.6 | megatron-7.5b 7.5 | megatron-18.4b 18.4 | megatron-22b 22
megatron-39.1b 39.1 | megatron-76.1b 76.1 | megatron-145.6b 145.6 | megatron-175b 175
megatron-310.1b 310.1 | megatron-529.6b 529.6 | megatron-530b 530 | megatron-1t 1008
megatron-1008b 1008 | gpt-1t 1008 | gpt-22b 22 | mt-nlg-530b 530 | megatron-8.3b 8.3
megatron-lm-8.3b 8.3 | megatron-2.5b 2.5 | turing-nlg-17b 17 | gpt-530b 530 | megatron-gpt-22b 22
gpt-3 22b 22 | gpt-8.3b 8.3
gpt-oss-20b 20.9 | gpt-oss-120b 116.8 | gptoss-120b 116.8 | gpt_oss_20b 20.9 | openai/gpt-oss-120b 116.8
GPT OSS 120B 116.8
phi-1 1.42 | phi-1.5 1.42 | phi-2 2.78 | phi-3-mini 3.82 | Phi-3-mini-4k-instruct 3.82 | phi-3-medium 14
phi-3.5-mini 3.82 | phi-3.5-moe 41.9 | phi-4 14.7 | phi-4-mini 3.84
falcon-7b 6.92 | falcon-40b 41.3 | falcon-180b 179.5 | falcon2-11b 11.1 | falcon3-7b 7.46
falcon3-10b 10.3 | falcon-1b 1.3
olmo-1b 1.18 | olmo-7b 6.89 | olmo2-1b 1.48 | olmo2-7b 7.3 | olmo2-13b 13.7 | olmo2-32b 32.2
OLMo-2-1124-7B 7.3 | OLMo-2-1124-13B 13.7 | OLMo-2-0325-32B 32.2 | olmoe-1b-7b 6.92 | olmo3-7b 7.3
olmo3-32b 32.2 | OLMoE-1B-7B-0924 6.92 | olmo-7b-0724 6.89
mpt-125m 0.125 | mpt-350m 0.356 | mpt-760m 0.76 | mpt-1b 1.3 | mpt-1.3b 1.3 | mpt-3b 2.65 | mpt-2.7b 2.65
mpt-7b 6.65 | mpt-13b 13 | mpt-30b 30 | mosaicml/mpt-7b 6.65
bloom-560m 0.559 | bloom-1b1 1.07 | bloom-1b7 1.72 | bloom-3b 3.0 | bloom-7b1 7.07 | bloom-176b 176.2
bloom 176.2 | BLOOM-176B 176.2 | bloomz-7b1 7.07
opt-125m 0.125 | opt-1.3b 1.32 | opt-2.7b 2.65 | opt-6.7b 6.66 | opt-13b 12.85 | opt-30b 29.97
opt-66b 65.7 | opt-175b 175
pythia-70m 0.07 | pythia-160m 0.162 | pythia-410m 0.405 | pythia-1b 1.01 | pythia-1.4b 1.41
pythia-2.8b 2.78 | pythia-6.9b 6.86 | pythia-12b 11.85 | gpt-neox-20b 20.6 | gpt-j-6b 6.05
gpt-neo-1.3b 1.32 | gpt-neo-2.7b 2.65
glm-4-9b 9.4 | glm4-9b 9.4 | glm-4-32b 32.6 | glm-4.5 352 | glm-4.5-air 106 | glm-4.6 352 | glm4.5 352
chatglm3-6b 6.24 | chatglm2-6b 6.24 | glm-4.7 352
kimi-k2 1026 | kimi-k2-instruct 1026 | Kimi K2 1026 | kimi_k2 1026 | moonlight-16b-a3b 16
Moonlight-16B-A3B 16 | kimi-k2-thinking 1026
dbrx 131.6 | dbrx-base 131.6 | dbrx-132b 131.6 | grok-1 314 | grok1-314b 314 | grok1 314
mamba2-2.7b 2.7 | mamba2-1.3b 1.34 | mamba2-8b 8.2 | mamba2-hybrid-8b 8.7
llava-7b 6.74 | llava-13b 13 | vicuna-7b 6.74 | vicuna-13b 13 | alpaca-7b 6.74
yi-6b 6.06 | yi-9b 8.83 | yi-34b 34.4 | Yi-1.5-34B 34.4 | baichuan-7b 7.0 | baichuan-13b 13.26
baichuan2-7b 7.51 | baichuan2-13b 13.9 | internlm-7b 7.32 | internlm2-7b 7.74 | internlm2.5-7b 7.74
internlm-20b 20.1 | internlm2-20b 19.9 | internlm3-8b 8.8
starcoder 15.5 | starcoderbase-15b 15.5 | starcoder2-3b 3.03 | starcoder2-7b 7.17 | starcoder2-15b 16
granite-3-8b 8.17 | granite-3.1-8b 8.17 | granite-20b 20 | granite-34b 34 | granite-3-2b 2.53
smollm-135m 0.135 | smollm2-135m 0.135 | smollm-360m 0.362 | smollm2-360m 0.362 | smollm2-1.7b 1.71
smollm3-3b 3.08 | tinyllama-1.1b 1.1 | tinyllama 1.1 | stablelm-3b 2.8 | stablelm2-12b 12.1
stablelm2-1.6b 1.64 | minicpm-2b 2.72 | command-r-35b 35 | command-r-plus-104b 104 | c4ai-command-r 35
aya-35b 35 | solar-10.7b 10.7 | exaone-3-7.8b 7.82 | seed-oss-36b 36.2 | minimax-m2 229 | hunyuan-a13b 80
ernie-4.5-21b-a3b 21.8 | ernie-4.5-300b-a47b 300 | ling-lite 16.8 | dots.llm1 142 | xgen-7b 6.9
open-llama-7b 6.74 | open-llama-3b 3.43 | openllama-13b 13 | zephyr-7b 7.24 | tulu-3-70b 70.6
tulu-3-8b 8.03 | hermes-3-405b 405.9 | apertus-8b 8.05 | apertus-70b 70.6 | marin-8b 8.03
salamandra-7b 7.77 | viking-33b 33 | poro-34b 34.2 | eurollm-9b 9.15 | amber-7b 6.74
"""
SIZES = [entry.rpartition(" ")[::2] for line in NAMES.strip().splitlines() for entry in line.split(" | ")]


@pytest.mark.heavy
def test_published_names_mean_models_of_the_published_size():
    assert len(SIZES) > 400
    for name, billion in SIZES:
        assert load_model(name).num_params / 1e9 == pytest.approx(float(billion), rel=0.03), name


def test_no_name_means_two_models():
    owner = {}
    for name in known_names():
        path = model_file(name)
        assert owner.setdefault(name_key(name), path) == path, name
    assert set(owner.values()) == set(MODEL_DIR.glob("*.yaml"))


def test_names_of_files_are_those_inside():
    for name, model in models().items():
        assert model_file(name).stem == model.name
        assert all(model_file(alias).stem == model.name for alias in model.aliases), model.name


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param("llama3-3b", "llama-33b", id="generation-is-no-digit-of-the-size"),
        pytest.param("mamba2-8b", "mamba-2.8b", id="generation-is-no-decimal"),
        pytest.param("gpt3-1.3b", "gpt-31.3b", id="size"),
        pytest.param("deepseek-v2", "deepseek-v2-lite", id="suffix"),
        pytest.param("qwen3-30b-a3b", "qwen3-3b", id="active"),
    ],
)
def test_near_names_stay_apart(one, other):
    assert name_key(one) != name_key(other)


@pytest.mark.parametrize("name", ["llama-7b-turbo", "t5-11b", "llama3.2-90b-vision", "", "/", "70b"])
def test_a_name_that_nobody_packaged_is_no_near_model(name):
    with pytest.raises(ConfigError, match="is not known"):
        load_model(name)


def test_a_checkpoints_config_is_no_model_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 4096}')
    with pytest.raises(ConfigError, match="give a YAML file of the form of"):
        load_model(str(path))
