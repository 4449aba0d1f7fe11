"""Settings that differ, as the terminal shows them."""

from aorta.page.table import _told_apart


def test_long_values_are_shown_where_they_differ() -> None:
    begin = "train.py --data /scratch/group/tokens --steps 100 "
    assert _told_apart(f"{begin}--lr 1e-3 --seed 1", f"{begin}--lr 3e-4 --seed 1") == [
        "...ps 100 --lr 1e-3 --seed 1", "...ps 100 --lr 3e-4 --seed 1",
    ]  # fmt: skip
    assert _told_apart(begin.strip(), f"{begin}--compile") == ["... --steps 100", "... --steps 100 --compile"]
    assert _told_apart("a" * 50, None) == ["a" * 37 + "...", "not set"]
    assert _told_apart("train.py --lr 1", "train.py --lr 2") == ["train.py --lr 1", "train.py --lr 2"]
