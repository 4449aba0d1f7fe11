"""Small traces made by hand. Times are µs, as in the file."""

import gzip
import json

import pytest

from aorta.errors import TraceError
from aorta.timeline.overlap import overlap, total
from aorta.timeline.types import STEP_ANNOTATION, Kind
from aorta.traces.classify import COMM_RULES, CommRule, may_be_comm
from aorta.traces.kineto import parse_kineto, read_kineto
from tests.traces.kineto_events import kernel, launch, mark, parse


def test_work_belongs_to_the_step_that_launched_it_on_any_thread():
    trace = parse(
        mark(0, 100, "ProfilerStep#4"),
        mark(100, 100, "ProfilerStep#5"),
        launch(10, 1),
        launch(60, 2, tid=99),  # autograd's thread
        launch(150, 3),
        launch(250, 4),  # after the last step
        kernel(50, 100, 1),
        kernel(150, 100, 2),
        kernel(250, 100, 3),
        kernel(350, 100, 4),
        kernel(20, 10, 77),  # launched before the trace
    )
    assert [(s.step, len(s)) for s in trace.steps] == [(4, 2), (5, 1)]
    assert trace.quality.num_unlinked == 1
    assert total(trace.timeline).num_kernels == 5


def test_a_step_starts_when_the_compute_stream_reaches_it():
    """Origin 50 µs. Step 5 begins on the CPU at 100, but the stream works for step 4 until 250."""
    trace = parse(
        mark(0, 100, "ProfilerStep#4"),
        mark(100, 100, "ProfilerStep#5"),
        launch(10, 1),
        launch(150, 2),
        kernel(50, 200, 1),
        kernel(260, 40, 2),
    )
    first, second = trace.steps
    assert first.window_ms == pytest.approx((-0.050, 0.200))
    assert second.window_ms == pytest.approx((0.200, 0.250))


def test_the_first_step_starts_where_the_queue_got_through_with_untraced_work():
    """Its first kernel, launched at 10 µs, begins at 40 ms: 40 ms of untraced work, not of idle time."""
    events = [
        mark(0, 10_000, "ProfilerStep#4"),
        mark(10_000, 50_000, "ProfilerStep#5"),
        launch(10, 1),
        launch(11_000, 2),
        kernel(40_000, 20_000, 1),
        kernel(60_000, 20_000, 2),
    ]
    trace = parse(*events)
    assert [one.window_ms for one in trace.steps] == [pytest.approx((0, 20)), pytest.approx((20, 40))]
    assert [overlap(one).idle_ms for one in trace.steps] == pytest.approx([0, 0])
    assert any("busy with work from before the trace" in note for note in trace.quality.notes)
    # A copy of the step that got ahead on a stream of its own does not hide it.
    beside = parse(*events, launch(20, 3), kernel(60, 100, 3, stream=8, name="Memcpy", cat="gpu_memcpy"))
    assert beside.steps[0].window_ms[1] - beside.steps[0].window_ms[0] == pytest.approx(20)


def test_a_first_kernel_that_waits_for_a_traced_collective_does_not_shorten_the_step():
    trace = parse(
        mark(0, 10_000, "ProfilerStep#4"),
        launch(10, 1),
        launch(20, 2),
        kernel(30, 5_000, 1, stream=20, name="ncclDevKernel_AllGather_RING_LL"),
        kernel(5_040, 5_000, 2),
    )
    (step,) = trace.steps
    assert step.window_ms[0] == pytest.approx(-0.030)
    assert overlap(step).exposed_ms == pytest.approx(5.0)


def test_aortas_own_annotations_are_preferred():
    trace = parse(
        mark(0, 100, "ProfilerStep#0"),
        mark(0, 40, f"{STEP_ANNOTATION}1007"),
        mark(50, 40, f"{STEP_ANNOTATION}1008"),
        launch(10, 1),
        launch(60, 2),
        kernel(20, 5, 1),
        kernel(70, 5, 2),
    )
    assert [s.step for s in trace.steps] == [1007, 1008]


@pytest.mark.parametrize(
    ("last_us", "steps"),
    [
        pytest.param(9, [0, 1], id="a-rest-behind-the-last-step"),
        pytest.param(11, [0, 1, 2], id="a-step-of-the-host-alone"),
    ],
)
def test_a_step_that_launches_nothing_and_is_over_at_once_is_none(last_us, steps):
    """Steps of 100 us: below a tenth of that one has to launch something."""
    trace = parse(
        mark(0, 100, "ProfilerStep#0"), launch(10, 1), kernel(20, 30, 1),
        mark(100, 100, "ProfilerStep#1"), launch(110, 2), kernel(120, 30, 2),
        mark(200, last_us, "ProfilerStep#2"),
    )  # fmt: skip
    assert [step.step for step in trace.steps] == steps
    assert any("over at once" in note for note in trace.quality.notes) == (steps == [0, 1])


def test_launches_of_another_process_belong_to_no_step():
    trace = parse(mark(0, 100, "ProfilerStep#0"), launch(10, 1, pid=200), kernel(20, 5, 1))
    assert len(trace.steps[0]) == 0


def test_one_launch_of_a_graph_has_many_kernels():
    trace = parse(
        mark(0, 100, "ProfilerStep#0"),
        launch(10, 1, name="cudaGraphLaunch"),
        kernel(20, 5, 1),
        kernel(30, 5, 1),
    )
    assert len(trace.steps[0]) == 2


def test_without_annotations_there_is_the_whole_window_alone():
    trace = parse(launch(1, 1), kernel(5, 10, 1))
    assert trace.steps == []
    assert trace.timeline.step is None
    assert trace.timeline.span_ms == pytest.approx(0.010)


def test_the_base_is_added_in_whole_nanoseconds():
    header = {"baseTimeNanoseconds": 1_790_857_026_000_000_000, "distributedInfo": {"rank": 1}}
    trace = parse(kernel(4319800800577.64, 37.792), header=header)
    assert trace.timeline.origin_unix_ns == 1_790_857_026_000_000_000 + 4_319_800_800_577_640
    assert trace.timeline.span_ms == 0.037792


def test_integer_unix_microseconds_stay_exact():
    trace = parse(kernel(1694128201429646, 1), kernel(1694128201429649, 1))
    assert trace.timeline.origin_unix_ns == 1694128201429646000
    assert trace.timeline.span_ms == 0.004
    assert trace.quality.notes == ()


def test_float_unix_microseconds_are_noted_as_coarse():
    trace = parse(kernel(1694128201429646.5, 1.0))
    assert any("0.25 µs" in note for note in trace.quality.notes)


def test_copies_are_copies_and_copy_kernels_compute():
    trace = parse(
        kernel(0, 10, cat="gpu_memcpy", name="Memcpy HtoD"),
        kernel(0, 5, cat="gpu_memset", name="Memset"),
        kernel(5, 10, name="__amd_rocclr_copyBuffer.kd"),
    )
    line = trace.timeline
    assert line.kind.tolist() == [Kind.COPY, Kind.COPY, Kind.COMPUTE]
    assert [line.ops[i] for i in line.op] == ["memcpy", "memset", "copy_kernel"]
    assert overlap(line).exposed_copy_ms == pytest.approx(0.005)


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "reduce_scatter"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(x)", "reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "unknown"),
        ("void rcclGenericKernel<1, false>", "unknown"),
        ("mscclKernel_Sum_half_Simple_true", "unknown"),
        ("void vllm::cross_device_reduce_1stage<c10::BFloat16, 8>", "all_reduce"),
        ("oneShotAllReduceKernel", "all_reduce"),
        ("two_shot_all_reduce_kernel", "all_reduce"),
        ("void deep_ep::intranode::dispatch<8, 768>", "all_to_all"),
        ("void dpsk::ep::internode::combine<false, 8, __nv_bfloat16>", "all_to_all"),
        ("_ZN7deep_ep9internode8dispatchILb0EEEvv", "all_to_all"),
        ("hybrid_ep::dispatch_kernel<8>", "all_to_all"),
        ("EpCombineInterNodeV1Kernel_bf16", "all_to_all"),
        ("moeA2ADispatchKernel", "all_to_all"),
        ("allToAllV(void*, void*, long*)", "all_to_all"),
        ("void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<2>", "reduce_scatter"),
        ("void userbuffers_fp16_sum_inplace_gpu_rw_ag<2>", "all_gather"),
        ("kuserbuffers_pushsend(int*, int*, int4*)", "send_recv"),
        ("void aiter::reduce_scatter_cross_device_store<bf16, 8>", "reduce_scatter"),
        ("void quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot>", "all_reduce"),
        ("void (anonymous namespace)::multimem_all_gather_kernel<16>", "all_gather"),
        ("c10d::symmetric_memory::barrier_kernel", "unknown"),
        ("flashinfer::trtllm_mnnvl_allreduce::twoshotAllreduceKernel<2>", "all_reduce"),
        ("nvshmemi_proxy_quiet", "unknown"),
        ("deepep_post_reorder_triton_kernel", None),
        ("cutlass::gemm::deep_epilogue", None),
        ("triton_poi_fused_all_gather_into_tensor_wait_tensor_0", None),
        ("kernel_consumer_all_gather_gemm", None),
        ("smallReduceKernel", None),
        ("void at::native::reduce_kernel<512, 1>", None),
        ("batch_norm_collect_statistics_SyncBN", None),
        ("Cijk_Alik_Bljk_BBS_BH", None),
    ],
)
def test_a_kernels_name(name, op):
    trace = parse(kernel(0, 1, name=name))
    assert [c.op for c in trace.collectives] == ([] if op is None else [op])


@pytest.mark.parametrize(
    ("name", "may_be"),
    [
        ("my_exchange_v2", True),
        ("void my::dispatch<8>", True),
        ("kernel_consumer_all_gather_gemm", True),
        ("Memcpy PtoP (Device -> Device)", True),
        ("flash::flash_fwd_splitkv_combine_kernel", False),
        ("cutlass_gemm_splitk_combine", False),
        ("triton_poi_fused_all_gather_into_tensor_wait_tensor_0", False),
        ("void at::native::index_put_kernel<send_recv>", False),
        ("DeviceRadixSortDispatch", False),
        ("Memcpy DtoD (Device -> Device)", False),
    ],
)
def test_a_name_that_leaves_it_open(name, may_be):
    assert may_be_comm(name) == may_be


def test_a_program_adds_its_own_rules():
    rules = (CommRule(r"my_exchange", "all_to_all"), *COMM_RULES)
    trace = parse(kernel(0, 1, name="my_exchange_v2"), kernel(1, 1, name="nccl_x"), rules=rules)
    assert [c.op for c in trace.collectives] == ["all_to_all", "unknown"]


METADATA = {
    "Collective name": "_reduce_scatter_base",
    "In msg nelems": 80,
    "Out msg nelems": 10,
    "dtype": "Float",
    "Process Group Name": "3",
    "Process Group Ranks": "[0, 1, ..., 7]",
}


def test_the_kernels_metadata_comes_before_its_name():
    trace = parse(kernel(0, 1, name="ncclDevKernel_Generic", **METADATA))
    (c,) = trace.collectives
    assert (c.op, c.bytes, c.dtype, c.group) == ("reduce_scatter", 320, "Float", "3")
    assert c.ranks is None  # abbreviated, and no table of groups


def test_abbreviated_ranks_come_from_the_table_of_groups():
    table = [{"pg_name": "3", "ranks": list(range(8))}]
    header = {"distributedInfo": {"rank": 0, "world_size": 8, "pg_config": table}}
    (c,) = parse(kernel(0, 1, name="nccl", **METADATA), header=header).collectives
    assert c.ranks == list(range(8))


def test_metadata_is_found_through_the_launch():
    trace = parse(
        mark(0, 10, "record_param_comms", cat="cpu_op", **{"External id": 5} | METADATA),
        launch(2, 1, **{"External id": 5}),
        kernel(20, 5, 1, name="ncclDevKernel_Generic"),
        kernel(30, 5, 1, name="a_transport_that_no_rule_knows"),
    )
    assert [c.op for c in trace.collectives] == ["reduce_scatter"] * 2


@pytest.mark.parametrize("name", ["void c10d::checkForNaN<float>(float*, unsigned long)", "at::native::copy"])
def test_a_helper_kernel_of_a_collective_computes(name):
    trace = parse(kernel(0, 1, name=name, **METADATA))
    assert trace.collectives == []
    assert trace.timeline.kind.tolist() == [Kind.COMPUTE]


PEER_COPY = "Memcpy PtoP (Device -> Device)"


@pytest.mark.parametrize(
    ("operator", "kernels", "operations"),
    [
        ("c10d::allreduce_", ["vendor_ring_v3", "void at::native::fill"], ["all_reduce"]),
        ("_c10d_functional::all_gather_into_tensor", ["vendor_ring_v3"], ["all_gather"]),
        ("symm_mem::fused_all_gather_matmul", ["gemm", PEER_COPY], ["all_gather"]),
        ("symm_mem::_low_contention_reduce_scatter", ["wait_flag_kernel"], ["reduce_scatter"]),
        ("aten::copy_", ["gemm", PEER_COPY], []),
    ],
)
def test_an_operator_of_a_group_proves_what_it_launches(operator, kernels, operations):
    """The last kernel is launched after the operator, on its thread; the first on another."""
    inside = [
        event
        for i, name in enumerate(kernels)
        for event in (
            launch(10 + i, i + 1),
            kernel(100 + i, 1, i + 1, name=name, cat="gpu_memcpy" if "Memcpy" in name else "kernel"),
        )
    ]
    outside = [
        launch(10, 11, tid=2), kernel(110, 1, 11, name="vendor_ring_v3"),
        launch(30, 12), kernel(120, 1, 12, name="vendor_ring_v3"),
    ]  # fmt: skip
    trace = parse(mark(9, 11, operator, cat="cpu_op"), *inside, *outside)
    assert [c.op for c in trace.collectives] == operations


def test_an_old_trace_names_the_operation_by_a_range():
    trace = parse(
        mark(0, 10, "nccl:all_to_all"),
        launch(2, 1),
        kernel(20, 5, 1, name="ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t"),
    )
    assert [c.op for c in trace.collectives] == ["all_to_all"]


def test_the_compute_stream_is_the_busiest_without_communication():
    events = [kernel(0, 5, stream=7), kernel(0, 50, stream=9), kernel(0, 500, stream=11, name="nccl")]
    line = parse(*events).timeline
    assert {line.streams[i] for i in line.compute_streams} == {"9"}


def test_streams_of_several_devices_are_kept_apart():
    trace = parse(kernel(0, 5, device=0), kernel(0, 5, device=1))
    assert set(trace.timeline.streams) == {"0:7", "1:7"}


@pytest.mark.parametrize(
    ("header", "devices", "expected"),
    [
        pytest.param({}, ["A100", "H100"], "H100", id="by-number"),
        # ROCm counts the host's two CPUs: its third device is the first GPU.
        pytest.param({"hip_runtime_version": 70253211}, ["MI300X"], "MI300X", id="rocm"),
        pytest.param({"hip_runtime_version": 70253211}, ["MI210", "MI300X"], None, id="rocm-unlike"),
    ],
)
def test_the_device_is_named_whatever_its_number_counts(header, devices, expected):
    number = 2 if header else 1
    properties = [{"id": index, "name": name} for index, name in enumerate(devices)]
    events = [kernel(0, 5, device=number)]
    body = {"deviceProperties": properties, "traceEvents": events} | header
    assert parse_kineto(json.dumps(body).encode(), "x.json").device == expected


def test_quality_tells_what_is_missing():
    trace = parse(
        mark(0, 100, "ProfilerStep#0"),
        mark(100, 100, "ProfilerStep#1"),
        launch(10, 1),
        launch(150, 2),  # its kernel is not in the trace
        launch(160, 3, name="cudaEventQuery"),
        kernel(8, 5, 1),  # 2 µs before its launch
    )
    q = trace.quality
    assert q.num_launches_without_kernel == 1
    assert q.truncated_steps == (1,)
    assert (q.num_before_launch, q.worst_before_launch_us) == (1, 2.0)


def test_window_holds_whatever_ran_there():
    trace = parse(kernel(100, 50), kernel(200, 50))
    origin = trace.timeline.origin_unix_ns
    part = trace.window(origin + 25_000, origin + 110_000)
    assert total(part).compute_ms == pytest.approx(0.035)


@pytest.mark.parametrize(
    ("name", "rank"), [("worker3_step.json", 3), ("h200_rank12.json.gz", 12), ("t.json", 0)]
)
def test_a_rank_that_only_the_name_tells(name, rank):
    data = json.dumps({"traceEvents": [kernel(0, 1)]}).encode()
    assert parse_kineto(data, name).rank == rank


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_plain_and_gzip_files(tmp_path, suffix):
    data = json.dumps({"traceEvents": [kernel(0, 1)]}).encode()
    path = tmp_path / f"trace.json{suffix}"
    path.write_bytes(gzip.compress(data) if suffix else data)
    assert total(read_kineto(path).timeline).num_kernels == 1


GOOD = gzip.compress(json.dumps({"traceEvents": [kernel(0, 1)]}).encode())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "not a readable Kineto trace", id="empty"),
        pytest.param(b'{"traceEvents": [', "not a readable Kineto trace", id="truncated"),
        pytest.param(b'{"a": 1}', "has no traceEvents", id="other-json"),
        pytest.param(b"[]", "not a readable Kineto trace", id="list"),
        pytest.param(b'{"traceEvents": []}', "holds no GPU activity", id="no-gpu"),
        pytest.param(GOOD[:-9], "damaged gzip", id="cut-gzip"),
        pytest.param(GOOD[:20] + b"\0" * 20 + GOOD[40:], "damaged gzip", id="corrupt-gzip"),
        pytest.param(
            json.dumps({"traceEvents": [kernel(1e300, 1)]}).encode(),
            "times that no clock gives",
            id="huge-time",
        ),
        pytest.param(
            json.dumps({"traceEvents": [kernel(10**40, 1)]}).encode(),
            "not a readable|no clock gives",
            id="huge-int",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_one_clear_line(tmp_path, data, message):
    path = tmp_path / "trace.json"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=message) as error:
        read_kineto(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_one_clear_line(tmp_path):
    with pytest.raises(TraceError, match="cannot read .*No such file"):
        read_kineto(tmp_path / "none.json")
