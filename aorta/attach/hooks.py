"""Hooks in a process that does not know of aorta: they see optimizers, backward passes and the end.

sitecustomize calls `imported` when the program has imported torch. The hooks cost a few attribute tests
a step and load nothing; the recorder (aorta.attach.session) is imported at the first sign of training: a
process group and an optimizer, or a backward pass. So a process that only imports torch pays next to nothing.
"""

import atexit
import functools
import gc
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from time import monotonic_ns
from typing import Any

from aorta.attach.importlib_bootstrap import call_after, call_after_load, call_after_save, call_before
from aorta.attach.program import FSDP1_MODULE, FSDP_MODULE, ProgramNotes
from aorta.attach.settings import LAUNCHER, TRANSFORMERS, AttachSettings, read_settings, say

_serials = itertools.count()
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
attachment: "Attachment | None" = None
"""The hooks of this process, from its import of torch on."""


def imported(name: str, module: Any) -> None:
    """Attach, now that the program has imported one of the modules that sitecustomize waits for."""
    global attachment
    if attachment is None:
        attachment = Attachment(read_settings())
        os.register_at_fork(after_in_child=forked)
    attachment.imported(name, module)


def forked() -> None:
    """Attach to a forked child of a process that imported torch and does not train: the child may."""
    if attachment is not None and attachment.session is None:
        attachment.pid = os.getpid()


def end_by_interrupt() -> None:
    """Let the process end by SIGINT where Ctrl-C ended the program: Python forgets that at the next exec of a
    text, as of a dataclass, and would exit with 1. One that raises KeyboardInterrupt reminds it."""
    if isinstance(getattr(sys, "last_value", None), KeyboardInterrupt):
        with suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")  # noqa: S102


def guarded(hook: Callable[..., None]) -> Callable[..., None]:
    """Return the hook as one that never raises: if it fails, aorta prints one line and detaches."""

    @functools.wraps(hook)
    def call(self: "Attachment", *args: Any) -> None:
        if self.is_on and os.getpid() == self.pid:
            try:
                hook(self, *args)
            except Exception as error:
                self.take_off(f"{type(error).__name__}: {error}")

    return call


def without_frames_of_aorta(error: BaseException) -> Any:
    """The traceback of an exception, and of those behind it, as it would be without aorta: what is recorded
    is called through it."""
    ours = tuple(os.path.join(_PACKAGE, name, "") for name in ("attach", "record"))
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        kept, frame = [], following.__traceback__
        while frame is not None:
            if not frame.tb_frame.f_code.co_filename.startswith(ours):
                kept.append(frame)
            frame = frame.tb_next
        for one, after in zip(kept, [*kept[1:], None], strict=True):
            one.tb_next = after
        following.__traceback__ = kept[0] if kept else following.__traceback__
        following = following.__cause__ or following.__context__
    return error.__traceback__


class CompiledCall:
    """The place where code that torch.compile made of an optimizer's step leaves that optimizer.

    Hooks do not run in compiled code. What a hook assigns while it is traced is a side effect, which every
    call of the compiled code repeats: nothing else of the hook is left there, and no guard is added.
    """

    optimizer: Any = None


class Attachment:
    """The hooks of one process, and the session once it trains."""

    def __init__(self, settings: AttachSettings) -> None:
        self.settings = settings
        self.is_on = True
        self.pid = os.getpid()
        self.session: Any = None
        self.torch: Any = None
        self.program = ProgramNotes()
        self._restore: list[tuple[Any, str, Any, Any]] = []
        """Replacements: object, attribute, the original, ours."""
        self._handles: list[Any] = []
        self._optimizer_hooks: Any = None
        self._steppers: dict[int, Callable[[], Any]] = {}
        """Of the outermost object whose step() calls the optimizer with this id, a weak reference; of itself
        where there is none. When one of them is gone, its id is taken out everywhere: another may get it."""
        self._serials: dict[int, int] = {}
        """Numbers of these by their ids, as the session knows them; none is given twice."""
        self._alive: dict[int, Any] = {}
        """References that tell when they are gone."""
        self._wrapped: set[int] = set()
        """Ids of objects whose calls of step() are seen whole."""
        self._patched: set[int] = set()
        """Ids of the classes, or objects, whose step() was replaced for that."""
        self._alone: dict[int, tuple[Callable[[], Any], Callable[[], Any]]] = {}
        """References to these objects and their replacements, which hold each other, by the objects' ids."""
        self._loops: set[int] = set()
        """Ids of objects whose step() turned out to hold a whole loop."""
        self._depth = 0
        """Wrapped calls of step() that are running, one within another."""
        self._inner_ended = False
        """The outermost of them has updated parameters."""
        self._inner_seen: set[int] = set()
        """Ids of the optimizers that were called within it."""
        self._last_stepper = 0
        """Its id: what the program lets go of must be free."""
        self._regular: dict[int, int] = {}
        """Number of the last calls in a row that updated parameters, by the id of an outer object."""
        self._behind = False
        """A backward pass has begun since the last call of an optimizer."""
        self.backward_thread: int | None = None
        """The thread that waits for a backward pass, while there is one."""
        self._may_start = threading.Lock()
        """Taken by the first thread that trains."""
        self.entered_ns = 0
        """When the program came to the hook that may end or begin a step; monotonic."""
        self._has_optimizer = False
        self._uncalled: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers of the program that were not called yet."""
        self._has_uncalled = False
        """False: there is none, which takes longer to ask the set."""
        self._knows_position = False
        """Training has begun, and it was asked where it stands."""
        self._loaded: Any = None
        """What was loaded before training began (aorta.attach.position.Loaded)."""
        self._compiled_call = CompiledCall()
        self._compiled: set[int] = set()
        """Ids of optimizers that were called by compiled code."""
        self._in_graph: weakref.WeakKeyDictionary[Any, list[tuple[Any, bool]]] = weakref.WeakKeyDictionary()
        """By CUDA graph, who steps in it, and whether behind a backward pass."""
        self._captured: Any = None
        """The graph that is being captured."""
        self._optimizer_device: Any = None
        self.pending_targets = [] if settings.step_at is None else [settings.step_at]

    # -- installing ----------------------------------------------------------------------------

    @guarded
    def imported(self, name: str, module: Any) -> None:
        if name == "torch":
            self._install(module)
        elif name == "torch.distributed.distributed_c10d":
            self._watch_distributed(module)
        elif name == "torch.distributed.optim.optimizer":
            self._watch_remote_optimizer(module)
        elif name == LAUNCHER:
            self._watch_launcher(module)
        elif name == TRANSFORMERS:
            self._watch_evaluation(module.PreTrainedModel)
        elif name == FSDP_MODULE:
            self._call_after(module.FSDPParamGroup, "__init__", lambda args: self._made("unit", args[0]))
        elif name == FSDP1_MODULE:
            wrapper = module.FullyShardedDataParallel
            self._call_after(wrapper, "__init__", lambda args: self._made("flat_unit", args[0]))
        if self.pending_targets:
            self._look_for_target(name)

    def _install(self, torch: Any) -> None:
        """Put all hooks on: torch was imported just now, so nothing of it has run yet."""
        self.torch = torch
        from torch.optim import optimizer

        replaced = _replaced()
        finders = (one.find_spec for one in sys.meta_path if type(one).__name__ == "TorchFinder")
        for function in (
            *(Attachment._trains, Attachment._is_elsewhere, Attachment.training_thread),
            *(Attachment._enter, Attachment._leave, _is_accumulation_boundary, *finders),
            Attachment._forget,  # Python calls it amid compiled code, too
        ):
            replaced.left_uncompiled(function)  # of the first, the code of all that are guarded

        from aorta.record.interception import optimizer_hooks

        self._optimizer_hooks = optimizer_hooks.attached = optimizer_hooks.AttachedHooks()
        self._handles = [
            optimizer.register_optimizer_step_pre_hook(replaced.unless_compiling(self._optimizer_called)),
            optimizer.register_optimizer_step_post_hook(self._post_step()),
        ]
        # Marked alike, so that neither is traced where somebody compiles an optimizer's step.
        self._call_after(torch.optim.Optimizer, "__init__", lambda args: self._optimizer_made(args[0]))
        self._call_before(torch.optim.Optimizer, "load_state_dict", lambda args: self._state_loaded())
        self._call_before(torch.nn.Module, "load_state_dict", lambda args: self._state_loaded())
        self._watch_files(torch)
        self._watch_evaluation(torch.nn.Module)
        from torch.utils.data import dataloader

        self._call_after(dataloader.DataLoader, "__init__", lambda args: self._loader_made(args[0]))
        replica = torch.nn.parallel.DistributedDataParallel
        self._call_after(replica, "__init__", lambda args: self._made("ddp", args[0]))
        iterator = dataloader._BaseDataLoaderIter
        self._call_before(iterator, "__next__", lambda args: self._data_requested(args[0]))
        self._watch_backward(torch)
        self._watch_scaler(torch)
        distributed = sys.modules.get("torch.distributed.distributed_c10d")
        if distributed is not None and not self._watches(distributed):
            self._watch_distributed(distributed)
        atexit.register(self._process_ends)
        self._watch_failures()
        self._watch_exit()

    def _watches(self, owner: Any) -> bool:
        return any(patched is owner for patched, *_ in self._restore)

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        self._restore.append((owner, name, getattr(owner, name), replacement))
        setattr(owner, name, replacement)

    def _call_after(self, owner: Any, name: str, hook: Callable[[tuple[Any, ...]], None]) -> None:
        call = call_after(getattr(owner, name), _replaced().unless_compiling(hook))
        self._replace(owner, name, _replaced().left_uncompiled(call, with_called=False))

    def _call_before(self, owner: Any, name: str, hook: Callable[[tuple[Any, ...]], None]) -> None:
        call = call_before(getattr(owner, name), _replaced().unless_compiling(hook))
        self._replace(owner, name, _replaced().left_uncompiled(call, with_called=False))

    def _watch_evaluation(self, model: Any) -> None:
        if "eval" in vars(model):
            self._call_before(model, "eval", lambda args: self._evaluation_begins(args[0]))

    def _watch_backward(self, torch: Any) -> None:
        """See the end of each backward pass. torch.autograd and .graph both call the engine by this name."""
        original = torch.autograd.graph._engine_run_backward

        @functools.wraps(original)
        def run_backward(*args: Any, **named: Any) -> Any:
            if self.session is None:
                self._trains()
            if self._is_elsewhere():
                return original(*args, **named)
            if self._compiled_call.optimizer is not None:
                self._compiled_step_ended()
            if self.session is not None and self.session.model_calls is not None:
                self._backward_begins(bool(named.get("accumulate_grad")), *args[:5])
            if not self._knows_position:
                self._training_begins()
            is_outermost = self.backward_thread != self.training_thread()
            if is_outermost:
                self.backward_thread = threading.get_ident()
                self._behind = True  # now, since hooks of the pass may call optimizers
            try:
                result = original(*args, **named)
            finally:
                if is_outermost:
                    self.backward_thread = None
            if self.session is not None:
                self._backward_ended(result)
            return result

        _replaced().left_uncompiled(run_backward, with_called=False)
        for module in (torch.autograd, torch.autograd.graph):
            if getattr(module, "_engine_run_backward", None) is original:
                self._replace(module, "_engine_run_backward", run_backward)

    def _watch_files(self, torch: Any) -> None:
        """See which files the program saves and loads, and at which step."""
        storages = (torch.UntypedStorage, torch.TypedStorage)
        save = call_after_save(torch.save, self._file_saved, storages)
        load = call_after_load(torch.load, self._file_loaded, storages)
        for module in (torch, torch.serialization):
            self._replace(module, "save", _replaced().uncompiled(save, with_called=False))
            self._replace(module, "load", _replaced().uncompiled(load, with_called=False))

    def _watch_scaler(self, torch: Any) -> None:
        """Take a scaler's own call as the step: where it finds infinite gradients, it calls no optimizer."""
        self._call_is_step(torch.amp.GradScaler, optimizer_at=1)

    def _watch_remote_optimizer(self, module: Any) -> None:
        """Take a call of RPC's optimizer as the step: its inner optimizers are compiled, or run in other
        processes, and C++ runs its backward passes."""
        kind = module.DistributedOptimizer
        self._call_after(kind, "__init__", lambda _: self._trains())
        self._call_is_step(kind, optimizer_at=0)

    def _call_is_step(self, kind: type, optimizer_at: int) -> None:
        """Count calls of this class's step() as steps, whatever they do inside. optimizer_at: place of the
        optimizer among its arguments."""
        original = kind.step  # type: ignore[attr-defined]

        @functools.wraps(original)
        def step(*args: Any, **named: Any) -> Any:
            optimizer = args[optimizer_at] if len(args) > optimizer_at else named.get("optimizer")
            self._enter()
            completed = False
            try:
                result = original(*args, **named)
                completed = True
                return result
            finally:
                self._leave(optimizer, completed, True)

        # Torch does not compile its own one either.
        self._replace(kind, "step", _replaced().uncompiled(step, with_called=False))

    def _watch_distributed(self, module: Any) -> None:
        original_init, original = module.init_process_group, module.destroy_process_group
        self._call_after(module, "init_process_group", lambda args: self._group_made())

        @functools.wraps(original)
        def destroy_process_group(group: Any = None, *args: Any, **named: Any) -> Any:
            if group is None or group is module.GroupMember.WORLD:
                self._process_ends()
            return original(group, *args, **named)

        self._replace(module, "destroy_process_group", destroy_process_group)
        package = sys.modules.get("torch.distributed")  # has the names too, if it is imported already
        for name, function in (("init_process_group", original_init), ("destroy_process_group", original)):
            if package is not None and vars(package).get(name) is function:
                self._replace(package, name, getattr(module, name))

    def _watch_launcher(self, module: Any) -> None:
        """See in torchrun's agent how each of its processes failed: no rank can tell that of itself."""
        context, failure = getattr(module, "PContext", None), getattr(module, "ProcessFailure", None)
        if not all(map(hasattr, (context, context, failure), ("start", "close", "__post_init__"))):
            return  # a torch whose agent is made otherwise: a rank must not lose its records for that
        self._call_after(module.ProcessFailure, "__post_init__", lambda args: self._process_failed(args[0]))
        self._call_before(module.PContext, "start", lambda args: self._launcher_starts())
        self._call_before(module.PContext, "close", lambda args: self._launcher_closes(args[0]))

    @guarded
    def _process_failed(self, failure: Any) -> None:
        from aorta.attach.launches import note_failure

        note_failure(failure, sys._getframe(1))

    @guarded
    def _launcher_starts(self) -> None:
        from aorta.attach.launches import log

        log.goes_on()

    @guarded
    def _launcher_closes(self, context: Any) -> None:
        from aorta.attach.launches import closing

        closing.add(context)

    def _watch_failures(self) -> None:
        original = sys.excepthook

        def excepthook(kind: Any, error: Any, traceback: Any) -> None:
            with suppress(Exception):  # what a program hands over may be anything
                if error is not None and traceback is error.__traceback__:
                    traceback = without_frames_of_aorta(error)
            original(kind, error, traceback)

        self._replace(sys, "excepthook", excepthook)

    def _watch_exit(self) -> None:
        """See os._exit(0) of the main thread, where no exit handler runs.

        Other statuses and threads are left alone: a watchdog ends what hangs, and closing would hang too.
        """
        original = os._exit

        @functools.wraps(original)
        def exit_at_once(status: int) -> Any:
            if status == 0 and threading.current_thread() is threading.main_thread():
                self._process_ends()
            return original(status)

        self._replace(os, "_exit", exit_at_once)

    # -- what the hooks see --------------------------------------------------------------------

    def _made(self, what: str, made: Any) -> None:
        """Describe a loader, a wrapper or an optimizer; where that fails, it has no description."""
        if self.is_on and os.getpid() == self.pid:
            with suppress(Exception):
                getattr(self.program, f"{what}_made")(made)

    def _loader_made(self, loader: Any) -> None:
        """Describe it, and have its workers sampled: those of a first epoch start before training."""
        self._made("loader", loader)
        if (
            self.is_on
            and os.getpid() == self.pid
            and getattr(loader, "num_workers", None)
            and self.settings.stacks
        ):
            with suppress(Exception):  # workers go unsampled then
                from aorta.record.loader_workers import replacements

                for one in replacements():
                    self._replace(*one)

    @guarded
    def _optimizer_made(self, optimizer: Any) -> None:
        self._made("optimizer", optimizer)
        self._has_optimizer = True
        self._uncalled.add(optimizer)
        self._has_uncalled = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._optimizer_device = parameter.device
                break
        self._maybe_start()

    @property
    def num_uncalled(self) -> int:
        """Number of the program's optimizers that were not called yet."""
        return len(self._uncalled) if self._has_uncalled else 0

    @guarded
    def _group_made(self) -> None:
        if self.pending_targets:
            self._look_for_target()
        self._maybe_start()

    @guarded
    def _trains(self) -> None:
        self._start()

    def _maybe_start(self) -> None:
        """Start the session once there are both a process group and an optimizer."""
        distributed = sys.modules.get("torch.distributed.distributed_c10d")
        if self._has_optimizer and distributed is not None and distributed.is_initialized():
            self._start()

    def _start(self) -> None:
        """Begin to record, unless it has begun: the process trains. Only now is the recorder imported."""
        if self.session is None and self._may_start.acquire(blocking=False):
            collects = gc.isenabled()
            gc.disable()  # loading would set off a full collection, which goes through all of torch: 80 ms
            try:
                from aorta.attach.session import AttachedSession
                from aorta.device.backend import accelerator, backend_of
            finally:
                if collects:
                    gc.enable()
            self._watch_graphs(accelerator().graph_type)
            if self.pending_targets:
                self._look_for_target()
            device = self._optimizer_device
            if device is not None and not backend_of(device).is_device:
                device = (
                    None  # parameters on the CPU, or of no device yet: the recorder looks at the first step
                )
            session = AttachedSession(self, device)
            session.start()
            self.session = session  # not before: other threads may train, too
            # Exit handlers run from the last one: the session's end comes before that of its recorder.
            atexit.unregister(self._process_ends)
            atexit.register(self._process_ends)

    @guarded
    def _state_loaded(self) -> None:
        self._loads().anything = True

    @guarded
    def _file_loaded(self, file: Any) -> None:
        if not self._knows_position:
            self._loads().add_file(file)

    @guarded
    def _file_saved(self, file: Any) -> None:
        if self.session is not None and self._knows_position:
            self.session.file_saved(file)

    def _loads(self) -> Any:
        from aorta.attach.position import Loaded

        if self._loaded is None:
            self._loaded = Loaded()
        return self._loaded

    @guarded
    def _training_begins(self) -> None:
        """Ask at the first backward pass where training stands: what was saved has been loaded by now."""
        self._knows_position = True
        for target in self.pending_targets:
            say(f"--step-at {target} is not there as training begins: no step is recorded until it is")
        if self.session is not None:
            self.session.training_begins(list(self._uncalled), self._loads())

    @guarded
    def _backward_begins(
        self,
        adds: bool,
        roots: Any,
        given: Any = (),
        keeps_graph: bool = False,
        makes_graph: bool = False,
        inputs: Any = (),
    ) -> None:
        self.session.model_calls.backward_begins(roots, adds, given, makes_graph, inputs)

    @guarded
    def _backward_ended(self, results: Any) -> None:
        self.session.backward_ended()
        if self.session.model_calls is not None:
            self.session.model_calls.backward_ended(results)

    @guarded
    def _evaluation_begins(self, module: Any) -> None:
        if self._compiled_call.optimizer is not None and self._is_the_loops_thread():
            self._compiled_step_ended()
        if self.session is not None and module.training:
            self.session.evaluation_begins(id(module))

    @guarded
    def _data_requested(self, iterator: Any) -> None:
        self.entered_ns = monotonic_ns()
        if self._compiled_call.optimizer is not None and self._is_the_loops_thread():
            self._compiled_step_ended()
        with suppress(Exception):
            self.program.batch_requested(iterator)
        if self.session is not None:
            self.session.data_requested(id(iterator._dataset))

    def _optimizer_called(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Look once who calls the optimizer, before its step()."""
        for hook in self._optimizer_hooks.before:
            hook(optimizer, args, kwargs)
        if self._depth == 0 and id(optimizer) not in self._steppers:
            self._find_stepper(optimizer)

    def _post_step(self) -> Callable[..., None]:
        """Return the hook after an optimizer's step(); see CompiledCall for what it does while traced."""
        is_compiling = self.torch.compiler.is_compiling
        compiled_call = self._compiled_call

        def post(optimizer: Any, args: Any, kwargs: Any) -> None:
            if is_compiling():
                compiled_call.optimizer = optimizer  # traced: done by each call of the compiled code
            else:
                for hook in self._optimizer_hooks.after:
                    hook(optimizer, args, kwargs)
                self.entered_ns = monotonic_ns()
                self._inner_step_ended(optimizer)

        _replaced().left_uncompiled(post)
        return post

    def training_thread(self) -> int:
        """The calling thread, or on one of autograd's own the one that called backward."""
        thread = threading.get_ident()
        if self.backward_thread in (None, thread):
            return thread
        known = threading._active.get(thread)  # type: ignore[attr-defined]
        return self.backward_thread if known is None or isinstance(known, threading._DummyThread) else thread

    def _is_elsewhere(self, stepper: Any = None) -> bool:
        """A thread beside the loop's trains something: nothing of that is part of the loop's iterations."""
        if self.session is None:
            return False
        thread = self.session.thread
        is_elsewhere: bool = self.session.is_elsewhere(stepper)
        if self.session.thread != thread:
            self._behind = True  # the pass ran in a thread that was not known to be one of the loop's
        return is_elsewhere

    def _is_the_loops_thread(self) -> bool:
        return self.session is not None and self.session.thread == threading.get_ident()

    @guarded
    def _compiled_step_ended(self) -> None:
        """Note the call of an optimizer by compiled code, at the first event after it that a hook sees."""
        optimizer, self._compiled_call.optimizer = self._compiled_call.optimizer, None
        self._compiled.add(id(optimizer))
        if self._depth == 0:
            self._ended(optimizer)
        else:
            self._inner_ended = True

    @guarded
    def _inner_step_ended(self, optimizer: Any) -> None:
        """Note the end of a torch.optim optimizer's own step(), maybe within a wrapped one."""
        if self._has_uncalled:
            self._called(optimizer)
        stepper = self._stepper_of(optimizer)
        if self._is_elsewhere(stepper):
            return
        if self._compiled_call.optimizer is not None:
            self._compiled_step_ended()
        if self._depth == 0:
            wrapped = id(stepper) in self._wrapped
            if wrapped and id(stepper) == self._last_stepper and not self._behind:
                self.session.last_call_goes_on()  # the first call of what is wrapped from now on
            else:
                self._ended(stepper)
            return
        if self._behind and id(optimizer) in self._inner_seen:
            self._whole_loop_inside(optimizer)
        self._inner_ended = True
        self._inner_seen.add(id(optimizer))

    def _called(self, optimizer: Any) -> None:
        self._uncalled.discard(optimizer)
        self._has_uncalled = len(self._uncalled) > 0

    def _ended(self, stepper: Any) -> None:
        """Tell the session that a call has ended of an optimizer, or of the object that steps it."""
        if self._has_uncalled and isinstance(stepper, self.torch.optim.Optimizer):
            self._called(stepper)
        behind, self._behind = self._behind, False
        if self._captured is not None:
            self._in_graph.setdefault(self._captured, []).append((stepper, behind))
        self._last_stepper = id(stepper)
        if self.session is None:
            self._start()
        if self.session is not None:  # else another thread is about to start it
            self.session.optimizer_ended(stepper, behind)

    def _watch_graphs(self, graph_type: Any | None) -> None:
        """Watch graphs of the device, which are captured behind steps that warm up: the recorder is on."""
        if graph_type is not None:
            self._call_after(graph_type, "capture_begin", lambda args: self._captures(args[0]))
            self._call_before(graph_type, "capture_end", lambda args: self._captures(None))
            self._call_after(
                graph_type, "replay", lambda args: self._replayed(args[0]) if self._in_graph else None
            )

    @guarded
    def _captures(self, graph: Any | None) -> None:
        """Note which CUDA graph is captured from now on; None: none is."""
        self._captured = graph
        if graph is not None:
            self._in_graph.pop(graph, None)

    @guarded
    def _replayed(self, graph: Any) -> None:
        """Note the calls of optimizers that a CUDA graph repeats, which no hook sees."""
        for stepper, behind in self._in_graph.get(graph, ()):
            if not self._is_elsewhere(stepper):
                self.entered_ns, self._behind = monotonic_ns(), behind
                self._ended(stepper)

    # -- wrapped steps -------------------------------------------------------------------------

    @guarded
    def _find_stepper(self, optimizer: Any) -> None:
        """Find and wrap the outermost caller named step() that looks like an optimizer or an engine: work
        that it does after the inner optimizer (gathers of ZeRO, scalers) belongs to the step."""
        stepper: Any = optimizer
        frame: Any = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code.co_name == "step" and code.co_argcount > 0:
                owner = frame.f_locals.get(code.co_varnames[0])
                if owner is not optimizer and id(owner) not in self._loops and _steps_optimizers(owner):
                    stepper = owner
            frame = frame.f_back
        self._know(stepper)
        self.key_of(optimizer)
        self._steppers[id(optimizer)] = _reference(stepper)
        if stepper is not optimizer:
            self._wrap(stepper)

    def _stepper_of(self, optimizer: Any) -> Any:
        held = self._steppers.get(id(optimizer))
        stepper = None if held is None else held()
        return optimizer if stepper is None else stepper

    def key_of(self, stepper: Any) -> int:
        """What tells it from those that were at its address before, where it is an optimizer or steps one."""
        key = self._serials.get(id(stepper))
        if key is None and isinstance(stepper, self.torch.optim.Optimizer):
            key = self._know(stepper)
        return id(stepper) if key is None else key

    def _know(self, stepper: Any) -> int:
        key = id(stepper)
        if key not in self._serials:
            with suppress(TypeError):  # it can have no weak reference, and is not let go of
                self._alive[key] = weakref.ref(stepper, functools.partial(self._forget, key))
            self._serials[key] = next(_serials)
        return self._serials[key]

    def _forget(self, key: int, _: Any) -> None:
        for known in (self._steppers, self._serials, self._alive, self._regular, self._alone):
            known.pop(key, None)
        for ids in (self._wrapped, self._patched, self._loops, self._inner_seen, self._compiled):
            ids.discard(key)

    def _wrap(self, stepper: Any) -> None:
        """Replace stepper.step(), so that its calls are seen whole from the next one on."""
        if "step" in vars(stepper):  # a scheduler put a wrapper of its own there
            owner: Any = stepper
        else:
            owner = next(cls for cls in type(stepper).__mro__ if "step" in vars(cls))
        self._wrapped.add(id(stepper))
        if id(owner) in self._patched:
            return
        self._patched.add(id(owner))
        original = getattr(owner, "step")  # noqa: B009
        alone = None if isinstance(owner, type) else stepper
        attachment, is_compiling = self, self.torch.compiler.is_compiling

        @functools.wraps(original)
        def step(*args: Any, **named: Any) -> Any:
            if is_compiling():
                return original(*args, **named)
            called = args[0] if alone is None else alone
            attachment._enter()
            boundary = _is_accumulation_boundary(called)
            completed = False
            try:
                result = original(*args, **named)
                completed = True
                return result
            finally:
                attachment._leave(called, completed, boundary)

        _replaced().left_uncompiled(step, with_called=False)
        if alone is None:
            self._replace(owner, "step", step)
        else:
            alone.step = step
            self._alone[id(alone)] = _reference(alone), weakref.ref(step)

    def _enter(self) -> None:
        if self._depth == 0:
            self._inner_ended = False
            self._inner_seen.clear()
        self._depth += 1

    def _leave(self, stepper: Any, completed: bool, updates: bool | None) -> None:
        """updates: True if the call updates parameters whatever was seen inside; None: not known."""
        self.entered_ns = monotonic_ns()
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._outer_step_ended(stepper, completed, updates)
        elif updates:
            self._inner_ended = True

    @guarded
    def _outer_step_ended(self, stepper: Any, completed: bool, updates: bool | None) -> None:
        key = id(stepper)
        if not completed or key in self._loops:
            return
        num_regular = self._regular.get(key, 0)
        # A call that always updated parameters and now did not: it skipped infinite gradients.
        skipped = not self._inner_ended and self._behind and num_regular >= 3
        if updates is None or not updates:
            self._regular[key] = num_regular + 1 if self._inner_ended or skipped else -(10**6)
        if self._inner_ended or skipped or updates:
            self._ended(self._stepper_of(stepper))

    def _whole_loop_inside(self, optimizer: Any) -> None:
        """Stop taking the outer step() as a step: it holds iterations, so the optimizer's calls count."""
        if id(optimizer) in self._steppers:
            self._loops.add(id(self._stepper_of(optimizer)))
            self._steppers[id(optimizer)] = _reference(optimizer)
        self._depth = 0

    # -- --step-at -----------------------------------------------------------------------------

    def _look_for_target(self, imported: str = "") -> None:
        """Replace the function that --step-at names, once its module is imported: `imported` just now was.

        What is half imported is left alone: it goes on to use its own functions, and torch to describe them.
        """
        for target in list(self.pending_targets):
            module_name, _, path = target.partition(":")
            owner: Any = sys.modules.get(module_name)
            if module_name != imported and getattr(getattr(owner, "__spec__", None), "_initializing", False):
                continue
            *parents, name = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent, None)
            function = getattr(owner, name, None)
            if callable(function):
                self.pending_targets.remove(target)
                self._replace(owner, name, self._as_step(function))

    def _as_step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def step(*args: Any, **named: Any) -> Any:
            self._step_begins()
            result = function(*args, **named)
            self._step_ends()
            return result

        return step

    @guarded
    def _step_begins(self) -> None:
        self._start()
        if self.session is not None:
            self.session.step_begins()

    @guarded
    def _step_ends(self) -> None:
        if self.session is not None:
            self.session.step_ends()

    # -- the end -------------------------------------------------------------------------------

    def _process_ends(self) -> None:
        if self.session is not None and self.is_on and os.getpid() == self.pid:
            try:
                if self._compiled_call.optimizer is not None:
                    self._compiled_step_ended()
                self.session.finish()
            except Exception as error:
                say(f"{type(error).__name__}: {error}; the last records may be missing")
            self.detach()
            end_by_interrupt()

    def take_off(self, reason: str | None) -> None:
        """Leave the program alone from now on. reason: printed in one line; None: nothing is printed."""
        if reason is not None:
            say(f"{reason}; recording ends here, the program goes on")
        session = self.session
        self.detach()
        if session is not None:
            try:
                session.abandon(reason)
            except Exception as error:
                say(f"{type(error).__name__}: {error}")

    def detach(self) -> None:
        """Take every hook off."""
        self.is_on = False
        compiles = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
        if self._handles and not compiles and not self._optimizer_hooks.before:
            from aorta.record.interception import optimizer_hooks

            for handle in self._handles:  # else they stay: compiled code counts them, recorders use them
                handle.remove()
            self._handles.clear()
            optimizer_hooks.attached = None
        for owner, name, original, replacement in reversed(self._restore):
            if vars(owner).get(name) is replacement:  # else somebody wrapped it again: ours passes calls on
                setattr(owner, name, original)
        self._restore.clear()
        for held in [*self._alone.values()]:
            owner, ours = (one() for one in held)
            if owner is not None and ours is not None and vars(owner).get("step") is ours:
                owner.step = ours.__wrapped__
        self._alone.clear()

    @property
    def has_compiled(self) -> bool:
        """True: compiled code has called an optimizer, which its name says."""
        return bool(self._compiled)

    def stepper_name(self, stepper: Any) -> str:
        """Return its name for run.json."""
        name = f"{type(stepper).__module__}.{type(stepper).__qualname__}.step"
        is_compiled = id(stepper) in self._compiled
        return f"{name} (compiled: up to the next batch or backward pass)" if is_compiled else name


def _replaced() -> Any:
    from aorta.record.interception import replaced  # which imports torch

    return replaced


def _reference(one: Any) -> Callable[[], Any]:
    """A weak one, where it can have some."""
    try:
        return weakref.ref(one)
    except TypeError:
        return lambda: one


def _steps_optimizers(owner: Any) -> bool:
    """True for an object that looks like an optimizer, an engine or a trainer, by its attributes."""
    if not callable(getattr(owner, "step", None)) or isinstance(owner, type):
        return False
    return any(hasattr(owner, name) for name in ("param_groups", "zero_grad", "optimizer", "optimizers"))


def _is_accumulation_boundary(stepper: Any) -> bool | None:
    """Ask DeepSpeed's engine whether the call that begins updates parameters; None for anything else."""
    boundary_test = getattr(stepper, "is_gradient_accumulation_boundary", None)
    try:
        return None if boundary_test is None else bool(boundary_test())
    except Exception:
        return None
