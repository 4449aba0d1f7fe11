"""Runs at the start of every Python below `aorta run`; calls aorta once the program has imported torch.

Until then it imports nothing: most of these processes never train. Python imports the first `sitecustomize`
on its path, which is this one; the one that it hides is run first.
"""

import os
import sys

TYPE_CHECKING = False  # typing would have to be imported
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

SETTINGS = "AORTA_RUN"


class TorchFinder:
    """Finds a few modules as the other finders do, and has aorta called after their import."""

    def __init__(self, modules: set[str]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name not in self.modules:
            return None
        self.modules.discard(name)  # a finder of the program's may ask all finders in its turn, this one too
        try:
            spec = self.spec_of_others(name, path, target)
        finally:
            self.modules.add(name)
        if spec is not None:
            try:
                call_after(spec.loader, name)
            except Exception as error:
                say(f"cannot watch the import of {name}: {error}")
        return spec

    def spec_of_others(self, name: str, path: "Any", target: "Any") -> "Any":
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                return spec
        return None


def call_after(loader: "Any", name: str) -> None:
    """Let the loader call aorta once the module is executed."""
    execute = loader.exec_module

    def exec_module(module: "ModuleType") -> None:
        execute(module)
        try:
            attach().imported(name, module)
        except Exception as error:
            say(f"{type(error).__name__}: {error}; nothing is recorded in this process")

    loader.exec_module = exec_module


def attach() -> "Any":
    """Import aorta.attach.hooks, from where `aorta run` found aorta if this Python does not have it."""
    if "aorta" not in sys.modules:
        from importlib.util import find_spec, module_from_spec, spec_from_file_location

        if find_spec("aorta") is None:
            folder = os.path.join(settings["home"], "aorta")
            spec: Any = spec_from_file_location(
                "aorta", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
            )
            sys.modules["aorta"] = module = module_from_spec(spec)
            spec.loader.exec_module(module)
    from aorta.attach import hooks

    return hooks


def say(message: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"aorta: {message}\n")


def run_hidden() -> None:
    """Run the sitecustomize that this one hides."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != folder]
    from _frozen_importlib_external import PathFinder

    hidden = PathFinder.find_spec("sitecustomize", sys.path)
    if hidden is not None and hidden.loader is not None:
        from _frozen_importlib import module_from_spec

        module = sys.modules["sitecustomize"] = module_from_spec(hidden)
        hidden.loader.exec_module(module)


finder = None
if os.environ.get(SETTINGS):
    try:
        import json

        settings = json.loads(os.environ[SETTINGS])
        finder = TorchFinder(set(settings["imports"]))
        sys.meta_path.insert(0, finder)
    except Exception as error:
        say(f"{SETTINGS} cannot be read: {error}")
try:
    run_hidden()  # it may import torch
finally:
    if finder in sys.meta_path[1:]:  # before finders that it has added, which would be asked twice
        sys.meta_path.remove(finder)
        sys.meta_path.insert(0, finder)
