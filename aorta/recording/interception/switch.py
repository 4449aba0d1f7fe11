"""Sees every collective of the process, by whatever path it comes.

`dist.*`, functional collectives, DTensor, FSDP, DDP's C++ reducer and compiled graphs all end in
the dispatcher's `c10d::*` operators. Kernels of ours for the CPU and the accelerator run there before
those of the backends (operators.py), and the methods that Python calls most often are
replaced too, for speed (method_calls.py); a call that was taken there does not reach its
operator. Groups of coalesced calls are bracketed on ProcessGroup itself, since their start and end are not
operators; what waits for futures of works is seen on torch's futures (futures.py).
`uninstall` restores everything.

torch >= 2.14 also has hooks on process groups. They fire in the backends' kernels, most of which are passed
by here, and they cannot see waits inside C++, which make up most stalls; so our kernels do the
recording there too, and hooks of others do not fire meanwhile (said once in the log).
"""

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup

from aorta.recording.interception.futures import FutureMethods
from aorta.recording.interception.method_calls import MethodCalls
from aorta.recording.interception.operators import kernels
from aorta.recording.interception.replaced import ReplacedMethods
from aorta.recording.interception.uncompiled import uncompiled
from aorta.recording.observers.observer import Observer

logger = logging.getLogger(__name__)


class Interception:
    """Installed once per process; a second one is refused by `install`."""

    _installed: "Interception | None" = None

    _was_installed = False
    """In this process, once at least."""

    give_way: "Callable[[], None] | None" = None
    """Takes the recorder off that is on only as long as the program has none of its own."""

    def __init__(self, observers: dict[str, Observer]) -> None:
        """observers: by dispatch key, the CPU's and an accelerator's."""
        self._observers = observers
        self._libraries: list[torch.library.Library] = []
        self._coalescing = ReplacedMethods(ProcessGroup)
        self.method_calls = MethodCalls(observers)
        self._futures = FutureMethods()

    def install(self) -> None:
        assert Interception._installed is None
        if hasattr(ProcessGroup, "register_pre_hook"):
            logger.info("hooks registered on process groups do not fire while aorta records")
        Interception._installed = self
        library = torch.library.Library("c10d", "IMPL")
        self._libraries.append(library)
        if Interception._was_installed:
            self._register_kernels(library)
        else:
            # torch may warn, once per process, that a kernel is overridden: that is what we are here for. Not
            # at every resume: the end of this context makes Python show every other warning once more.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*[Oo]verrid")
                self._register_kernels(library)
            Interception._was_installed = True
        self._bracket_coalescing()
        self.method_calls.install()
        self._futures.install()

    def uninstall(self) -> None:
        self._futures.uninstall()
        self.method_calls.uninstall()
        for library in self._libraries:
            library._destroy()
        self._libraries.clear()
        self._coalescing.restore()
        Interception._installed = None

    def _register_kernels(self, library: torch.library.Library) -> None:
        for name, kernel in kernels(self._observers).items():
            library.impl(name, uncompiled(kernel), "BackendSelect", with_keyset=True, allow_override=True)

    def _bracket_coalescing(self) -> None:
        observers = self._observers

        def observer_of(device: Any) -> Observer | None:
            return observers.get(torch.device(device).type.upper())

        def start(original: Callable[..., Any]) -> Callable[..., Any]:
            def _start_coalescing(group: ProcessGroup, device: Any) -> None:
                original(group, device)  # before we believe it: not every backend can
                observer = observer_of(device)
                if observer is not None:
                    observer.coalescing_started(group)

            return _start_coalescing

        def end(original: Callable[..., Any]) -> Callable[..., Any]:
            def _end_coalescing(group: ProcessGroup, device: Any) -> Any:
                observer = observer_of(device)
                if observer is None:
                    return original(group, device)
                return observer.coalescing_ended(group, lambda: original(group, device))

            return _end_coalescing

        self._coalescing.replace("_start_coalescing", start)
        self._coalescing.replace("_end_coalescing", end)
