"""Makes data and tiny models for published training programs: published_data.py FOLDER."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WORDS = (
    "the",
    "a",
    "cat",
    "dog",
    "sees",
    "eats",
    "red",
    "blue",
    "fish",
    "bird",
    "and",
    "then",
    "user",
    "assistant",
)
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def main(folder: Path) -> None:
    tokens(folder / "tiny")
    texts(folder)
    try:
        images(folder / "images")
        models(folder)
    except ImportError as error:
        print(f"{error}: programs that need it will fail")


def tokens(folder: Path) -> None:
    """Write tokens for nanoGPT."""
    folder.mkdir(exist_ok=True)
    numbers = np.random.default_rng(0).integers(0, 200, 20_000)
    for name in ("train", "val"):
        numbers.astype(np.uint16).tofile(folder / f"{name}.bin")


def texts(folder: Path) -> None:
    """Chats, preferences and prompts as JSON lines, and a reward."""
    random = np.random.default_rng(1)

    def sentence() -> str:
        return " ".join(random.choice(WORDS, 6))

    def question() -> list[dict[str, str]]:
        return [{"role": "user", "content": sentence()}]

    def answer() -> list[dict[str, str]]:
        return [{"role": "assistant", "content": sentence()}]

    kinds = {"sft": ("messages",), "preference": ("prompt", "chosen", "rejected"), "prompts": ("prompt",)}
    makers: dict[str, Callable[[], list[dict[str, str]]]] = {
        "prompt": question,
        "chosen": answer,
        "rejected": answer,
        "messages": lambda: question() + answer(),
    }
    for kind, names in kinds.items():
        (folder / kind).mkdir(exist_ok=True)
        for split in ("train", "test"):
            number = 64 if split == "train" else 8
            lines = [json.dumps({name: makers[name]() for name in names}) for _ in range(number)]
            (folder / kind / f"{split}.jsonl").write_text("\n".join(lines))
    (folder / "pairs").mkdir(exist_ok=True)
    for name, number in (("train", 48), ("dev", 8)):
        rows = [f"{('equivalent', 'not_equivalent')[i % 2]},{sentence()},{sentence()}" for i in range(number)]
        (folder / "pairs" / f"{name}.csv").write_text("\n".join(["label,sentence1,sentence2", *rows, ""]))
    modules = folder / "modules"
    modules.mkdir(exist_ok=True)
    (modules / "lengths.py").write_text(
        "def reward(completions, **_):\n    return [float(len(str(text))) for text in completions]\n"
    )
    (modules / "evaluate.py").write_text(
        "class Metric:\n    def add_batch(self, **_): pass\n"
        "    def compute(self, **_): return {'accuracy': 0.0}\n"
        "def load(*_, **__): return Metric()\n"
    )


def images(folder: Path) -> None:
    """Two kinds of images."""
    from PIL import Image

    random = np.random.default_rng(2)
    for split, number in (("train", 24), ("val", 4)):
        for kind in ("cats", "dogs"):
            (folder / split / kind).mkdir(parents=True, exist_ok=True)
            for i in range(number):
                pixels = random.integers(0, 255, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / kind / f"{i}.png")


def models(folder: Path) -> None:
    """A Llama and a BERT of two layers with tokenizers of a few words."""
    import torch

    tokenizers: Any = importlib.import_module("tokenizers")
    transformers: Any = importlib.import_module("transformers")

    torch.manual_seed(0)
    special = ["[PAD]", "[UNK]", "[EOS]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]", bos_token="[CLS]",
        cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]", model_max_length=64,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    size = {
        "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**size, num_key_value_heads=2, bos_token_id=3)
    ).save_pretrained(folder / "llama")
    transformers.BertForSequenceClassification(transformers.BertConfig(**size)).save_pretrained(
        folder / "bert"
    )
    for name in ("llama", "bert"):
        tokenizer.save_pretrained(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
