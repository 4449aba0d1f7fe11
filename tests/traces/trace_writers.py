"""One small capture, written in every format. Times are in µs from START_NS.

    host     step 1 is 0-100, step 2 is 100-200; launches at 10, 20 (all-reduce), 110, 120 (copy), 130
             (its kernel is missing), 140 (copyBuffer); waits 60-95
    stream 1 gemm 30-60                      gemm 130-160   copyBuffer 170-175   unlinked 180-190
    stream 2         ncclDevKernel 50-90
    copies                                          to the device 160-170

span 160, comm 40, compute 75, hidden 10, exposed 30. Step 2 begins at 100: the host's mark, later than
the end of the compute stream's work of step 1.
"""

import csv
import gzip
import io
import json
import sqlite3
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

START_NS = 5_000_000_000_000
US = 1000
GEMM, NCCL, BLIT, OTHER = "Cijk_Alik_Bljk", "ncclDevKernel_Generic_1(x)", "__amd_rocclr_copyBuffer", "late"
KERNELS = [
    # name, stream, start, end, correlation
    (GEMM, 1, 30, 60, 1),
    (NCCL, 2, 50, 90, 2),
    (GEMM, 1, 130, 160, 3),
    (BLIT, 1, 170, 175, 6),
    (OTHER, 1, 180, 190, 99),
]
COPY = ("MEMORY_COPY_HOST_TO_DEVICE", 160, 170, 4)
LAUNCHES = [
    # name, start, end, correlation
    ("hipLaunchKernel", 10, 12, 1),
    ("hipStreamSynchronize", 60, 95, 7),
    ("hipLaunchKernel", 110, 112, 3),
    ("hipMemcpyAsync", 120, 121, 4),
    ("hipLaunchKernel", 130, 131, 5),
    ("hipLaunchKernel", 140, 141, 6),
]
RCCL = ("ncclAllReduce", 19, 25, 2)
RCCL_ARGUMENTS = {"count": "1024", "datatype": "7", "op": "0", "comm": "0x7f00"}
MARKS = [("ProfilerStep#1", 0, 100), ("ProfilerStep#2", 100, 200)]
PID, THREAD = 908, 911


def ns(us: float) -> int:
    return START_NS + round(us * US)


# ---- Kineto ------------------------------------------------------------------------------------


def kineto(rank: int = 0, world_size: int = 1, shift_us: float = 0, **header: Any) -> bytes:
    def event(cat: str, name: str, tid: int, start: float, end: float, **args: Any) -> dict[str, Any]:
        ts = START_NS / US + start + shift_us
        return {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": PID,
            "tid": tid,
            "ts": ts,
            "dur": end - start,
            "args": args,
        }

    events = [event("user_annotation", name, THREAD, start, end) for name, start, end in MARKS]
    events += [event("cuda_runtime", n, THREAD, s, e, correlation=c) for n, s, e, c in [*LAUNCHES, RCCL]]
    events += [event("kernel", n, st, s, e, correlation=c, stream=st, device=0) for n, st, s, e, c in KERNELS]
    events[-4]["args"] |= {
        "Collective name": "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024, "dtype": "Float",
        "Process Group Name": "0", "Process Group Ranks": str(list(range(world_size))),
    }  # fmt: skip
    events.append(event("gpu_memcpy", "Memcpy HtoD", 1, *COPY[1:3], correlation=COPY[3], stream=1, device=0))
    events.append({"ph": "M", "name": "process_name", "pid": PID, "args": {"name": "python"}})
    info = {"rank": rank, "world_size": world_size}
    device = {"id": 0, "name": "a device"}
    body = {"deviceProperties": [device], "distributedInfo": info, "traceEvents": events} | header
    return json.dumps(body).encode()


# ---- rocprofv3 JSON ----------------------------------------------------------------------------

KINDS = [
    ("KERNEL_DISPATCH", ["KERNEL_DISPATCH_NONE", "KERNEL_DISPATCH_ENQUEUE", "KERNEL_DISPATCH_COMPLETE"]),
    ("MEMORY_COPY", ["MEMORY_COPY_NONE", "MEMORY_COPY_HOST_TO_DEVICE", "MEMORY_COPY_DEVICE_TO_DEVICE"]),
    ("HIP_RUNTIME_API_EXT", ["hipLaunchKernel", "hipMemcpyAsync", "hipStreamSynchronize"]),
    ("RCCL_API_EXT", ["ncclAllReduce", "ncclGroupStart", "ncclGroupEnd", "ncclSend", "ncclRecv"]),
    ("MARKER_CORE_RANGE_API", ["roctxThreadRangeA"]),
]  # fmt: skip


def rocprofv3_json(as_list: bool = True, **changes: Any) -> bytes:
    symbols = {name: i for i, name in enumerate((GEMM, NCCL, BLIT, OTHER), start=1)}

    def call(
        kind: int, operation: int, start: float, end: float, correlation: int, **more: Any
    ) -> dict[str, Any]:
        return {
            "size": 48, "kind": kind, "operation": operation, "thread_id": THREAD,
            "correlation_id": {"internal": correlation, "external": 0},
            "start_timestamp": ns(start), "end_timestamp": ns(end),
        } | more  # fmt: skip

    dispatches = [
        call(0, 2, start, end, correlation) | {
            "dispatch_info": {
                "agent_id": {"handle": 20}, "queue_id": {"handle": stream}, "kernel_id": symbols[name],
                "dispatch_id": number, "workgroup_size": {"x": 64, "y": 1, "z": 1},
            },
            "stream_id": {"handle": stream},
        }
        for number, (name, stream, start, end, correlation) in enumerate(KERNELS, start=1)
    ]  # fmt: skip
    arguments = [{"name": name, "type": "int", "value": value} for name, value in RCCL_ARGUMENTS.items()]
    records = {
        "kernel_dispatch": dispatches,
        "memory_copy": [
            call(1, 1, *COPY[1:]) | {
                "src_agent_id": {"handle": 10}, "dst_agent_id": {"handle": 20},
                "stream_id": {"handle": 1}, "bytes": 64,
            }
        ],
        "hip_api": [call(2, KINDS[2][1].index(n), s, e, c) for n, s, e, c in LAUNCHES],
        "rccl_api": [call(3, 0, *RCCL[1:], args=arguments)],
        "marker_api": [call(4, 0, s, e, 100 + i) for i, (_, s, e) in enumerate(MARKS)],
    }  # fmt: skip
    tool = {
        "metadata": {"pid": PID, "node": {"hostname": "a-host"}},
        "agents": [
            {"id": {"handle": 10}, "type": 1, "name": "a CPU"},
            {"id": {"handle": 20}, "type": 2, "name": "gfx950", "product_name": "a device"},
        ],
        "kernel_symbols": [
            {"kernel_id": i, "kernel_name": f"{name}.kd", "formatted_kernel_name": name}
            for name, i in symbols.items()
        ],
        "strings": {
            "buffer_records": [{"kind": kind, "operations": operations} for kind, operations in KINDS],
            "marker_api": [{"key": 100 + i, "value": name} for i, (name, _, _) in enumerate(MARKS)],
        },
        "buffer_records": records | changes,
    }  # fmt: skip
    return json.dumps({"rocprofiler-sdk-tool": [tool] if as_list else tool}).encode()


# ---- rocprofv3 CSV -----------------------------------------------------------------------------


def write_csv_set(folder: Path, prefix: str = "908", newer: bool = True) -> list[Path]:
    """newer: with the columns that later versions added."""
    kernels = [
        {
            "Kind": "KERNEL_DISPATCH", "Agent_Id": "Agent 4", "Queue_Id": stream,
            **({"Stream_Id": stream} if newer else {}),
            "Thread_Id": THREAD, "Dispatch_Id": number, "Kernel_Id": number, "Kernel_Name": name,
            "Correlation_Id": correlation, "Start_Timestamp": ns(start), "End_Timestamp": ns(end),
        }
        for number, (name, stream, start, end, correlation) in enumerate(KERNELS, start=1)
    ]  # fmt: skip
    copies = [
        {
            "Kind": "MEMORY_COPY", "Direction": COPY[0], **({"Stream_Id": 1} if newer else {}),
            "Source_Agent_Id": "Agent 0", "Destination_Agent_Id": "Agent 4", "Correlation_Id": COPY[3],
            "Start_Timestamp": ns(COPY[1]), "End_Timestamp": ns(COPY[2]),
        }
    ]  # fmt: skip

    def api(domain: str, name: str, start: float, end: float, correlation: int) -> dict[str, Any]:
        return {
            "Domain": domain, "Function": name, "Process_Id": PID, "Thread_Id": THREAD,
            "Correlation_Id": correlation, "Start_Timestamp": ns(start), "End_Timestamp": ns(end),
        }  # fmt: skip

    files = {
        "kernel_trace": kernels,
        "memory_copy_trace": copies,
        "hip_api_trace": [api("HIP_RUNTIME_API_EXT", *row) for row in LAUNCHES],
        "rccl_api_trace": [api("RCCL_API_EXT" if newer else "RCCL_API", *RCCL)],
        "marker_api_trace": [api("MARKER_CORE_RANGE_API", *row, 100 + i) for i, row in enumerate(MARKS)],
        "agent_info": [{"Node_Id": 0, "Name": "gfx950"}],
    }
    paths = []
    for name, rows in files.items():
        path = folder / f"{prefix}_{name}.csv"
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), quoting=csv.QUOTE_NONNUMERIC)
            writer.writeheader()
            writer.writerows(rows)
        paths.append(path)
    return paths


# ---- rocpd -------------------------------------------------------------------------------------

GUID = "0000aaaa"
SUFFIX = "_0000aaaa_1111_2222_3333_444455556666"


def write_rocpd(
    path: Path,
    normalised: bool = False,
    views: bool = True,
    without_region: Iterable[int] = (),
    pid: int = PID,
) -> None:
    """normalised: times and places in tables of their own. without_region: kernels (by number) whose
    region name is missing, which the view leaves out."""
    db = sqlite3.connect(path)
    strings: dict[str, int] = {}

    def string(text: str) -> int:
        if text not in strings:
            strings[text] = len(strings) + 1
            insert("string", id=strings[text], string=text)
        return strings[text]

    def table(name: str, *columns: str) -> None:
        listed = ", ".join(f'"{column}"' for column in ("id", "guid", *columns))
        db.execute(f'CREATE TABLE "rocpd_{name}{SUFFIX}" ({listed})')
        db.execute(f'CREATE VIEW "rocpd_{name}" AS SELECT * FROM "rocpd_{name}{SUFFIX}"')

    def insert(table: str, /, **row: Any) -> None:
        row = {"guid": GUID} | row
        columns = ", ".join(f'"{column}"' for column in row)
        marks = ", ".join("?" * len(row))
        db.execute(f'INSERT INTO "rocpd_{table}{SUFFIX}" ({columns}) VALUES ({marks})', list(row.values()))

    place = ("track_id",) if normalised else ("nid", "pid", "tid")
    device_place = () if normalised else ("agent_id", "queue_id", "stream_id")
    times = ("start_id", "end_id") if normalised else ("start", "end")
    table("string", "string")
    table("info_node", "hostname")
    table("info_process", "nid", "pid")
    table("info_thread", "tid")
    table("info_agent", "type", "name", "product_name")
    table("info_kernel_symbol", "kernel_name", "display_name")
    table("event", "category_id", "stack_id", "parent_stack_id", "correlation_id", "extdata")
    table("arg", "event_id", "position", "type", "name", "value")
    if normalised:
        table("track", "nid", "pid", "tid", "agent_id", "queue_id", "stream_id")
        table("timestamp", "value", "phase", "track_id")
    table(
        "kernel_dispatch",
        *place,
        *device_place,
        *times,
        "kernel_id",
        "dispatch_id",
        "region_name_id",
        "event_id",
    )
    copy_place = () if normalised else ("queue_id", "stream_id")
    table(
        "memory_copy",
        *place,
        *copy_place,
        *times,
        "name_id",
        "src_agent_id",
        "dst_agent_id",
        "size",
        "event_id",
    )
    table("region", *place, *times, "name_id", "event_id")

    insert("info_node", id=1, hostname="a-host")
    insert("info_process", id=1, nid=1, pid=pid)
    insert("info_thread", id=1, tid=THREAD)
    insert("info_agent", id=1, type="CPU", name="a CPU", product_name="a CPU")
    insert("info_agent", id=2, type="GPU", name="gfx950", product_name="a device")
    count = {"event": 0, "timestamp": 0, "track": 0}

    def event(category: str, correlation: int, extra: str = "{}") -> int:
        count["event"] += 1
        insert(
            "event", id=count["event"], category_id=string(category), stack_id=correlation,
            parent_stack_id=0, correlation_id=0, extdata=extra,
        )  # fmt: skip
        return count["event"]

    def where(start: float, end: float, stream: int | None) -> dict[str, Any]:
        if not normalised:
            row = {"nid": 1, "pid": 1, "tid": 1, "start": ns(start), "end": ns(end)}
            return row if stream is None else row | {"queue_id": stream, "stream_id": stream}
        count["track"] += 1
        insert(
            "track",
            id=count["track"],
            nid=1,
            pid=pid,
            tid=THREAD,
            agent_id=2,
            queue_id=stream,
            stream_id=stream,
        )
        ids = []
        for time in (start, end):
            count["timestamp"] += 1
            insert("timestamp", id=count["timestamp"], value=ns(time), phase=1, track_id=count["track"])
            ids.append(count["timestamp"])
        return {"track_id": count["track"], "start_id": ids[0], "end_id": ids[1]}

    symbols = {name: i for i, name in enumerate((GEMM, NCCL, BLIT, OTHER), start=1)}
    for name, i in symbols.items():
        insert("info_kernel_symbol", id=i, kernel_name=f"{name}.kd", display_name=name)
    for number, (name, stream, start, end, correlation) in enumerate(KERNELS, start=1):
        row = where(start, end, stream) | ({} if normalised else {"agent_id": 2})
        insert(
            "kernel_dispatch", id=number, kernel_id=symbols[name], dispatch_id=number,
            region_name_id=None if number in without_region else string(""),
            event_id=event("KERNEL_DISPATCH", correlation), **row,
        )  # fmt: skip
    insert(
        "memory_copy", id=1, name_id=string(COPY[0]), src_agent_id=1, dst_agent_id=2, size=64,
        event_id=event("MEMORY_COPY", COPY[3]), **where(COPY[1], COPY[2], 1),
    )  # fmt: skip
    regions = [("HIP_RUNTIME_API_EXT", *row, "{}") for row in LAUNCHES] + [("RCCL_API_EXT", *RCCL, "{}")]
    regions += [
        ("MARKER_CORE_RANGE_API", "roctxThreadRangeA", start, end, 100 + i, json.dumps({"message": name}))
        for i, (name, start, end) in enumerate(MARKS)
    ]
    for number, (category, name, start, end, correlation, extra) in enumerate(regions, start=1):
        made = event(category, correlation, extra)
        insert("region", id=number, name_id=string(name), event_id=made, **where(start, end, None))
        if name == RCCL[0]:
            for position, (argument, value) in enumerate(RCCL_ARGUMENTS.items()):
                insert(
                    "arg",
                    id=position,
                    event_id=made,
                    position=position,
                    type="int",
                    name=argument,
                    value=value,
                )
    if views:
        for view in ROCPD_VIEWS[normalised]:
            db.execute(view)
    db.commit()
    db.close()


ROCPD_VIEWS = {
    False: (
        """CREATE VIEW kernels AS SELECT K.id, K.guid, S.display_name AS name, P.pid, A.id AS agent_abs_index,
           K.dispatch_id, K.stream_id, K.queue_id, K.start, K."end", E.stack_id, E.correlation_id AS corr_id
           FROM rocpd_kernel_dispatch K JOIN rocpd_info_agent A ON A.id = K.agent_id
           JOIN rocpd_event E ON E.id = K.event_id JOIN rocpd_string R ON R.id = K.region_name_id
           JOIN rocpd_info_kernel_symbol S ON S.id = K.kernel_id JOIN rocpd_info_process P ON P.id = K.pid""",
        """CREATE VIEW memory_copies AS SELECT M.start, M."end", N.string AS name, P.pid, M.stream_id,
           M.src_agent_id AS src_agent_abs_index, M.dst_agent_id AS dst_agent_abs_index, E.stack_id
           FROM rocpd_memory_copy M JOIN rocpd_string N ON N.id = M.name_id
           JOIN rocpd_event E ON E.id = M.event_id JOIN rocpd_info_process P ON P.id = M.pid""",
        """CREATE VIEW regions AS SELECT R.id, C.string AS category, N.string AS name, P.pid, T.tid, R.start,
           R."end", R.event_id, E.stack_id, E.extdata FROM rocpd_region R
           JOIN rocpd_event E ON E.id = R.event_id JOIN rocpd_string N ON N.id = R.name_id
           JOIN rocpd_string C ON C.id = E.category_id JOIN rocpd_info_process P ON P.id = R.pid
           JOIN rocpd_info_thread T ON T.id = R.tid""",
    ),
    True: (
        """CREATE VIEW kernels AS SELECT K.id, S.display_name AS name, T.pid, T.agent_id AS
           agent_absolute_index, K.dispatch_id, T.queue_id, T.stream_id, DS.value AS start, DE.value AS "end",
           E.stack_id, E.correlation_id FROM rocpd_kernel_dispatch K JOIN rocpd_track T ON T.id = K.track_id
           JOIN rocpd_event E ON E.id = K.event_id JOIN rocpd_string R ON R.id = K.region_name_id
           JOIN rocpd_info_kernel_symbol S ON S.id = K.kernel_id
           JOIN rocpd_timestamp DS ON DS.id = K.start_id JOIN rocpd_timestamp DE ON DE.id = K.end_id""",
        """CREATE VIEW memory_copies AS SELECT DS.value AS start, DE.value AS "end", N.string AS name, T.pid,
           T.stream_id, M.src_agent_id AS src_agent_absolute_index,
           M.dst_agent_id AS dst_agent_absolute_index, E.stack_id FROM rocpd_memory_copy M
           JOIN rocpd_track T ON T.id = M.track_id JOIN rocpd_string N ON N.id = M.name_id
           JOIN rocpd_event E ON E.id = M.event_id JOIN rocpd_timestamp DS ON DS.id = M.start_id
           JOIN rocpd_timestamp DE ON DE.id = M.end_id""",
        """CREATE VIEW regions AS SELECT R.id, C.string AS category, N.string AS name, T.pid, T.tid,
           DS.value AS start, DE.value AS "end", R.event_id, E.stack_id, E.correlation_id, E.extdata
           FROM rocpd_region R JOIN rocpd_event E ON E.id = R.event_id JOIN rocpd_track T ON T.id = R.track_id
           JOIN rocpd_string N ON N.id = R.name_id JOIN rocpd_string C ON C.id = E.category_id
           JOIN rocpd_timestamp DS ON DS.id = R.start_id JOIN rocpd_timestamp DE ON DE.id = R.end_id""",
    ),
}


# ---- Nsight Systems ----------------------------------------------------------------------------

NSYS_EPOCH_NS = 1_790_000_000_000_000_000


def write_nsys(path: Path, pids: Iterable[int] = (PID,), leave_out: Iterable[str] = ()) -> None:
    """leave_out: tables that the report did not have."""
    schema = {
        "StringIds": "id INTEGER PRIMARY KEY, value TEXT",
        "TARGET_INFO_GPU": "id INTEGER, name TEXT",
        "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT",
        "TARGET_INFO_SYSTEM_ENV": "globalVid INTEGER, devStateName TEXT, name TEXT, nameEnum INTEGER,"
        " value TEXT",
        "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,"
        " streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER,"
        " shortName INTEGER",
        "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,"
        " streamId INTEGER, correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER",
        "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER,"
        " nameId INTEGER",
        "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER,"
        " globalTid INTEGER",
        "DIAGNOSTIC_EVENT": "timestamp INTEGER, severity INTEGER, text TEXT",
    }  # fmt: skip
    left_out = set(leave_out)
    db = sqlite3.connect(path)
    for table, columns in schema.items():
        if table not in left_out:
            db.execute(f"CREATE TABLE {table} ({columns})")
    strings: dict[str, int] = {}

    def insert(table: str, *values: Any) -> None:
        if table not in left_out:
            db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)

    def string(text: str) -> int:
        if text not in strings:
            strings[text] = len(strings) + 1
            insert("StringIds", strings[text], text)
        return strings[text]

    insert("TARGET_INFO_GPU", 0, "a device")
    insert("TARGET_INFO_SESSION_START_TIME", NSYS_EPOCH_NS, "", "")
    insert("TARGET_INFO_SYSTEM_ENV", 0, "", "Hostname", 0, "a-host")
    for device, pid in enumerate(pids):
        process, thread = (7 << 48) + (pid << 24), (7 << 48) + (pid << 24) + THREAD
        for name, stream, start, end, correlation in KERNELS:
            insert(
                "CUPTI_ACTIVITY_KIND_KERNEL", ns(start), ns(end), device, 1, stream, correlation, process,
                string(name), string(name.partition("(")[0]),
            )  # fmt: skip
        insert("CUPTI_ACTIVITY_KIND_MEMCPY", ns(COPY[1]), ns(COPY[2]), device, 1, 1, COPY[3], process, 64, 1)
        for name, start, end, correlation in [*LAUNCHES, ("hipExtLaunchKernel", 20, 21, 2)]:
            name = name.replace("hip", "cuda").replace("ExtLaunch", "Launch") + "_v7000"
            insert("CUPTI_ACTIVITY_KIND_RUNTIME", ns(start), ns(end), thread, correlation, string(name))
        for name, start, end in [*MARKS, RCCL[:3]]:
            insert("NVTX_EVENTS", ns(start), ns(end), 59, None, string(name), thread)
    db.commit()
    db.close()


# ---- all ---------------------------------------------------------------------------------------


def write_kineto(path: Path) -> None:
    path.write_bytes(kineto())


def write_kineto_gz(path: Path) -> None:
    path.write_bytes(gzip.compress(kineto()))


def write_kineto_tar(path: Path) -> None:
    write_tar(path, [kineto(rank, 2) for rank in range(2)])


def write_tar(path: Path, traces: Iterable[bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for rank, data in enumerate(traces):
            member = tarfile.TarInfo(f"traces/rank{rank}.json")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def write_rocprofv3_json(path: Path) -> None:
    path.write_bytes(rocprofv3_json())


def write_csv(path: Path) -> None:
    """The kernels are at path, the other tables beside it."""
    for made in write_csv_set(path.parent, path.name.removesuffix("_kernel_trace.csv")):
        assert made.exists()


def write_rocpd_normalised(path: Path) -> None:
    write_rocpd(path, normalised=True)


WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "kineto": ("trace.json", write_kineto),
    "kineto-gz": ("trace.json.gz", write_kineto_gz),
    "kineto-tar": ("traces.tar.gz", write_kineto_tar),
    "rocprofv3-json": ("908_results.json", write_rocprofv3_json),
    "rocprofv3-csv": ("908_kernel_trace.csv", write_csv),
    "rocpd-inline": ("908_results.db", write_rocpd),
    "rocpd-normalised": ("908_results.db", write_rocpd_normalised),
    "nsys": ("report1.sqlite", write_nsys),
}
"""Per format the name of a file and what writes it."""


def write_rpd(path: Path) -> None:
    """A file of rocmProfileData: two kernels and a copy, launched in a marked step."""
    db = sqlite3.connect(path)
    for table, columns in (
        ("string", "string"),
        ("op", "gpuId, queueId, start, end, description_id, opType_id"),
        ("api", "pid, tid, start, end, apiName_id, args_id"),
        ("api_ops", "api_id, op_id"),
        ("kernelapi", "api_ptr_id, stream"),
        ("copyapi", "api_ptr_id, stream"),
    ):
        db.execute(f"CREATE TABLE rocpd_{table} (id INTEGER PRIMARY KEY, {columns})")
    texts = ("", "gemm", "ncclDevKernel_Generic_1", "KernelExecution", "CopyDeviceToHost", "hipLaunchKernel")
    texts += ("hipMemcpyAsync", "UserMarker", "ProfilerStep#1")
    number = {text: place for place, text in enumerate(texts)}
    db.executemany("INSERT INTO rocpd_string VALUES (?, ?)", [(i, text) for text, i in number.items()])
    kernel, launch = number["KernelExecution"], number["hipLaunchKernel"]
    ops = (
        (1, 2, 0, 1_000_000, 3_000_000, number["gemm"], kernel),
        (2, 2, 1, 2_000_000, 5_000_000, number["ncclDevKernel_Generic_1"], kernel),
        (3, 2, 0, 5_000_000, 6_000_000, number[""], number["CopyDeviceToHost"]),
    )
    db.executemany("INSERT INTO rocpd_op VALUES (?, ?, ?, ?, ?, ?, ?)", ops)
    calls = [
        (10 + place, PID, 7, 100_000 * place, 100_000 * place + 50_000, name, number[""])
        for place, name in enumerate((launch, launch, number["hipMemcpyAsync"]), 1)
    ]
    calls.append((20, PID, 7, 50_000, 900_000, number["UserMarker"], number["ProfilerStep#1"]))
    db.executemany("INSERT INTO rocpd_api VALUES (?, ?, ?, ?, ?, ?, ?)", calls)
    db.executemany("INSERT INTO rocpd_api_ops (api_id, op_id) VALUES (?, ?)", [(11, 1), (12, 2), (13, 3)])
    db.executemany(
        "INSERT INTO rocpd_kernelapi (api_ptr_id, stream) VALUES (?, ?)", [(11, "0x0"), (12, "0x9")]
    )
    db.execute("INSERT INTO rocpd_copyapi (api_ptr_id, stream) VALUES (13, '0x0')")
    db.commit()
    db.close()
