"""Waits left out of FSDP2, DDP, ZeRO and pipelines as torch ships them, for programs.py.

A mutant compiles a function of torch anew without the statements that match. `WRITTEN_WITH_THE_CHECK` has one
author with it; `FROM_THE_SOURCE` was written from torch's source alone and committed before it was first run.
Run as a program, this prints the latter with their kinds.
"""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from typing import Any, NamedTuple


class Mutant(NamedTuple):
    kind: str
    """The program of programs.py that runs it."""
    module: str
    owner: str
    """The class that has the functions; empty for a module's own."""
    functions: str
    """Names with | between them: releases of torch differ."""
    statement: str
    """Pattern of a statement as ast.unparse writes it; nested functions are looked through too."""


FSDP = "torch.distributed.fsdp._fully_shard."
HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."

WRITTEN_WITH_THE_CHECK = {
    "reduce_scatter_before_its_input": Mutant(
        "fsdp2", FSDP + "_fsdp_collectives", "", "foreach_reduce",
        r"reduce_scatter_stream\.wait_stream\(current_stream\)",
    ),
    "all_gather_before_its_input": Mutant(
        "fsdp2", FSDP + "_fsdp_collectives", "", "foreach_all_gather",
        r"all_gather_stream\.wait_stream\(all_gather_copy_in_stream\)",
    ),
    "all_gather_output_before_wait": Mutant(
        "fsdp2", FSDP + "_fsdp_collectives", "", "foreach_all_gather_copy_out",
        r".*wait_event\(all_gather_event\)",
    ),
    "optimizer_before_the_reduction": Mutant(
        "fsdp2", FSDP + "_fsdp_param_group", "FSDPParamGroup", "finalize_backward|_wait_for_post_backward",
        r".*wait_event\((self\._post_reduce_event|event)\)",
    ),
    "gather_before_the_optimizer": Mutant(
        "fsdp2", FSDP + "_fsdp_state", "FSDPState", "_root_pre_forward",
        r".*all_gather_copy_in_stream\.wait_stream\(current_stream\)",
    ),
}  # fmt: skip

FROM_THE_SOURCE = {
    # The bucket goes back to the allocator while the reduce-scatter reads it; the next bucket takes it.
    "reduce_scatter_input_freed_early": Mutant(
        "fsdp2", FSDP + "_fsdp_param_group", "FSDPParamGroup", "post_backward",
        r".*wait_event\((oldest|self\.comm_ctx\.reduce_scatter_state)\.event\)",
    ),
    # Forward: a gathered buffer is freed while it is copied out; the gather after the next writes into it.
    "gathered_freed_in_forward": Mutant(
        "fsdp2", FSDP + "_fsdp_param_group", "FSDPParamGroup", "wait_for_unshard",
        r".*_wait_all_gather_streams_on_event\(prev_all_gather_state\.event\)",
    ),
    # Backward: the same, where the buffer is freed at once.
    "gathered_freed_in_backward": Mutant(
        "fsdp2", FSDP + "_fsdp_param_group", "FSDPParamGroup", "wait_for_unshard",
        r".*_wait_all_gather_streams_on_event\(all_gather_copy_out_event\)",
    ),
    # The last buffer of forward, taken by the first gather of backward.
    "last_gathered_freed": Mutant(
        "fsdp2", FSDP + "_fsdp_state", "FSDPState", "_post_forward",
        r".*wait_event\(all_gather_state\.event\)",
    ),
    # The user's all-reduce hook, on its own stream, before the reduce-scatter has ended.
    "hook_before_the_reduction": Mutant(
        "fsdp2_hook", FSDP + "_fsdp_collectives", "", "foreach_reduce",
        r"all_reduce_stream\.wait_stream\(reduce_scatter_stream\)",
    ),
    # The optimizer on the host reads pinned gradients that are still being copied. With two passes in a step
    # the second one's copies wait for the stream, and so for those of the first: nothing is lost then.
    "offloaded_gradient_read_early": Mutant(
        "fsdp2_offload_once", FSDP + "_fsdp_param_group", "FSDPParamGroup", "finalize_backward",
        r".*grad_offload_event\.synchronize\(\)",
    ),
    # The optimizer reads gradients that are still cast to float32 on a stream.
    "upcast_not_awaited": Mutant(
        "ddp_mixed", HOOKS + "mixed_precision_hooks", "", "_reducer_allreduce_and_upcast_hook",
        r".*current_stream\(\)\.wait_stream\(stream\)",
    ),
    # Forward reads low-precision parameters that are still being made on a stream.
    "low_precision_copy_not_awaited": Mutant(
        "ddp_mixed", "torch.nn.parallel.distributed", "DistributedDataParallel",
        "_module_wait_for_copy_hook", r"event\.wait\(.*",
    ),
    # The optimizer within backward divides and applies a bucket that is still being reduced.
    "optimizer_before_the_all_reduce": Mutant(
        "ddp_overlapped", HOOKS + "optimizer_overlap_hooks", "", "_apply_optim_in_backward_hook",
        r"fut\.wait\(\)",
    ),
    # The next forward reads parameters that the optimizer's stream still writes.
    "overlapped_optimizer_not_awaited": Mutant(
        "ddp_overlapped", HOOKS + "optimizer_overlap_hooks", "", "_apply_optim_in_backward_hook",
        r".*wait_stream\(optim_stream_state\.optim_stream\)",
    ),
    # The next forward reads parameters that are still being broadcast by their owners.
    "broadcast_not_awaited": Mutant(
        "zero", "torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer",
        "_sync_params", r"_ = \[x\.wait\(\) for x in handles\]",
    ),
    # A stage computes on what it has not received.
    "received_not_awaited": Mutant(
        "pp", "torch.distributed.pipelining.schedules", "", "_wait_batch_p2p", r"w\.wait\(\)",
    ),
}  # fmt: skip

MUTANTS = WRITTEN_WITH_THE_CHECK | FROM_THE_SOURCE


class _Without(ast.NodeTransformer):
    def __init__(self, statement: str) -> None:
        self.pattern, self.num_left_out = re.compile(statement), 0

    def generic_visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.Expr, ast.Assign)) and self.pattern.fullmatch(ast.unparse(node)):
            self.num_left_out += 1
            return ast.copy_location(ast.Pass(), node)
        return super().generic_visit(node)


Original = tuple[Any, str, Any]


def leave_out(name: str) -> list[Original]:
    """Compile the mutant's functions without its statements. Exits with 3 where this torch has none.

    Returns owner, name and original of what was replaced, for who wants to put it back.
    """
    mutant = MUTANTS[name]
    module = importlib.import_module(mutant.module)
    owner = getattr(module, mutant.owner) if mutant.owner else module
    num_left_out, originals = 0, list[Original]()
    for function_name in mutant.functions.split("|"):
        function = getattr(owner, function_name, None)
        if function is None:
            continue
        original = inspect.unwrap(function)
        without = _Without(mutant.statement)
        tree = without.visit(ast.parse(textwrap.dedent(inspect.getsource(original))))
        num_left_out += without.num_left_out
        ast.increment_lineno(tree, original.__code__.co_firstlineno - 1)
        scope: dict[str, Any] = {}
        code = compile(ast.fix_missing_locations(tree), original.__code__.co_filename, "exec")
        exec(code, original.__globals__, scope)
        for holder in {id(one): one for one in (owner, *sys.modules.values())}.values():
            if getattr(holder, function_name, None) is function:
                setattr(holder, function_name, scope[function_name])
                originals.append((holder, function_name, function))
    if not num_left_out:
        print(f"{name}: this torch has no such statement", flush=True)
        raise SystemExit(3)
    return originals


if __name__ == "__main__":
    print(*(f"{mutant.kind}:{name}" for name, mutant in FROM_THE_SOURCE.items()))
