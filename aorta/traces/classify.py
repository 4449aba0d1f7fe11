"""Tells from a kernel's name which collective it carries out, or which class of compute it is.

classifier(rules).comm_op answers for readers; compute_op and kernel_class for kernels that are no
communication, may_be_comm for those of them whose names leave it open. load_rules reads a user's own rules.
"""

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from aorta.errors import ConfigError, TraceError
from aorta.timeline.collective import canonical_op

UNKNOWN = "unknown"
"""Op of a collective whose operation neither metadata nor the kernel's name tells."""
COPY_KERNEL = "copy_kernel"
"""Op of a kernel that only copies. It counts as compute and is named beside it."""
COMMUNICATION, COPY, OTHER = "communication", "copy", "other"
MOST_NAMES = 100_000
"""Names whose answers are remembered."""
LONGEST_NAME = 4096
"""Letters of a name that are searched: patterns cost more than linear time in a long one."""
OPS_IN_NAMES = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|alltoallv|broadcast|send_?recv|reduce(?=_|$)",
    re.IGNORECASE,
)
HELPERS = re.compile(r"checkForNaN|at::native::|at::cuda::|__amd_rocclr_", re.IGNORECASE)
"""Kernels that the process group or the runtime launches beside the collective's own: the metadata of
a collective does not make them communication."""
COPY_NAMES = re.compile(r"__amd_rocclr_(copy|fill)|^MEMORY_COPY_|^(hip)?mem(cpy|set)", re.IGNORECASE)


class CommRule(NamedTuple):
    pattern: str
    """Regular expression searched in the kernel's name, without regard to case."""
    op: str | None = None
    """Operation of the kernel; None: taken from its name, else UNKNOWN."""


COLLECTIVE = r"(?<!sm)all_?(reduce|gather)|reduce_?scatter|all_?to_?all|symm(etric)?_mem"
"""Words that a kernel says of collectives alone."""
LOCAL = (
    r"triton_(poi|red|per|tem|for)_|(loop|input)_\w*fusion|at::native|at::cuda|cub::|thrust::"
    r"|(warp|block)_?all_?reduce"
)
"""Names of kernels that stay on their device whatever else they say: compilers put the names of the
neighbours of a fused kernel into its own."""
COMM_RULES: tuple[CommRule, ...] = (
    CommRule(r"nccl|rccl|oneccl|hccl"),  # also ncclDevKernel_Generic_*, rcclGenericKernel
    CommRule(r"msccl"),
    # Expert parallelism. deepep_permute_triton_kernel and the like, of programs that use DeepEP, compute.
    CommRule(r"(deep_?ep|dpsk::ep|hybrid_?ep|nixl_?ep|uccl_?ep)(?![a-z_])", "all_to_all"),
    CommRule(
        r"internode_ll|mori::.*(dispatch|combine)|\bEp(Dispatch|Combine)(Intra|Inter)Node", "all_to_all"
    ),
    CommRule(r"(?<![a-z])(moe_?)?a2a_?(dispatch|combine)", "all_to_all"),
    CommRule(r"exchangeSplitAndOffset", "all_to_all"),
    # Copies between devices under a GEMM (Transformer Engine).
    CommRule(r"userbuffers_(push|pull)", "send_recv"),
    CommRule(r"userbuffers_\w*_rs(?![a-z])", "reduce_scatter"),
    CommRule(r"userbuffers_\w*_ag(?![a-z])", "all_gather"),
    CommRule(r"userbuffers"),
    CommRule(r"cross_device_reduce|quick_?reduce|multimem_(one_shot_)?(all_)?reduce", "all_reduce"),
    CommRule(r"nvshmem|rocshmem"),
    CommRule(rf"^(?!.*({LOCAL}|gemm|matmul)).*({COLLECTIVE})"),  # with a GEMM: not communication alone
)
"""Rules that are searched from the top; the first match decides. A program with its own kernels puts its
rules before these: parse_kineto(data, name, rules=(CommRule(r"my_exchange", "all_to_all"), *COMM_RULES)), or
in a file for load_rules. Names of copies are searched too, for collectives that copy engines carry out."""


class _Rule(msgspec.Struct, forbid_unknown_fields=True):
    pattern: str
    op: str | None = None


class _RuleFile(msgspec.Struct, forbid_unknown_fields=True):
    communication: list[_Rule]


@cache
def classifier(rules: tuple[CommRule, ...]) -> "Classifier":
    """The classifier for these rules, made once: ranks of a run have the same names."""
    return Classifier(rules)


class Classifier:
    """Tells communication by a kernel's name. Remembers names: a trace has many kernels and few names."""

    def __init__(self, rules: Sequence[CommRule] = COMM_RULES) -> None:
        self._rules = [(re.compile(pattern, re.IGNORECASE), op) for pattern, op in rules]
        self._op_of_name: dict[str, str | None] = {}

    def comm_op(self, kernel: str) -> str | None:
        """Operation of the collective that this kernel carries out; None where it is no communication."""
        try:
            return self._op_of_name[kernel]
        except KeyError:
            if len(self._op_of_name) >= MOST_NAMES:
                self._op_of_name.clear()
            op = self._op_of_name[kernel] = self._search(kernel)
            return op

    def _search(self, kernel: str) -> str | None:
        kernel = kernel[:LONGEST_NAME]
        for pattern, op in self._rules:
            if pattern.search(kernel):
                return op or op_in_name(kernel)
        return None


def op_in_name(kernel: str) -> str:
    """Operation that the kernel's name says, or UNKNOWN."""
    match = OPS_IN_NAMES.search(kernel)
    return (canonical_op(match.group()) if match else None) or UNKNOWN


def load_rules(path: Path | str | None) -> tuple[CommRule, ...]:
    """Rules of a YAML file, followed by COMM_RULES; these alone where no file is given.

    communication:
      - {pattern: my_exchange, op: all_to_all}   # op may be left out
    """
    if path is None:
        return COMM_RULES
    from aorta.config.yaml_files import read_yaml  # few readings of traces have rules: YAML costs 20 ms

    try:
        rows = msgspec.convert(read_yaml(path), _RuleFile).communication
    except (ConfigError, msgspec.ValidationError) as error:
        raise TraceError(
            f"{path} is no table of rules: {error}; it needs communication: [{{pattern: ..., op: ...}}]"
        ) from error
    rules = []
    for row in rows:
        op = None if row.op is None else canonical_op(row.op)
        if row.op is not None and op is None:
            raise TraceError(f"{path}: {row.op!r} is no collective; all_reduce, all_gather, ... are")
        try:
            re.compile(row.pattern, re.IGNORECASE)
        except (re.error, OverflowError, RecursionError) as error:
            raise TraceError(f"{path}: {row.pattern!r} is no regular expression: {error}") from error
        rules.append(CommRule(row.pattern, op))
    return (*rules, *COMM_RULES)


@lru_cache(MOST_NAMES)
def compute_op(kernel: str) -> str:
    """Op of a kernel that is no communication: COPY_KERNEL or kernel."""
    return COPY_KERNEL if COPY_NAMES.search(kernel[:LONGEST_NAME]) else "kernel"


_WORDS: dict[str, tuple[str, ...]] = {
    "optimizer": (
        "adam", r"\bsgd", "lamb_", "adagrad", "rmsprop", "muon", "multi_tensor_apply", "foreach",
        "amp_.*unscale", "l2norm",
    ),
    "attention": (
        "fmha", "flash_?(fwd|bwd|attn|attention)", "attention", "attn_?(fwd|bwd)", "sdpa", "aiter.*mha",
    ),
    "gemm": (
        "gemm", "cutlass", "xmma", "nvjet", "cublas", "cijk_", "_wgrad", "_dgrad", "conv(olution|2d|3d)?_",
        "wgmma", "splitk", "triton_.*_mm_", "bmm", "gemv", "dot_kernel", "matmul",
    ),
    "normalization": (
        "layer_?norm", "rms_?norm", "batch_?norm", "group_?norm", "gammabeta", "softmax", "log_?soft",
        "nll_loss", "cross_entropy",
    ),
    COPY: (
        "direct_copy", "catarray", "copy_kernel", "copy_device", "copyingkernel", "split_with_sizes",
        "chunk_cat", "_chunk", "transpose", "permute", "pad_kernel",
    ),
    "elementwise": (
        "elementwise", "triton_(poi|red|per)", "pointwise", "fill", "vectorized", "unrolled", "reduce_kernel",
        "index", "gather", "scatter", "embedding", "arange", "dropout", "distribution", "cumsum", "scan",
        "sort", "topk", "where", "mask",
    ),
}  # fmt: skip
"""Words of each class, searched from the top without regard to case; the first match decides: a fused name
has several words, and the rarer ones say more. Names of cuBLAS, CUTLASS, cuDNN, hipBLASLt (Cijk_),
Composable Kernel, ATen and Triton."""
_SEARCHES = tuple((name, re.compile("|".join(words), re.IGNORECASE)) for name, words in _WORDS.items())


@lru_cache(MOST_NAMES)
def kernel_class(name: str) -> str:
    """Class of a compute kernel, one of KERNEL_CLASSES; never COMMUNICATION, which Classifier tells."""
    text = name[:LONGEST_NAME]
    if COPY_NAMES.search(text):
        return COPY
    for label, pattern in _SEARCHES:
        if pattern.search(text):
            return label
    return OTHER


OTHER_RANKS = re.compile(
    r"(?<![a-z])(dispatch|combine|send|recv|p2p|ptop|ipc|a2a|rdma|ibgda)(?![a-z])|(send|recv)_?kernel|send_?recv"
    r"|all2all|exchange|peer|remote|shmem|multimem|put_?(mem|signal)|int(er|ra)_?node"
    r"|cross_?(device|rank|gpu|node)|nvlink|nvls|xgmi|lamport|barrier|(wait|set)_?(flag|signal)",
    re.IGNORECASE,
)
"""Words of kernels that write to other ranks or wait for them; some kernels say them of their own device."""
OF_THEIR_OWN = ("gemm", "attention", "normalization", "optimizer")
"""Classes whose kernels combine or exchange parts of their own results."""
_LOCAL, _COLLECTIVE = re.compile(LOCAL, re.IGNORECASE), re.compile(COLLECTIVE, re.IGNORECASE)


@lru_cache(MOST_NAMES)
def may_be_comm(name: str) -> bool:
    """True where the name of a kernel that no rule takes for communication speaks of other ranks."""
    text = name[:LONGEST_NAME]
    if _LOCAL.search(text):
        return False
    if _COLLECTIVE.search(text):
        return True
    return OTHER_RANKS.search(text) is not None and kernel_class(name) not in OF_THEIR_OWN
