import pytest

from aorta.timeline.collective import algbw_gb_s, busbw_factor, busbw_gb_s, canonical_op, stream_of


@pytest.mark.parametrize(
    ("op", "num_ranks", "expected"),
    [
        ("all_reduce", 4, 1.5),
        ("all_reduce", 1, 0.0),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 2, 0.5),
        ("all_to_all", 8, 0.875),
        ("gather", 4, 0.75),
        ("scatter", 4, 0.75),
        ("broadcast", 8, 1.0),
        ("reduce", 8, 1.0),
        ("send", 2, 1.0),
        ("recv", 2, 1.0),
    ],
)
def test_busbw_factor_is_that_of_nccl_tests(op, num_ranks, expected):
    assert busbw_factor(op, num_ranks) == pytest.approx(expected)


def test_bandwidth_by_hand():
    """3 GB gathered over 4 ranks in 10 ms: 300 GB/s for the buffer, 225 GB/s on the bus."""
    assert algbw_gb_s(3_000_000_000, 10.0) == pytest.approx(300.0)
    assert busbw_gb_s("all_gather", 3_000_000_000, 4, 10.0) == pytest.approx(225.0)


@pytest.mark.parametrize("duration_ms", [None, 0.0])
def test_no_duration_has_no_bandwidth(duration_ms):
    assert algbw_gb_s(1, duration_ms) is None
    assert busbw_gb_s("all_reduce", 1, 2, duration_ms) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("all_reduce", "all_reduce"),
        ("allreduce_", "all_reduce"),
        ("allreduce_coalesced_", "all_reduce"),
        ("_allgather_base_", "all_gather"),
        ("all_gather_into_tensor", "all_gather"),
        ("allgather_into_tensor_coalesced_", "all_gather"),
        ("all_gather_single", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("reduce_scatter_tensor", "reduce_scatter"),
        ("reduce_scatter_tensor_coalesced_", "reduce_scatter"),
        ("alltoall_base_", "all_to_all"),
        ("all_to_allv", "all_to_all"),
        ("all_to_all_single", "all_to_all"),
        ("recv_any_source_", "recv"),
        ("nccl:all_reduce", "all_reduce"),
        ("matmul", None),
    ],
)
def test_every_spelling_has_one_name(name, expected):
    assert canonical_op(name) == expected


@pytest.mark.parametrize(
    ("op", "stream"),
    [
        ("all_reduce", "allreduce"),
        ("reduce_scatter", "reducescatter"),
        ("_allgather_base", "allgather"),
        ("all_to_all", "alltoall"),
        ("broadcast", "aux"),
        ("send", "aux"),
        ("unknown", "aux"),
    ],
)
def test_an_operation_counts_under_its_stream(op, stream):
    assert stream_of(op) == stream
