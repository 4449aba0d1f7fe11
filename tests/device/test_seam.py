"""Kinds of devices are named in aorta/device; everywhere else asks its backend."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEAM = "aorta/device/"
ALLOWED = {
    "aorta/queues/probe/kernels.py": "kernels that read the device's clock, by Triton",
    "aorta/queues/probe/triton_kernels.py": "kernels that read the device's clock",
    "aorta/check/": "traces of streams and of the allocator, graphs, spin kernels: under torch.cuda alone",
    "aorta/records/schema.py": "the words of run.json",
    "aorta/config/structs.py": "training.device, which users write",
    "aorta/why/causes/code_lines.py": "the names of calls in samples, as programs write them",
}
"""Files and rooms that may name CUDA, and why."""


def names_of_cuda(tree: ast.AST) -> Iterator[int]:
    """Lines with torch.cuda, or with a text that names a CUDA device. Docstrings may."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
                yield node.lineno
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                if text == "cuda" or text.startswith("cuda:") or "torch.cuda" in text:
                    yield node.lineno
            case ast.Import(names=names) if any(alias.name.startswith("torch.cuda") for alias in names):
                yield node.lineno
            case ast.ImportFrom(module="torch", names=names) if any(a.name == "cuda" for a in names):
                yield node.lineno
            case ast.ImportFrom(module=str(module)) if module.startswith("torch.cuda"):
                yield node.lineno


@pytest.mark.heavy
def test_only_the_seam_names_cuda() -> None:
    named = {
        str(path.relative_to(ROOT)): lines
        for path in sorted((ROOT / "aorta").rglob("*.py"))
        if "cuda" in (text := path.read_text()) and (lines := list(names_of_cuda(ast.parse(text))))
    }
    outside = [f"{path}:{lines[0]}" for path, lines in named.items() if not path.startswith((SEAM, *ALLOWED))]
    assert outside == [], "ask aorta.device.backend.accelerator() or backend_of(device)"
    unused = [allowed for allowed in ALLOWED if not any(path.startswith(allowed) for path in named)]
    assert unused == [], "these name CUDA no more: take them off the list"


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "device = torch.device('cuda', 0)",
        "device = f'cuda:{index}'",
        "event: 'torch.cuda.Event | None' = None",
        "from torch import cuda",
        "from torch.cuda import Event",
        "import torch.cuda as c",
    ],
)
def test_a_line_that_names_cuda_is_found(line: str) -> None:
    assert list(names_of_cuda(ast.parse(line))) == [1]


def test_docstrings_and_other_words_may_name_it() -> None:
    text = '"""torch.cuda"""\ncategory = "cuda_runtime"\nuses = tensor.is_cuda'
    assert list(names_of_cuda(ast.parse(text))) == []
