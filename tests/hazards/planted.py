"""Twenty hazards as users write them, each as a log of operations in its bad and in its mended forms; and
logs without hazards. Addresses are small numbers; a log's step is 0."""

from collections.abc import Callable
from dataclasses import dataclass

HOST, COMPUTE, NCCL, REDUCE, COPY = "host", "compute", "nccl", "reduce", "copy"
A, B, PINNED = (0x1000, 64), (0x2000, 64), (0x9000, 64)
Log = list[list[object]]


def op(stream, site, reads=(), writes=()):
    return ["launch", stream, list(reads), list(writes), site]


def new(block, stream=COMPUTE):
    return ["allocate", block[0], block[1], stream, "next allocation"]


def freed(block):
    return ["free", block[0], "free"]


def waits(stream, other):
    return ["wait_stream", stream, other]


def edge(hazard):
    """The missing order: (stream that should wait, stream it should wait for)."""
    return hazard.later[0], hazard.earlier[0]


FILL = [new(A), op(COMPUTE, "fill", writes=[A])]


def collective_before_its_input(mended):
    order = [waits(NCCL, COMPUTE)] if mended else []
    return [*FILL, *order, op(NCCL, "all_reduce", [A], [A])]


def output_before_wait(mended):
    gather = [waits(NCCL, COMPUTE), op(NCCL, "all_gather", [A], [B]), ["record", "end", NCCL]]
    order = [["wait", COMPUTE, "end"]] if mended else []
    return [*FILL, new(B), *gather, *order, op(COMPUTE, "use", [B])]


def _freed_under_copy(mended, following):
    copy = [waits(COPY, COMPUTE), op(COPY, "copy to host", [A])]
    order = {
        0: [],
        1: [["record_stream", A[0], COPY]],
        2: [waits(COMPUTE, COPY)],
    }[int(mended)]
    return [*FILL, *copy, *order, freed(A), new(following), op(COMPUTE, "next", writes=[following])]


def freed_under_copy(mended):
    return _freed_under_copy(mended, A)


def freed_under_copy_without_pressure(mended):
    return _freed_under_copy(mended, B)


def bucket_refilled_while_reduced(mended):
    log = [new(A)]
    for micro in range(2):
        log += [waits(COMPUTE, REDUCE)] if mended and micro else []
        log += [op(COMPUTE, f"fill {micro}", writes=[A]), waits(REDUCE, COMPUTE)]
        log += [op(REDUCE, f"reduce {micro}", [A], [A])]
    return log


def bucket_of_two_streams(mended):
    half = A[1] // 2
    log = [new(A), op("backward 1", "copy a", writes=[(A[0], half)])]
    log += [op("backward 2", "copy b", writes=[(A[0] + half, half)]), waits(REDUCE, "backward 1")]
    return log + ([waits(REDUCE, "backward 2")] if mended else []) + [op(REDUCE, "reduce", [A])]


def hybrid_output_freed_on_its_stream(mended):
    log = [new(A, REDUCE), op(REDUCE, "reduce_scatter", writes=[A]), waits(NCCL, REDUCE)]
    log += [op(NCCL, "all_reduce", [A], [A])] + ([waits(REDUCE, NCCL)] if mended else [])
    return [*log, freed(A), new(A, REDUCE), op(REDUCE, "reduce_scatter of the next layer", writes=[A])]


def waits_for_itself(mended):
    log = [new(A, COPY), op("reload", "copy to device", [A])]
    return [*log, waits(COPY, "reload" if mended else COPY), op(COPY, "offload the next", writes=[A])]


def clone_after_the_snapshot(mended):
    clone, order = op(COMPUTE, "clone", writes=[A]), waits(COPY, COMPUTE)
    return [new(A), *([clone, order] if mended else [order, clone]), op(COPY, "copy to host", [A])]


def freed_after_another_streams_wait(mended):
    log = [*FILL, waits("side", COMPUTE), waits(NCCL, "side"), op(NCCL, "all_reduce", writes=[A])]
    log += [waits("side", NCCL)] + ([waits(COMPUTE, "side")] if mended else [])
    return [*log, freed(A), new(A), op(COMPUTE, "temporary", writes=[A])]


def event_recorded_too_early(mended):
    fill, record = op(COMPUTE, "fill", writes=[A]), ["record", "event", COMPUTE, "early record"]
    log = [new(A), *([fill, record] if mended else [record, fill])]
    return [*log, ["wait", COPY, "event"], op(COPY, "copy to host", [A])]


def pinned_buffer_refilled(mended):
    log = [new(B), op(HOST, "load", writes=[PINNED]), op(COPY, "copy to device", [PINNED], [B])]
    return [*log, *([["synchronize", COPY]] if mended else []), op(HOST, "load the next", writes=[PINNED])]


def optimizer_against_the_next_gather(mended):
    log = [*FILL, op(COMPUTE, "adam", [A], [A]), *([waits(NCCL, COMPUTE)] if mended else [])]
    return [*log, op(NCCL, "all_gather", [A], [B])]


def slice_by_another_pointer(mended):
    whole, part = (0x1000, 1024), (0x1200, 16)
    log = [new(whole), op(COMPUTE, "fill", writes=[whole]), *([waits(NCCL, COMPUTE)] if mended else [])]
    return [*log, op(NCCL, "send", [part])]


def captured_graph_against_an_eager_writer(mended):
    log = [new(A), new(B), ["capture", "graph", [op(COMPUTE, "mm", [A], [B])]]]
    log += [op(COPY, "static input", writes=[A]), *([waits(COMPUTE, COPY)] if mended else [])]
    return [*log, ["replay", "graph", COMPUTE, "replay"]]


def kernel_on_a_side_stream(mended):
    log = [*FILL, *([waits("side", COMPUTE)] if mended else [])]
    return [*log, op("side", "triton kernel", [A], [A])]


def checkpoint_against_the_optimizer(mended):
    log = [*FILL, waits(COPY, COMPUTE), op(COPY, "copy to host", [A], [PINNED])]
    return [*log, *([waits(COMPUTE, COPY)] if mended else []), op(COMPUTE, "adam", [A], [A])]


def loader_without_record_stream(mended):
    log = [new(A, COPY), op(COPY, "copy to device", [PINNED], [A]), waits(COMPUTE, COPY)]
    log += [op(COMPUTE, "forward", [A])] + ([["record_stream", A[0], COMPUTE]] if mended else [])
    return [*log, freed(A), new(A, COPY), op(COPY, "copy of the next batch", [PINNED], [A])]


def work_dropped(mended):
    log = [*FILL, waits(NCCL, COMPUTE), op(NCCL, "all_reduce", [A], [A]), ["record", "end", NCCL]]
    return [*log, *([["wait", COMPUTE, "end"]] if mended else []), op(COMPUTE, "scale", [A], [A])]


def stream_cached_at_construction(mended):
    log = [new(A, "user"), op("user", "fill", writes=[A]), waits(NCCL, "user" if mended else COMPUTE)]
    return [*log, op(NCCL, "all_reduce", [A], [A])]


@dataclass(frozen=True)
class Case:
    log: Callable[[int], Log]
    kind: str
    edge: tuple[str, str]
    """(stream that should wait, stream that it should wait for)"""
    num_mended: int = 1


CASES = [
    Case(collective_before_its_input, "race", (NCCL, COMPUTE)),
    Case(output_before_wait, "race", (COMPUTE, NCCL)),
    Case(freed_under_copy, "reuse", (COMPUTE, COPY), num_mended=2),
    Case(freed_under_copy_without_pressure, "latent", (COMPUTE, COPY), num_mended=2),
    Case(bucket_refilled_while_reduced, "race", (COMPUTE, REDUCE)),
    Case(bucket_of_two_streams, "race", (REDUCE, "backward 2")),
    Case(hybrid_output_freed_on_its_stream, "reuse", (REDUCE, NCCL)),
    Case(waits_for_itself, "race", (COPY, "reload")),
    Case(clone_after_the_snapshot, "race", (COPY, COMPUTE)),
    Case(freed_after_another_streams_wait, "reuse", (COMPUTE, NCCL)),
    Case(event_recorded_too_early, "race", (COPY, COMPUTE)),
    Case(pinned_buffer_refilled, "race", (HOST, COPY)),
    Case(optimizer_against_the_next_gather, "race", (NCCL, COMPUTE)),
    Case(slice_by_another_pointer, "race", (NCCL, COMPUTE)),
    Case(captured_graph_against_an_eager_writer, "race", (COMPUTE, COPY)),
    Case(kernel_on_a_side_stream, "race", ("side", COMPUTE)),
    Case(checkpoint_against_the_optimizer, "race", (COMPUTE, COPY)),
    Case(loader_without_record_stream, "reuse", (COPY, COMPUTE)),
    Case(work_dropped, "race", (COMPUTE, NCCL)),
    Case(stream_cached_at_construction, "race", (NCCL, "user")),
]


def disjoint_halves():
    first, second = (A[0], 32), (A[0] + 32, 32)
    return [new(A), op(COMPUTE, "a", writes=[first]), op(NCCL, "b", writes=[second])]


def columns_of_a_matrix():
    """Two streams write every other of 8 columns: their spans overlap, their bytes do not."""
    rows = (4, (8, 4), (32, 8))
    even, odd = (A[0], 8 * 32, rows), (A[0] + 4, 8 * 32 - 4, rows)
    return [op(COMPUTE, "even", writes=[even]), op(NCCL, "odd", writes=[odd])]


def read_and_read():
    return [*FILL, waits(NCCL, COMPUTE), op(NCCL, "send", [A]), op(COMPUTE, "use", [A])]


def event_recorded_twice():
    log = [new(A), ["record", "e", COMPUTE], op(COMPUTE, "fill", writes=[A]), ["record", "e", COMPUTE]]
    return [*log, ["wait", NCCL, "e"], op(NCCL, "all_reduce", [A], [A])]


def device_synchronise():
    return [*FILL, ["synchronize_all"], op(NCCL, "all_reduce", [A], [A])]


def host_waits_for_one_stream_and_launches_on_another():
    return [*FILL, ["synchronize", COMPUTE], op(NCCL, "send", [A])]


def waits_over_a_third_stream():
    return [*FILL, waits("relay", COMPUTE), waits(NCCL, "relay"), op(NCCL, "send", [A])]


def fresh_memory_on_a_side_stream():
    """Memory that nobody used before needs no wait, whichever stream it was allocated for."""
    return [op(COMPUTE, "other", writes=[B]), new(A), op(NCCL, "recv", writes=[A])]


def reuse_in_the_same_stream():
    return [*FILL, freed(A), new(A), op(COMPUTE, "next", writes=[A])]


def event_from_before_the_log():
    return [["wait", NCCL, "old"], op(NCCL, "send", [A]), op(NCCL, "recv", writes=[B])]


CLEAN = [
    disjoint_halves, columns_of_a_matrix, read_and_read, event_recorded_twice, device_synchronise,
    host_waits_for_one_stream_and_launches_on_another, waits_over_a_third_stream,
    fresh_memory_on_a_side_stream, reuse_in_the_same_stream,
    event_from_before_the_log,
]  # fmt: skip
