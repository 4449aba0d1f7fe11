"""Names of packaged models, in every spelling that sources use."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

MODEL_DIR = Path(__file__).resolve().parents[1] / "models"

NOT_SHAPES = (
    "instruct|chat|base|hf|it|pt|bf16|fp16|fp8|mxfp8|nvfp4|fp4|text|model|meta|moe|dense|lora|qlora|peft|sft|dpo|"
    "pretrain|pretraining|finetune|finetuning|preview|pretrained|nemo|torchtitan"
)
"""Words of a name that say nothing about the shapes."""
LETTERS = "a-z"
WHOLE = rf"(?<![{LETTERS}0-9.])(?:{NOT_SHAPES}|v0\.\d+|\d{{4}}|\d+k)(?![{LETTERS}0-9.])"
"""Such a word, a preview's version (v0.1), a date (2407) or a context length (128k), standing alone."""


def name_key(name: str) -> tuple[str, ...]:
    """Letters and numbers of a name, without the owner and what different sources write differently.

    Llama-3.1-8B is llama3.1-8b, but llama3-3b is not llama-33b: two numbers stay two.
    """
    plain = name.lower().rstrip("/").rpartition("/")[2]
    shapes = re.sub(WHOLE, "", plain)
    joined = re.sub(rf"(?<=[{LETTERS}])[^{LETTERS}0-9]+(?=[{LETTERS}])", "", shapes)
    return tuple(re.findall(rf"[{LETTERS}]+|\d+(?:\.\d+)?", joined))


def model_file(name: str) -> Path | None:
    """The packaged file of a name; qwen2_5-7b and llama3p1-8b are tried as 2.5 and 3.1."""
    files = model_files()
    return files.get(name_key(name)) or files.get(
        name_key(re.sub(r"(?<=\d)[_p](?=\d)", ".", name.lower(), count=1))
    )


@cache
def model_files() -> Mapping[tuple[str, ...], Path]:
    """The file of every packaged model by the key of its name and of its aliases, without reading shapes."""
    files: dict[tuple[str, ...], Path] = {}
    for path in sorted(MODEL_DIR.glob("*.yaml")):
        for name in (path.stem, *_aliases(path)):
            files[name_key(name)] = path
    return files


def known_names() -> list[str]:
    """Every name and alias as the files write it."""
    return [name for path in sorted(MODEL_DIR.glob("*.yaml")) for name in (path.stem, *_aliases(path))]


def _aliases(path: Path) -> list[str]:
    listed = re.search(r"^aliases: \[(.*)\]$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [alias.strip() for alias in listed[1].split(",")] if listed else []
