"""Kernels of like layers are one line of the terminal's list of changes."""

from aorta.account.judge.trace_changes import WorkChange
from aorta.page.trace_changes import over_modules


def row(module: str, before: float | None, after: float | None, name: str = "gemm") -> WorkChange:
    return WorkChange(
        table="kernel", work_class="gemm", reference=name, candidate=name, operator="aten::mm", shapes="8x8",
        module=module, matched_by="all", reference_ms=before, candidate_ms=after,
        difference_ms=(after or 0.0) - (before or 0.0), reference_count=1, candidate_count=2,
        reference_range=None, candidate_range=None, certainty="sure",
    )  # fmt: skip


def test_kernels_that_are_alike_but_for_their_layer_are_summed() -> None:
    """Layers 0 to 2: 1 + 2 + 3 before, 2 each after."""
    rows = [row(f"Attention_{layer}", before, 2.0) for layer, before in enumerate((1.0, 2.0, 3.0))]
    (found,) = over_modules(rows)
    assert (found.module, found.reference_ms, found.candidate_ms) == ("Attention x 3", 6.0, 6.0)
    assert (found.reference_count, found.candidate_count, found.difference_ms) == (3, 6, 0.0)


def test_other_modules_and_what_one_side_lacks_stay_apart() -> None:
    rows = [row("layers.0.mlp", 1.0, 1.5), row("layers.1.mlp", 1.0, 1.5), row("layers.1.mlp", 1.0, None)]
    rows += [row("head", 5.0, 5.1)]
    found = over_modules(rows)
    assert [(one.module, one.candidate_ms) for one in found] == [
        ("layers.mlp x 2", 3.0), ("layers.1.mlp", None), ("head", 5.1),
    ]  # fmt: skip
