"""What a kernel does, by its name: GEMM, attention, normalisation, element-wise work, optimizer, copy."""

import re
from functools import lru_cache

from aorta.traces.classify import COPY_NAMES, LONGEST_NAME, MOST_NAMES

COMMUNICATION, COPY, OTHER = "communication", "copy", "other"
KERNEL_CLASSES = (
    "gemm", "attention", "normalization", "optimizer", "elementwise", COPY, COMMUNICATION, OTHER,
)  # fmt: skip

_WORDS: dict[str, tuple[str, ...]] = {
    "optimizer": (
        "adam", r"\bsgd", "lamb_", "adagrad", "rmsprop", "muon", "multi_tensor_apply", "foreach",
        "amp_.*unscale", "l2norm",
    ),
    "attention": ("fmha", "flash_?(fwd|bwd|attn|attention)", "attention", "sdpa", "aiter.*mha"),
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
"""Searched from the top without regard to case, the first match decides: a fused name has several words, and
the rarer ones say more. Names of cuBLAS, CUTLASS, cuDNN, hipBLASLt (Cijk_), Composable Kernel, ATen and
Triton."""
_SEARCHES = tuple((name, re.compile("|".join(words), re.IGNORECASE)) for name, words in _WORDS.items())


@lru_cache(MOST_NAMES)
def kernel_class(name: str) -> str:
    """One of KERNEL_CLASSES, never COMMUNICATION: that is for aorta.traces.classify to say."""
    text = name[:LONGEST_NAME]
    if COPY_NAMES.search(text):
        return COPY
    for label, pattern in _SEARCHES:
        if pattern.search(text):
            return label
    return OTHER
