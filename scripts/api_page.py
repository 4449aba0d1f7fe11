"""Writes docs/api.md from docstrings: `python scripts/api_page.py`."""

import argparse
import ast
import importlib.util
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # run from a checkout, installed or not

import aorta  # noqa: E402
from aorta import errors  # noqa: E402

PAGE = ROOT / "docs" / "api.md"
HEAD = """# Python API

What a program may call. Everything else in the package may change between versions. `import aorta` loads
neither torch nor numpy. Made from the docstrings by `scripts/api_page.py`.
"""
RECORDING = """
## Recording

A `with` around the training loop records every collective of the process. Give the same options on all ranks.
"""
READING = """
## Reading runs and traces

Frames are pandas frames. What was not measured is missing in them, never 0.
"""
INTEGRATIONS = """
## Integrations

Examples of each: [integrations](integrations.md). `settings` are the keywords of `aorta.instrument`.
"""
ERRORS = """
## Errors

All are subclasses of `aorta.errors.AortaError`; the message is one line that says what would work.
"""

RECORDER_METHODS = ("step", "pausing", "pause", "resume", "on_record", "close")
STEP_METHODS = ("log", "drop")
RUN_MEMBERS = ("steps", "collectives", "kernels", "summary", "report")
COMPARISON_MEMBERS = ("headline", "metrics", "verdicts")
INTEGRATED = {
    "transformers": ("AortaCallback",),
    "lightning": ("AortaCallback", "AortaFabricCallback"),
    "accelerate": ("record", "AccelerateRecording.step", "AccelerateRecording.close"),
    "torchtitan": ("record",),
}
PUBLIC_ERRORS = ("InstrumentError", "RecordError", "TraceError", "ReportError", "ConfigError")
WIDEST = 100
"""Characters of a signature on one line."""

ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): ", re.MULTILINE)
"""A line of a docstring that explains an argument, or several."""

Definition = ast.FunctionDef | ast.ClassDef


def page() -> str:
    """The text of docs/api.md."""
    return "".join([HEAD, *recording(), *reading(), *integrations(), *error_list()])


def recording() -> Iterator[str]:
    yield RECORDING
    yield entry("aorta.instrument", definition_of(aorta.instrument))
    recorder = get_type_hints(aorta.instrument)["return"]
    yield from members("recorder", recorder, RECORDER_METHODS)
    yield from members("step", get_type_hints(recorder.step)["return"], STEP_METHODS)


def reading() -> Iterator[str]:
    yield READING
    yield entry("aorta.load", definition_of(aorta.load))
    yield from members("run", get_type_hints(aorta.load)["return"], RUN_MEMBERS)
    yield entry("aorta.compare", definition_of(aorta.compare))
    yield from members("comparison", get_type_hints(aorta.compare)["return"], COMPARISON_MEMBERS)


def integrations() -> Iterator[str]:
    """Read without importing: the libraries need not be installed."""
    yield INTEGRATIONS
    for library, names in INTEGRATED.items():
        module = f"aorta.integrations.{library}"
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text())
        for name in names:
            found: Any = tree
            for part in name.split("."):
                found = named(part, found)
            yield entry(f"{module}.{name}", found)


def error_list() -> Iterator[str]:
    yield f"{ERRORS}\n| error | meaning |\n|---|---|\n"
    for name in PUBLIC_ERRORS:
        meaning = " ".join((inspect.getdoc(getattr(errors, name)) or "").split())
        yield f"| `{name}` | {meaning.replace('|', chr(92) + '|')} |\n"


def members(holder: str, kind: type, names: tuple[str, ...]) -> Iterator[str]:
    """Entries of methods and properties of a class, called as a user's variable calls them."""
    owners = [definition_of(base) for base in kind.__mro__ if base is not object]
    for name in names:
        definitions = (named(name, owner) for owner in owners)
        yield entry(f"{holder}.{name}", next(filter(None, definitions), None))


def entry(name: str, definition: Definition | None) -> str:
    """A heading, the signature as code, and the docstring as text."""
    assert definition is not None, f"{name} is gone: change scripts/api_page.py"
    text = (ast.get_docstring(definition) or "").replace("<", "&lt;")
    text = ARGUMENT.sub(lambda found: f"- `{found[1].replace(', ', '`, `')}`: ", text)
    return f"\n### {name}\n\n```python\n{signature(name, definition)}\n```\n\n{text}\n"


def signature(name: str, definition: Definition) -> str:
    """'aorta.load(path: Path | str, ...) -> LoadedRun', an argument a line where it is long."""
    if isinstance(definition, ast.ClassDef):
        made = named("__init__", definition)
        assert isinstance(made, ast.FunctionDef)
        return called(name, made, "")
    if any(isinstance(item, ast.Name) and "property" in item.id for item in definition.decorator_list):
        return f"{name}{returned(definition).replace(' ->', ':')}"
    return called(name, definition, returned(definition))


def called(name: str, definition: ast.FunctionDef, result: str) -> str:
    pieces = [piece.replace("'", '"') for piece in arguments(definition.args)]
    line = f"{name}({', '.join(pieces)}){result}"
    if len(line) <= WIDEST:
        return line
    return "\n".join([f"{name}(", *(f"    {piece}," for piece in pieces), f"){result}"])


def arguments(own: ast.arguments) -> Iterator[str]:
    """'path: str = "artifacts"' of each argument but self, with * where only keywords follow."""
    defaults: list[ast.expr | None] = [None] * (len(own.args) - len(own.defaults))
    for argument, default in zip(own.args, [*defaults, *own.defaults], strict=True):
        if argument.arg != "self":
            yield argument_text(argument, default)
    if own.vararg is not None:
        yield f"*{ast.unparse(own.vararg)}"
    elif own.kwonlyargs:
        yield "*"
    for argument, default in zip(own.kwonlyargs, own.kw_defaults, strict=True):
        yield argument_text(argument, default)
    if own.kwarg is not None:
        yield f"**{ast.unparse(own.kwarg)}"


def argument_text(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + ("" if default is None else f" = {ast.unparse(default)}")


def returned(definition: ast.FunctionDef) -> str:
    """' -> LoadedRun', without the quotes of a name that is defined later."""
    result = definition.returns
    if result is None:
        return ""
    text = result.value if isinstance(result, ast.Constant) and isinstance(result.value, str) else None
    return f" -> {text or ast.unparse(result)}"


def definition_of(thing: Callable[..., Any] | type) -> Definition:
    """The syntax tree of a function or a class."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    assert isinstance(definition, ast.FunctionDef | ast.ClassDef)
    return definition


def named(name: str, within: ast.Module | Definition) -> Definition | None:
    for item in within.body:
        if isinstance(item, ast.FunctionDef | ast.ClassDef) and item.name == name:
            return item
    return None


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
