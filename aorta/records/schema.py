"""The record schema: StepRecord, one line per rank, global step and source; and RunRecord, run.json.

docs/record.md describes the record for its readers, and what they may rely on.

Times ending in `_ms` are relative to the start of the step's window, `_unix_ns` are
integers on the Unix clock. A number that was not measured is None, and `not_measured`
says why under the number's dotted name.

The structs hold no cycles and are made by the hundred beside a training loop, so the garbage
collector need not look at them (gc=False).
"""

from typing import Annotated, Any, Literal, get_args

import msgspec

from aorta.records.stacks import StackFrame
from aorta.timeline.types import OverlapRecord, Segment, Source, StreamUse

SCHEMA_VERSION = 3
READABLE_VERSIONS = frozenset((1, 2, 3))
"""Schema 1 had no run id, no attempt and no seal (number and checksum) at the end of a line. Schema 2
recorded every step, and wrote null where schema 3 leaves a key out."""

DeviceKind = Literal["cuda", "hip", "cpu"]
"""`kind` of each of RunRecord.devices."""
GPU_KINDS = ("cuda", "hip")


HostKind = Literal[
    "data", "backward", "optimizer", "checkpoint", "garbage_collection", "synchronisation", "pause", "step"
]
"""data: the next batch of a DataLoader. optimizer: Optimizer.step. checkpoint: a save of torch's.
garbage_collection: full collections of Python. synchronisation: the host waits for the device, as in
Tensor.item. pause: announced by recorder.pausing. step: the window as the host went through it, in lines
timed on a device; it begins before 0 where the host runs ahead."""
HOST_KINDS: tuple[HostKind, ...] = get_args(HostKind)


KERNEL_CLASSES = (
    "gemm", "attention", "normalization", "optimizer", "elementwise", "copy", "communication", "other",
)  # fmt: skip
"""Classes of kernels (aorta.traces.classify), in the order of packed lines: a new one goes to the end."""


class HostUse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Time on the host's cores that the thread that trains had in a step's window, and its process."""

    cpu_ms: float
    """CPU time of the thread."""
    ready_ms: float | None
    """Time ready to run while others had the cores. None: the system does not count it."""
    process_ms: float | None = None
    """CPU time of all threads of the process; not of others that it started. None: not
    read, in steps under 10 ms that the overhead left out and by earlier versions."""
    faults: int | None = None
    """Pages that the system gave the thread without reading a file (minor faults). None: not read, on
    systems other than Linux, in steps that the overhead left out, and by earlier versions."""
    system_ms: float | None = None
    """Of `cpu_ms`, in the system; None as of `faults`."""


Phase = Literal["data", "forward", "backward", "optimizer"]
"""Phase of the program at a collective's launch. optimizer: all that follows the last backward pass."""

StepPhase = Literal["data", "forward", "backward", "optimizer", "logging", "evaluation", "checkpoint", "rest"]
"""Phases of a step's window, which readers work out from host_spans (aorta.account.load.rank.phases).
logging: callbacks and logs behind an update. rest: in none of the others."""

PositionSource = Literal["checkpoint", "optimizer", "weights", "program"]
"""What told where an attempt goes on. checkpoint: a file that an earlier attempt saved, at a step that was
noted. optimizer: `step` in its state. weights: parameters with which an earlier attempt began. program: it
gives the number itself, or begins the run."""


class HostSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something that the program did on the host; after the body's end it lies between two steps."""

    kind: HostKind
    start_ms: float
    end_ms: float
    where: str = ""
    """The optimizer and its flags; or the call and place in the program that waits for the device."""
    bytes: int | None = None
    """Size of the parameters that an optimizer updates on this rank."""


class CollectiveMember(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One call of a coalesced group."""

    op: str
    bytes: int
    dtype: str
    peer: int | None = None


StartBy = Literal["stream", "launch", "previous", "library"]
"""The last thing that a collective waited for. stream: the work queued before it. launch: the host, which
found the queue empty. previous: the last call of its group, whose communicator runs one at a time.
library: in older records, the collective library's own."""


class CollectiveRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One call of a collective on this rank."""

    op: str
    """Operation as in torch.distributed: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast,
    ..."""
    stream: str
    """Stream it ran on: the name of aorta's stream (dedicated), 'compute', 'group' (the process
    group's own stream), 'side' (another stream of the program), 'host' (CPU)."""
    group: str
    ranks: list[int]
    bytes: int | None
    """The larger of the input and the output of this rank, as nccl-tests counts (all_gather:
    gathered, reduce_scatter: unscattered). None where a trace does not tell."""
    dtype: str
    seq: int
    """Counts this rank's collectives of the group, from 0. A coalesced group counts once."""
    is_async: bool = msgspec.field(name="async", default=False)
    launch_ms: float | None = None
    """When the host had launched it. Much earlier than start_ms: the device is behind the host;
    at start_ms: the host is late."""
    start_ms: float | None
    start_by: StartBy | None = None
    """None where a source does not tell."""
    end_ms: float | None
    """Unclipped: may lie outside the window of the step that issued it."""
    algbw_gb_s: float | None
    busbw_gb_s: float | None
    exposed_ms: float | None = None
    """From kernel records: its time within the window in which no compute ran. Collectives that run at once
    each count it."""
    members: list[CollectiveMember] | None = None
    module: int | None = None
    """Index into the line's modules: what it is for. None where that is not certain."""
    phase: Phase | None = None


class CallSite(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A place that issues collectives of one operation, and what they move."""

    file: str
    """Path; of a library the name of its package."""
    line: int
    """0 of a library's."""
    function: str
    is_program: bool = True
    """False: a library's own, such as a signal check; then no line of the program is among its callers."""
    op: str
    moves: str
    """Gradients (by their largest tensors), parameters, buffers, an object, a metric, a value or a few."""
    num_calls: int
    """In all steps that were looked at."""
    bytes: int
    """Of these calls together."""


class CallSites(msgspec.Struct, frozen=True, kw_only=True):
    """rank_<n>_sites.json: who issues a rank's collectives, of the steps that were looked at."""

    num_steps: int
    sites: list[CallSite]
    run_id: str | None = None


class KernelSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One kernel; may reach outside the step's window."""

    start_ms: float
    duration_ms: float
    stream: int
    name: int
    """Index into the names in rank_<n>_kernels.json."""


class KernelSums(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Kernels in a step's window, by class and by name. Times are sums: concurrent kernels each count."""

    num_kernels: int
    num_graph_nodes: int = 0
    """Kernels and copies that were nodes of a CUDA graph."""
    classes: dict[str, tuple[float, int]]
    """(ms, number) by class of KERNEL_CLASSES; copies and sets count as copy."""
    top: list[tuple[int, float, int]] = []
    """(index into the names in rank_<n>_kernels.json, ms, number) of the kernels with most time."""
    copies: dict[str, float] = {}
    """ms of copies by what they are from and to (pageable_to_device), as far as the driver tells."""
    spans: list[KernelSpan] | None = None
    """Every kernel, sorted by start; kept in few steps."""


class KernelNames(msgspec.Struct, frozen=True, kw_only=True):
    """rank_<n>_kernels.json: names that lines of source `kernels` refer to by index."""

    names: list[str]
    run_id: str | None = None


class KernelCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank's collectives and its communication kernels fit together, over the run."""

    num_steps: int
    num_matched: int
    num_calls_without_kernel: int
    num_kernels_without_call: int
    num_graph_kernels_of_communication: int
    """Replayed by CUDA graphs: their calls were made once, at capture."""
    num_late: int
    """Records that came after the line of their step: its numbers lack them."""
    num_lost: int
    """Records that found the ring full."""
    num_dropped: int
    """Records that the driver had no room for."""
    num_no_time: int = 0
    """Records of kernels, copies and sets without times: no step's numbers have them."""
    num_unseen: int = 0
    """Steps among them whose collectives were learned in others (calls_learned)."""
    num_refuted: int = 0
    """Steps in which these did not fit: they have no list of collectives."""
    leftovers: list[str]
    """The first few of either side."""


class MemoryRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    """Since the process began."""
    num_alloc_retries: int | None = None
    """Since the process began: allocations that had to free the allocator's cache, and waited for that."""
    num_device_frees: int | None = None
    """Since the process began: segments that the allocator gave back to the driver, for such an allocation or
    because the program asked for it (empty_cache)."""
    forward_bytes: int | None = None
    """The most that was seen allocated before a backward pass: the peak where it rose there, else what was at
    the ends."""
    backward_bytes: int | None = None
    """The same in backward passes; optimizer_bytes: behind them, up to the end of the step's body."""
    optimizer_bytes: int | None = None


class DeviceRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The latest sample of the side thread; None where the device does not say."""

    sample_unix_ns: int
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttling: list[str] | None = None
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None
    """Memory of the device in use by all processes."""


_Number = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]


class Packed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Parts of a line without details, times in units of 0.1 µs (aorta.records.packed)."""

    kernels: list[_Number]
    """num_kernels, num_graph_nodes, then time and number of each of KERNEL_CLASSES. Empty: no records."""
    by_op: dict[str, tuple[_Number, _Number]]
    """hidden_by_op and exposed_by_op."""
    host_spans: list[list[_Number]]
    """By kind: from the window's start to the first, its length, from its end to the next, its length, ..."""
    optimizer_bytes: list[_Number | None]
    """Of each span of an optimizer."""


def _version() -> int:
    return SCHEMA_VERSION


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line: one step of one rank, as one source measured it."""

    schema: int = msgspec.field(default_factory=_version)  # a factory, so that every line has it
    rank: int
    world_size: int
    epoch: int
    step: int
    """Step within the epoch."""
    global_step: int
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens: int | None = None
    source: Source
    start_unix_ns: int
    clock_error_us: float | None
    """Half width of the interval in which start_unix_ns is known to lie."""
    step_ms: float | None
    """Length of the window: from this step's start to the next step's start (the last: to its end)."""
    between_steps_ms: float | None
    """The part of the window after the step body: data loading, logging, checkpoints."""
    host_ms: float | None
    """Host time of the step body."""
    streams: dict[str, StreamUse] = {}
    overlap: OverlapRecord
    active_segments: list[Segment] | None = None
    """None in steps whose details were left out: in long runs most."""
    collectives: list[CollectiveRecord] | None = None
    num_collectives: int
    exposed_run_lengths_ns: list[int] | None = None
    """From kernel records, whose segments are kept in few steps: where communication was exposed. Distance of
    the first stretch from the window's start, its length, distance to the next stretch, its length, ..."""
    kernels: KernelSums | None = None
    """From source `kernels`."""
    memory: MemoryRecord | None = None
    device: DeviceRecord | None = None
    modules: list[str] = []
    """Purposes of collectives: the module of a unit of fully_shard, a bucket of DDP with its parameters, the
    module that issued the call ("layers.3.mlp.down"), "optimizer: AdamW"."""
    host_spans: list[HostSpan] | None = None
    """Within the window; None in lines of versions that did not note them."""
    packed: Packed | None = None
    """Of these, in a line without details. Readers unpack it."""
    host_use: HostUse | None = None
    """None in lines of versions that did not note it, and where the step changed threads."""
    scalars: dict[str, float] = {}
    """Values that the program logged besides loss, lr and grad_norm."""
    run_id: str | None = None
    """None in lines of schema 1, and in records that belong to no run."""
    attempt: int = 0
    """Starts of the run before this one: restarts, changes of its number of ranks, requeues."""
    rollbacks: int = 0
    """How often this attempt had gone back to an earlier global step."""
    is_recorded: bool = msgspec.field(name="recorded", default=True)
    """False: a step that the overhead left out. It has its times by the host's clock, its host spans and what
    the program logged; the rest was not measured, and num_collectives is 0."""
    calls_learned: bool = False
    """True: the collectives were not seen one by one. They are those of steps in which they were: the number
    by group and the operations of the kernels agree. Sizes and modules are as of those steps."""
    instrument_ms: float | None = None
    """CPU time of aorta's own code at the step's ends, in the thread that trains. None: not measured."""
    gap: str | None = None
    """Why this line does not follow the one before it: a pause, a rollback, a step that raised an error."""
    not_measured: dict[str, str] = {}

    def module_of(self, call: CollectiveRecord) -> str:
        """The purpose of a collective of this line; '' where that is not certain."""
        place = call.module
        return self.modules[place] if place is not None and 0 <= place < len(self.modules) else ""

    def name_of(self, call: CollectiveRecord) -> str:
        """'all_gather of layers.3', or the operation alone."""
        module = self.module_of(call)
        return f"{call.op} of {module}" if module else call.op

    @property
    def end_unix_ns(self) -> int:
        """End of the window; its start where step_ms was not measured."""
        return self.start_unix_ns + int((self.step_ms or 0.0) * 1e6)


class PeakRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The data sheet's rate with which a run's model FLOPs are compared."""

    flops_per_s: float
    """Rate of one device."""
    precision: str
    hardware: str
    """The device, as its file in aorta/hardware/parts calls it."""
    origin: str
    """The file's source of the rate."""


EndingKind = Literal["finished", "stopped", "crashed", "killed", "hung"]


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank ended, or an attempt of a run.

    finished: all was done. stopped: somebody asked for it. crashed: an exception. killed: the process left
    no word (SIGKILL, out of memory, a lost machine). hung: the watchdog ended it.
    """

    kind: EndingKind
    why: str | None = None
    """The signal; the exception's type and first line; what the watchdog found."""
    ranks: list[int] = []
    """Ranks that ended an attempt; empty where none did, or it is not known."""
    unix_ns: int | None = None
    signal: str | None = None
    """The signal's name (SIGSEGV), where one ended the process and somebody saw it."""
    exit_status: int | None = None
    text: str | None = None
    """What C++ wrote when it gave up: NCCL's watchdog, gloo, abort."""
    told_by: str | None = None
    """Who knows it: the process itself, its parent, the launcher's error file, the kernel."""


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One start of the processes of a run."""

    attempt: int
    world_size: int
    started_unix_ns: int
    ending: Ending | None = None
    """None while it runs, and where nothing tells."""
    first_step: int | None = None
    """Global step from which it went on, by its lowest rank that tells."""
    last_steps: list[int | None] = []
    """The last global step with a line, by rank."""
    position_by: PositionSource | None = None
    """Who told first_step. None: nobody; the steps were counted on from those before."""


class OverheadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What aorta cost a run, by rank 0. Shares are of the time that the steps would have taken without it."""

    limit: float | None
    """The overhead that was asked for; None: every step was recorded, whatever it cost."""
    cost: float | None
    """The mean over all steps: what recording costs, measured, and what is always on. None where too few
    steps were left out to tell."""
    interval: tuple[float, float] | None
    """95 % interval of cost."""
    later_cost: float | None = None
    """The same without the first num_first steps. The limit is for these."""
    later_interval: tuple[float, float] | None = None
    step_ms: float | None = None
    """How much longer a recorded step takes than one that is not."""
    step_interval_ms: tuple[float, float] | None = None
    always_on: float | None
    """What aorta does in every step, recorded or not: a part of cost, which the limit cannot leave out. In
    runs of versions without always_on_ms no part of cost."""
    always_on_interval: tuple[float, float] | None = None
    """From what clocks saw of it to the most that it can be."""
    always_on_ms: float | None = None
    """The same a step."""
    every: float | None
    """Steps per recorded step, the mean after the first ones."""
    num_steps: int
    num_recorded: int
    num_first: int = 0
    """Steps at the start that are recorded whatever they cost."""
    num_pairs: int | None = None
    """Recorded blocks that were compared with the steps on both of their sides. None of earlier versions."""

    @property
    def only_first(self) -> bool:
        """True where the first steps were compared with those after them, and no block with both its sides:
        what changes while a program or a machine warms up is in the difference."""
        has_pairs = self.every is not None if self.num_pairs is None else self.num_pairs > 0
        return self.limit is not None and not has_pairs


LoopKind = Literal["modules", "recurrence", "parts"]
"""What the iterations of a loop have: weights of their own each; what the one before gave; neither."""


class OperatorLoop(msgspec.Struct, frozen=True, kw_only=True):
    """A loop of the model's, by its iterations and what they call in a step of one rank."""

    kind: LoopKind
    at: StackFrame
    """The line with most of it."""
    first_line: int
    last_line: int
    """Of its function, between which all of it is."""
    iterations: int
    """Of one call."""
    operators: int
    """Forward, with FLOPs and, where they have none, bytes."""
    all_operators: int
    """With those of the backward pass."""
    flops: float
    bytes: float

    def times(self, num: int) -> "OperatorLoop":
        """As a step that calls the model so often has it."""
        names = ("operators", "all_operators", "flops", "bytes")
        return msgspec.structs.replace(self, **{name: num * getattr(self, name) for name in names})


class LineOfWork(msgspec.Struct, frozen=True, kw_only=True):
    """What a line of the program calls itself in a step of one rank, forward and backward."""

    at: StackFrame
    operators: int
    flops: float
    bytes: float
    """Of operators without FLOPs."""
    forward_flops: float
    forward_bytes: float
    handed_bytes: float
    """Of `forward_bytes`: what operators element by element hand to each other in one call of the
    function."""
    handed_again_bytes: float = 0.0
    """Of these: by operators that compute once more what the pass has computed before."""
    forward_computing: float = 0.0
    """Operators of the forward pass beside views; of these, what it has computed before."""
    forward_again: float = 0.0

    def times(self, num: int) -> "LineOfWork":
        """Of a step that calls the model so often."""
        numbers = {name: num * getattr(self, name) for name in self.__struct_fields__ if name != "at"}
        return LineOfWork(at=self.at, **numbers)

    def plus(self, other: "LineOfWork") -> "LineOfWork":
        """Of one line in two models."""
        names = [name for name in self.__struct_fields__ if name != "at"]
        return LineOfWork(at=self.at, **{name: getattr(self, name) + getattr(other, name) for name in names})


class QuietCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of the model without gradients, before the one that trains, in each step that was noted."""

    num: int
    columns: tuple[int, int]
    """Of what the first and the last is given: tokens of a table. Alike; or each has one more; or with a
    cache each but the first has one."""
    at: StackFrame | None = None


class DerivativeCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of torch.autograd.grad in a step."""

    num: int
    num_again: int
    """Of these: for another input of outputs of which one before has a gradient."""
    of_products: float
    of_operators: float
    """Of all passes, the part of matrix products, and of all operators, that one call for all inputs would
    not have: in these calls, and of what they make in later passes."""
    at: StackFrame | None = None


class FourierTransforms(msgspec.Struct, frozen=True, kw_only=True):
    """Those of a step whose lengths have a large prime factor."""

    num: int
    length: int
    """Of those with most entries."""
    prime: int
    """The largest that divides it."""
    with_gradient: float
    """Part of their entries of which the results have gradients."""
    ms: float | None
    """Of a CPU, forward, by the host's clock: the median of the steps in which they were timed. None of a
    device."""
    at: StackFrame | None = None


class CallsOfFewRows(msgspec.Struct, frozen=True, kw_only=True):
    """Calls with gradients of one model in a step, none of which is given what another one gives."""

    num: int
    rows: int
    """That each of them is given, in the mean."""
    operators: int
    """Of each, in both passes."""
    parameter_bytes: int
    """That each goes through."""
    at: StackFrame | None = None


class LossLoop(msgspec.Struct, frozen=True, kw_only=True):
    """Operators between the model and its loss: many, such as go through weights and no activations, or such
    as hand large tensors to each other."""

    operators: int
    """Of a forward pass; the backward pass has as many."""
    ms: float | None
    """Of both passes on rank 0, by the host's clock: the median of the steps in which they were timed. None
    of a model on a device."""
    bytes: float = 0.0
    """That they move in both passes."""
    weights_bytes: float = 0.0
    """Of those that are called with parameters alone, and of adding their gradients to those of the model."""
    parameters: int = 0
    """That these go through."""
    least_bytes: float = 0.0
    """Of those that hand on: what one function for all would move. 0 of the others."""


class WorkOfStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank's step does that training may do without, each with the line of the program that has most
    of it. FLOPs, counted as flops_per_step is; 0 of all where nobody could."""

    flops: float = 0.0
    """Of all that is done: with modules that train nothing, where these get gradients, and with `again`."""
    precision: str = ""
    """In which most of it is done ('bf16'), by autocast and the parameters' type; '' of another."""
    model_at: StackFrame | None = None
    """The line that calls the module with most of them."""
    again: float = 0.0
    """Of modules that a backward pass calls once more, for activations that were not kept."""
    again_at: StackFrame | None = None
    again_launched: float = 0.0
    """Of the operators of both passes."""
    bytes: float = 0.0
    """That operators without FLOPs read and write, all of them, and those of `again`."""
    again_bytes: float = 0.0
    fp32: float = 0.0
    """Forward, where autocast is off."""
    fp32_at: StackFrame | None = None
    fp64: float = 0.0
    fp64_at: StackFrame | None = None
    narrowed_bytes: float = 0.0
    """In fp64, that lines of the program cast to narrower types, in the model or in front of it."""
    narrowed_at: StackFrame | None = None
    unread: float = 0.0
    """For gradients of parameters that no optimizer has, and that nobody updates."""
    unread_at: StackFrame | None = None
    """The line that calls the module with these parameters, within what the step calls."""
    unread_is_apart: bool = False
    """No gradient goes through what this line calls to anything else."""
    unread_of: str = ""
    """That module, by the class that holds it ('VGGLoss.features')."""
    unread_num: int = 0
    """Of these parameters."""
    zeroed_bytes: float = 0.0
    """Of gradients that are set to zero, and added to, where they could be none, and written."""
    inputs: float = 0.0
    """For gradients of what models are given, where the program asks for them (requires_grad_())."""
    inputs_at: StackFrame | None = None
    scores_bytes: float = 0.0
    """For scores of attention, which a fused kernel keeps to itself: by its two products as well."""
    scores_at: StackFrame | None = None
    scores_num: int = 0
    """Layers of the model that has most of them: times that one call makes weights of such scores."""
    attention: float = 0.0
    """Calls of scaled_dot_product_attention; of these, with a mask that leaves out what comes later, and no
    more: is_causal=True says it."""
    attention_at: StackFrame | None = None
    causal: float = 0.0
    causal_at: StackFrame | None = None
    one_hot: float = 0.0
    """Of `flops`, and of `bytes`: products with rows of one 1, which look rows of a matrix up."""
    one_hot_bytes: float = 0.0
    one_hot_at: StackFrame | None = None
    ordered_bytes: float = 0.0
    """Put where indices say, in a fixed order with deterministic algorithms alone."""
    ordered_at: StackFrame | None = None
    indexed_bytes: float = 0.0
    """The same in a fixed order on CUDA, whatever is set: backward passes of table[index]."""
    indexed_at: StackFrame | None = None
    masked: float = 0.0
    """Of `flops`: for rows that are then multiplied by zeros of one-hot rows."""
    masked_at: StackFrame | None = None
    odd: float = 0.0
    """Of `flops`: the largest products, where rows lie at lengths that are no multiple of 16 bytes, in a type
    of two bytes or in TF32."""
    odd_num: int = 0
    odd_length: int = 0
    """Elements of the longest such rows."""
    odd_at: StackFrame | None = None
    zeros: float = 0.0
    """Of `flops`: products with matrices of zeros, without what sparse ones would take."""
    zeros_at: StackFrame | None = None
    unused: float = 0.0
    """Of `flops`: products, for the part of their results that nothing reads."""
    unused_at: StackFrame | None = None
    ignored: float = 0.0
    """Of the targets of a loss: the part that it is told to ignore."""
    merged: float = 0.0
    """Of `flops`: gradients of whole matrices of which small factors train."""
    merged_at: StackFrame | None = None
    repeated: float = 0.0
    """Of `flops`, and of `bytes`: what one pass computes once more from the same, forward and backward."""
    repeated_bytes: float = 0.0
    repeated_at: StackFrame | None = None
    """The line whose calls do nothing else, but the first of them."""
    repeated_launched: float = 0.0
    """Of all operators."""
    unfolded: float = 0.0
    """Of `flops`, and of `bytes`: products of weights with columns that unfold() writes."""
    unfolded_bytes: float = 0.0
    unfolded_at: StackFrame | None = None
    spread: float = 0.0
    """Of `flops`: products with weights, for rows that were repeated before."""
    spread_at: StackFrame | None = None
    widened: float = 0.0
    """Of `flops`: products that are wide for the next one to make them narrow, which may come first."""
    widened_at: StackFrame | None = None
    """The line of that one."""
    widened_of: StackFrame | None = None
    hoisted: float = 0.0
    """Of `flops`, and of `bytes`: what depends on nothing but what the model holds, computed again."""
    hoisted_bytes: float = 0.0
    hoisted_at: StackFrame | None = None
    hoisted_share: float = 0.0
    """Of the operators of this line."""
    hoisted_launched: float = 0.0
    hoisted_solves: float = 0.0
    """Of all operators, and of those of linear algebra, whose FLOPs nobody counts."""
    hoisted_checks: float = 0.0
    """Of the error codes of these that the host reads, and waits for."""
    backwards: float = 0.0
    """Of backward passes through operators that one of the step went through before; none of `flops`."""
    backwards_at: StackFrame | None = None
    discarded: float = 0.0
    """For gradients that a pass gives to parameters of another optimizer, and that are set back before that
    takes them."""
    discarded_beside: float = 0.0
    """Of these: none of `flops`, as another pass goes through the same operators."""
    discarded_at: StackFrame | None = None
    """The line of the pass."""
    discarded_of: StackFrame | None = None
    """The line that calls what these parameters are of."""
    discarded_is_apart: bool = False
    """No gradient goes through that to anything else."""
    grown_bytes: float = 0.0
    """That torch.cat copies again of what it gave before, in a loop that joins parts one by one."""
    grown_at: StackFrame | None = None
    unchanged: float = 0.0
    """Of `flops`, and of `bytes`: forward, from nothing that changes from step to step."""
    unchanged_bytes: float = 0.0
    unchanged_at: StackFrame | None = None
    unchanged_is_all: bool = False
    """The function of this line does next to nothing else."""
    rows_bytes: float = 0.0
    """Of gradients: rows of tables that the step does not look up."""
    rows_at: StackFrame | None = None
    rows_looked_up: int | None = None
    """Rows that lookups in these tables name, each as often as it is named. None: of a version that did not
    count them."""
    rows_looked_up_bytes: float = 0.0
    twice: float = 0.0
    """Forward without gradients, of batches that the model has in the step anyway; none of `flops`."""
    twice_bytes: float = 0.0
    """None of `bytes`."""
    twice_at: StackFrame | None = None
    quiet: QuietCalls | None = None
    num_sizes: tuple[int, int] = (0, 0)
    """Of what models are called with: different ones, and steps that were looked at."""
    calls: CallsOfFewRows | None = None
    """Of the model that is called most often."""
    derivatives: DerivativeCalls | None = None
    transforms: FourierTransforms | None = None
    before: float = 0.0
    """Of a frozen module that is called with rows of earlier steps; none of `flops`."""
    before_at: StackFrame | None = None
    padding: float = 0.0
    """Of tokens: the part that fills rows up to one length."""
    padding_columns: float = 0.0
    """The part that fills all rows of the batch."""
    loop: OperatorLoop | None = None
    """That with most operators."""
    lines: list[LineOfWork] = []
    """Of the model: those with most bytes."""
    copies: int = 0
    """By Tensor.contiguous, which lines of the program called on tensors that lie otherwise."""
    copies_bytes: float = 0.0
    """Of what they give."""
    copies_at: StackFrame | None = None


NO_OPTIMIZER = "no optimizer was seen in a whole step: it is not known what the model is"
NO_CALL = "no module that holds the optimizer's parameters was called in the step"
"""Why flops_per_step is not known of a program in which no module was seen to be the model."""
COMPILED_PARTS = "the program compiles parts, and calls what it trains where no call can be noted"
"""Why it is not known of a program that compiles, such as a whole step."""
UNLIKE = "batches differ in size from step to step: give recorder.step their tokens"
"""Why samples_per_step and tokens_per_step are not known."""


class RunRecord(msgspec.Struct, kw_only=True):
    """run.json: what ran, where, with which settings, and how complete the records are.

    Where a run has several attempts, the settings, versions, devices, clocks and coverage are those of the
    last one.
    """

    schema: int = SCHEMA_VERSION
    started_unix_ns: int
    finished_unix_ns: int | None = None
    world_size: int
    command: list[str]
    config: dict[str, Any] | None
    model: dict[str, Any] | None
    """Keys h, f, nh, nkv, V, L, E, k, recompute (hidden, FFN width, heads, KV heads, vocabulary,
    layers, experts, active experts, activation checkpointing)."""
    layout: dict[str, Any] | None
    """Keys world, dp, tp, ep, mbs, seq, grad_accum, compile."""
    versions: dict[str, str | None]
    devices: list[dict[str, Any]]
    environment: dict[str, str]
    clock_anchors: list[dict[str, int]]
    coverage: dict[str, Any]
    placement: str | None
    flops_per_token: float | None = None
    """Model FLOPs of forward and backward, without what is computed again."""
    peak_flops: PeakRecord | None = None
    run_id: str | None = None
    launch: dict[str, Any] = {}
    """The launcher, as far as it tells one run from another (aorta.records.run_identity)."""
    attempts: list[AttemptRecord] = []
    """In order; the last one is this record's own."""
    overhead: OverheadRecord | None = None
    flops_per_step: float | None = None
    """Model FLOPs of one rank's step, counted by torch on a copy without data."""
    work: WorkOfStep | None = None
    loss_loop: LossLoop | None = None
    samples_per_step: int | None = None
    tokens_per_step: int | None = None
    """Of one rank's step, by what the model was called with; samples where that is no table of tokens."""
    program: dict[str, Any] | None = None
    """What was in force, read once in the process: wrappers and their arguments, loaders, optimizers."""
    not_measured: dict[str, str] = {}
    variables: dict[str, str] | None = None
    """Environment variables of the user: switches, short numbers, a mark (#3fa1) of other values. None: of an
    earlier version, which noted none."""


NOTHING_NOTED = RunRecord(
    started_unix_ns=0, world_size=1, command=[], config=None, model=None, layout=None, versions={},
    devices=[], environment={}, clock_anchors=[], coverage={}, placement=None,
)  # fmt: skip
"""What is known of a run without run.json, such as a trace."""
