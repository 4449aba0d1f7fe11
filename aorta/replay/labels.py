"""What device work is for, by its name and by where the program launched it."""

import re
from functools import lru_cache

from aorta.traces.classify import COPY, kernel_class

OPTIMIZER_SCOPE = re.compile(r"Optimizer\.|optimizer|clip_grad", re.IGNORECASE)
SHARDING_SCOPE = re.compile(r"FSDP::(?!cast_forward_inputs)|torch::autograd::AccumulateGrad|Reducer")
"""Where parameters are gathered and gradients reduced: work that does not depend on the batch."""
OPTIMIZER = "optimizer"
ELEMENTWISE = "elementwise"
FOREACH = "aten::_foreach_"
"""Operators over lists of tensors."""


LOADER = re.compile(
    r"data_?loader|load_?batch|next_?batch|batch_?feed|wait_for_batch|aorta\.data", re.IGNORECASE
)


def work_class(name: str, program: str, unit: str) -> str:
    """The class of a kernel. Kernels over lists of tensors are the optimizer's by name; what launched them
    knows better."""
    scope = f"{program} {unit}"
    if OPTIMIZER_SCOPE.search(scope):
        return OPTIMIZER
    label = kernel_class(name)
    if label == OPTIMIZER and FOREACH in program and not SHARDING_SCOPE.search(scope):
        return ELEMENTWISE  # clipping gradients, say: an optimizer's step has an annotation of its own
    return COPY if label == OPTIMIZER and SHARDING_SCOPE.search(scope) else label


def depends_on_batch(name: str, program: str, unit: str) -> bool:
    """Whether the work grows with the samples of a pass: not that of the optimizer, of gathering parameters,
    of reducing gradients."""
    if FOREACH in program:
        return False  # over parameters or gradients
    return work_class(name, program, unit) != OPTIMIZER and not SHARDING_SCOPE.search(f"{program} {unit}")


@lru_cache(4096)
def is_data_loading(program: str) -> bool:
    """Whether a part of the program, by its name, fetches the next batch."""
    return LOADER.search(program) is not None
