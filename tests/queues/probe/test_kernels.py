"""The clock's arithmetic; and, where Triton is installed, that the kernels compile to what they must be."""

import numpy as np
import pytest

from aorta.queues.probe.kernels import nominal_ns, tick_counts
from aorta.queues.probe.machine import ProbeError


def test_the_tick_is_the_smallest_step_and_not_a_repeated_read():
    assert tick_counts(np.array([0, 0, 0, 32, 32, 64, 96, 96, 160])) == (32, 20)


@pytest.mark.parametrize("reads", [[5, 5, 5], [5, 9, 7]], ids=["stands-still", "runs-backwards"])
def test_a_clock_that_does_not_advance_is_refused(reads):
    with pytest.raises(ProbeError, match="does not advance"):
        tick_counts(np.array(reads))


@pytest.mark.parametrize(
    ("measured", "expected"), [(1.004, 1.0), (9.95, 10.0), (1.4, 1.4), (10.5, 10.5)], ids=str
)
def test_a_count_is_nominal_where_the_host_agrees(measured, expected):
    assert nominal_ns(measured) == expected


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_the_clock_is_read_inside_the_loop(backend, monkeypatch):
    triton = pytest.importorskip("triton", reason="needs Triton to compile kernels")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from aorta.queues.probe import triton_kernels as code

    target, assembly, read = {
        "cuda": (GPUTarget("cuda", 90, 32), "ptx", "%globaltimer"),
        "hip": (GPUTarget("hip", "gfx942", 64), "amdgcn", "s_memrealtime"),
    }[backend]
    if backend == "hip":
        monkeypatch.setattr(code, "READ", triton.language.constexpr(code.GCN))
        monkeypatch.setattr(code, "CONSTRAINT", triton.language.constexpr("=s"))
    _forget(code.read_clock, code.spin)
    signature = {"buffer": "*i64", "slot": "i32", "counts": "i32"}
    compiled = triton.compile(ASTSource(code.spin, signature, constexprs={}), target=target)
    text = compiled.asm[assembly]
    assert text.count(read) == 2, "once before the loop and once in it"
    _forget(code.read_clock, code.spin)


def _forget(*functions):
    """Triton remembers with which globals it compiled a function."""
    for function in functions:
        function.hash = None
        function.used_global_vals = {}
