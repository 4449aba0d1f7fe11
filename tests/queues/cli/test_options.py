"""Options as text: sizes, dimensions, groups, and mistakes in one line."""

from typing import Any

import pytest

from aorta.errors import ConfigError
from aorta.queues.options import (
    check_groups,
    fields,
    read_bytes,
    read_dims,
    read_groups,
    read_options,
    torch_dtype,
)
from aorta.queues.workloads import workloads
from tests.queues.sleep_workloads import OverlapOptions, SleepOptions


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("64K", 65536),
        ("128M", 2**27),
        ("2G", 2**31),
        ("1.5k", 1536),
        ("8MiB", 2**23),
        ("1B", 1),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert read_bytes(text, "--comm-size") == size


@pytest.mark.parametrize("text", ["", "0", "-1", "12Q", "1.0001K", "K", "1e6", "1 2", "99999999T", "٣"])
def test_sizes_that_do_not_parse(text: str) -> None:
    with pytest.raises(ConfigError, match="--comm-size must be a size"):
        read_bytes(text, "--comm-size")


@pytest.mark.parametrize(
    ("text", "dims"), [("4096", (4096,) * 3), ("1,2,3", (1, 2, 3)), ("8, 8, 8", (8, 8, 8))]
)
def test_dims(text: str, dims: tuple[int, int, int]) -> None:
    assert read_dims(text, "--mm-dim") == dims


@pytest.mark.parametrize("text", ["", "0", "1,2", "1,2,3,4", "a", "1,-2,3", "1.5"])
def test_dims_that_do_not_parse(text: str) -> None:
    with pytest.raises(ConfigError, match="--mm-dim must be one size or M,N,K"):
        read_dims(text, "--mm-dim")


@pytest.mark.parametrize(
    ("text", "groups"),
    [("[0,1],[2,3]", ((0, 1), (2, 3))), ("[[0,2],[1,3]]", ((0, 2), (1, 3))), ("[0]", ((0,),))],
)
def test_groups(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert read_groups(text, "--process-groups") == groups


@pytest.mark.parametrize("text", ["", "0,1", "[0,1],[1,2]", "[0],[]", "[-1,0]", "[a]", "[0,1", "{}"])
def test_groups_that_do_not_parse(text: str) -> None:
    with pytest.raises(ConfigError, match="--process-groups must name every rank once"):
        read_groups(text, "--process-groups")


@pytest.mark.parametrize("groups", [((0, 1),), ((0, 1), (2, 4)), ((0, 1, 2, 3, 4),)])
def test_groups_that_do_not_cover_the_ranks(groups: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ConfigError, match="each of the 4 ranks exactly once"):
        check_groups(groups, 4)
    check_groups(((2, 3), (0, 1)), 4)


def test_a_struct_from_flags() -> None:
    given: dict[str, Any] = {
        "comm_size": "64K",
        "mm_dim": "16",
        "process_groups": "[0,1]",
        "compute_ms": "2.5",
    }
    made = read_options(OverlapOptions, given)
    expected = OverlapOptions(comm_size=65536, mm_dim=(16, 16, 16), process_groups=((0, 1),), compute_ms=2.5)
    assert made == expected
    assert read_options(SleepOptions, {"fail": True}) == SleepOptions(fail=True)


def test_limits_of_the_struct_hold() -> None:
    with pytest.raises(ConfigError, match="--pieces must be at least 1, got 0"):
        read_options(SleepOptions, {"pieces": "0"})
    with pytest.raises(ConfigError, match="--sleep-ms must be a number, got 'nan'"):
        read_options(SleepOptions, {"sleep_ms": "nan"})


def test_every_workload_has_options_that_the_command_line_can_offer() -> None:
    """One flag means one kind of value, whichever workload it is of."""
    kinds: dict[str, set[str]] = {}
    for workload in workloads().values():
        for field in fields(workload.Options).values():
            kinds.setdefault(field.name, set()).add(field.notation)
            assert field.help, f"{workload.name}: {field.flag} has no help"
    assert all(len(kind) == 1 for kind in kinds.values())


def test_dtypes_are_torchs() -> None:
    import torch

    assert torch_dtype("bfloat16") is torch.bfloat16
