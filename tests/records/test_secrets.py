"""Secrets stay out of what is stored; words, numbers and paths of a command stay in it."""

import json

import pytest

from aorta.records.secrets import (
    REDACTED,
    is_secret_name,
    is_secret_value,
    redacted,
    redacted_command,
    redacted_settings,
)
from aorta.records.state import first_line

SECRET = "hunter2"
TEXTS = [
    "token=hunter2", "api_key: 'hunter2'", "password hunter2", "Authorization: Basic hunter2==",
    "Authorization: Bearer hunter2.x", '{"token": "hunter2"}', "{'api_key': 'hunter2', 'n': 3}",
    "postgres://u:p@hunter2@h/db", "postgres://u:hunter2/x@h/db", "mysql://root:hunter2@db:3306/x",
    "redis://:hunter2@cache:6379/0", "https://hunter2@github.com/x/y.git", "amqp://a:b:hunter2@h//",
    "mongodb+srv://u:hunter2@c.example.net/?w=1", "https://h/x?sig=hunter2&sv=2020",
    "https://h/x?a=1&code=hunter2", "https://h/cb#access_token=hunter2", "root:hunter2@db refused",
    "host=h password=hunter2 dbname=x", "AWS_SECRET_ACCESS_KEY=hunter2", "export HF_TOKEN=hunter2",
    "secret: hunter2 and more hunter2", "the password is hunter2", "Incorrect API key provided: hunter2.",
    "x-api-key: hunter2", "Cookie: a=hunter2; b=2", "Set-Cookie: session=hunter2", "apiKey=hunter2",
    "clientSecret: hunter2", 'privateKey="hunter2 x"', "passphrase: correct horse hunter2",
    "login(token='hunter2')", "login(token = \"a 'b' hunter2\")", "login(key, secret=b'hunter2')",
    "credentials: {user: a, pass: hunter2}", "auth=('me', 'hunter2')", "bearer hunter2hunter2",
    "WEBHOOK_URL=https://x/hunter2", "SAS: hunter2", "pwd=hunter2",
    "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----",
    "-----BEGIN RSA PRIVATE KEY----- hunter2", 'config {\\"token\\": \\"hunter2\\"}',
    "AccountKey=hunter2;Endpoint=x", "license-key: hunter2", "session_id=hunter2",
    "Proxy-Authorization: Digest username=x, response=hunter2",
]  # fmt: skip
VALUES = [
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789", "hf_abcdefghijklmn", "sk-proj-Ab3dEf6hIj9kLm2nOp5q",
    "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "glpat-abc_DEF-123456789012",
    "xoxb-123456789012-abcdefGHIJKL", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-def",
    "pypi-AgEIcHlwaS5vcmcCJDU1", "Zm9vYmFyYmF6cXV4MTIzNDU2Nzg5MEFCQ0RFRg==",
    "0123456789abcdef0123456789abcdef", "SG.abcdefghijkl.mnopqrstuvwx", "3f9a1c7e5b2d4a6f8091",
    "123e4567-e89b-12d3-a456-426614174000", "AIzaSyA1234567890abcdefghijklmnopqrstu",
    "dGhpc2lzYXNlY3JldA+b4/Q3VyaW91cw==", "AbC1-dEf2-GhI3-jKl4-MnO5", "qZtXkWvBnMpLrSdFgHjKcQzX",
    "T0A1B2C3D/B9Z8Y7X6W/hJk3LmN5pQr7StU9vWx1YzAb", "npm_abcdefghijklmnopqrstuv", "dop_v1_0a1b2c3d4e5f",
    "bot123456:ABC-DEF1234ghIkl-zyx57W2v1u123ew11",
]  # fmt: skip
PLAIN = [
    "train.py", "--lr=3e-4", "--model", "meta-llama/Llama-3.1-70B-Instruct", "Qwen/Qwen3-30B-A3B",
    "/data/checkpoint_20251123T101112_step1000/rank_0_metrics.jsonl",
    "--run-name=gpt2-b16-s2048-l12-h768-lr3e4-tp2", "c4.en.train.00000-of-01024.json.gz",
    "layers.0.self_attn.q_proj.weight", "torch-2.13.0+cu130", "NVIDIA-H100-SXM5-80GB-HBM3",
    "--tokens-per-batch=4096", "--tokenizer", "/models/llama3/tokenizer.model", "--max-tokens", "2048",
    "training.max_steps=100", "+data.path=/mnt/c4", "python3.11", "--pin-memory",
    "/usr/lib/python3.11/site-packages/torch/nn/modules/module.py", "DistributedDataParallelKwargsHandler",
    "--step-at", "module_of_training:train_one_step", "s3://bucket/prefix/part-00017.parquet",
    "1234567890123456", "https://github.com/pytorch/pytorch@v2.1", "http://node-0123.cluster.local:29500",
    "tcp://10.0.0.1:29500", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "ip-10-0-3-17.ec2.internal",
    "2025-11-23T10:11:12.123456Z", "--fsdp-config={\"backward_prefetch\": \"backward_pre\", \"shard\": 8}",
    "-H", "0x7f3a2b4c5d6e", "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB",
    "KeyError: 'layers.3.weight'", "ValueError: token id 50257 is out of range",
    "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer",
    "shape '[16, 1024]' is invalid for input of size 32768", "ncclSystemError: System call failed",
    "internlm2_5-7b-chat-1m", "outputs/llama3/run42/step1000",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_a_secret_in_a_text_is_told_by_what_stands_around_it(text: str) -> None:
    assert SECRET not in redacted(text)
    assert SECRET not in first_line(RuntimeError(f"cannot log in: {text}"))
    assert SECRET not in " ".join(redacted_command(["train.py", "--config", text, "-c", f"x({text})"]))
    assert SECRET not in json.dumps(redacted_settings({"a": [{"b": text}]}))


@pytest.mark.parametrize("value", VALUES)
def test_a_long_value_that_is_no_word_no_number_and_no_path_is_a_secret(value: str) -> None:
    for text in (value, f"bad value {value}.", f"--foo={value}", f"https://h/hook/{value}", f"('{value}',)"):
        left = redacted(text)
        assert value not in left
        assert not any(value[at : at + 12] in left for at in range(len(value) - 11))
    assert is_secret_value(value)


@pytest.mark.parametrize("text", PLAIN)
def test_words_numbers_and_paths_stay(text: str) -> None:
    assert redacted(text) == text
    assert redacted_command([text]) == [text]


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        (["--hf-token", "hunter2", "--lr=3e-4"], ["--hf-token", REDACTED, "--lr=3e-4"]),
        (["--api-key=hunter2"], [f"--api-key={REDACTED}"]),
        (["data.path=s3://u:hunter2@b/x"], [f"data.path=s3://{REDACTED}@b/x"]),
        (["-H", "X-Vault: hunter2", "x"], ["-H", f"X-Vault: {REDACTED}", "x"]),
        (["--user", "me:hunter2"], ["--user", f"me:{REDACTED}"]),
        (['--json={"token": "hunter2", "n": 3}'], [f'--json={{"token": "{REDACTED}", "n": 3}}']),
        (['{"a": {"api_key": 12345}, "lr": 0.1}'], [f'{{"a": {{"api_key": "{REDACTED}"}}, "lr": 0.1}}']),
        (["--set", "password", "hunter2"], ["--set", "password", REDACTED]),
        (["-e", "HF_TOKEN=hunter2"], ["-e", f"HF_TOKEN={REDACTED}"]),
        (["+secrets.wandb.key=hunter2"], [f"+secrets.wandb.key={REDACTED}"]),
    ],
)
def test_a_command_keeps_its_options_and_loses_its_secrets(command: list[str], kept: list[str]) -> None:
    assert redacted_command(command) == kept


@pytest.mark.parametrize(
    "name",
    ["NCCL_PWD", "GPU_PASSPHRASE", "PYTORCH_HUB_TOKEN", "AMD_API_KEY", "GLOO_SECRET", "CUDA_CREDENTIALS",
     "OMP_AUTH", "NCCL_BEARER", "HSA_PRIVATE_KEY", "HIP_COOKIE", "apiKey", "licenseKey", "passwd", "X-Auth"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["NCCL_DEBUG", "max_tokens", "tokenizer", "pin_memory", "NCCL_MAX_CTAS", "KeyError", "num_tokens"]
)
def test_names_of_settings(name: str) -> None:
    assert not is_secret_name(name)


def test_settings_lose_whole_values_of_secret_names() -> None:
    settings = {"password": 12345, "auth": {"user": "me"}, "token": None, "use_auth": True, "lr": 0.1}
    assert redacted_settings(settings) == {
        "password": REDACTED, "auth": REDACTED, "token": None, "use_auth": True, "lr": 0.1
    }  # fmt: skip


def test_an_error_is_one_line_without_secrets() -> None:
    assert first_line(ValueError("bad key hf_abcdefghijkl\nmore")) == f"ValueError: bad key {REDACTED}"


@pytest.mark.parametrize(
    "text", ["a" * 200_000, "token=" * 30_000, "a:" * 100_000, "=" * 100_000, "x@y:" * 50_000]
)
def test_long_texts_take_no_long_time(text: str) -> None:
    first_line(ValueError(text))
