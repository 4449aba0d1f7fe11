"""What a --log-dir is, by its content; faults of folders, archives, caches."""

import functools
import gzip
import io
import json
import os
import sys
import tarfile
import types

import pytest

from aorta.errors import TraceError
from aorta.timeline.overlap import total
from aorta.traces.quality import facts, verdict, verdict_of_ranks
from aorta.traces.sniff import HEAD_BYTES
from aorta.traces.sources import map_ranks, open_source, recognise
from aorta.traces.steps import Reading
from tests.traces.trace_writers import (
    WRITERS,
    kineto,
    rocprofv3_json,
    write_csv_set,
    write_nsys,
    write_rocpd,
)

KINDS = {"kineto": "kineto", "kineto-gz": "kineto", "kineto-tar": "kineto", "nsys": "nsys"}


@pytest.mark.parametrize("whole_folder", [True, False])
@pytest.mark.parametrize("name", WRITERS)
def test_a_file_or_its_folder_is_recognised(tmp_path, name, whole_folder):
    file, write = WRITERS[name]
    write(tmp_path / file)
    assert recognise(tmp_path if whole_folder else tmp_path / file) == KINDS.get(name, "rocprofv3")


@pytest.mark.parametrize("name", ["kineto", "rocprofv3-json", "rocpd-inline", "nsys"])
def test_names_do_not_decide(tmp_path, name):
    WRITERS[name][1](tmp_path / "what.db")
    assert recognise(tmp_path / "what.db") == KINDS.get(name, "rocprofv3")


def test_records(tmp_path):
    (tmp_path / "rank_0_metrics.jsonl").write_text("")
    assert recognise(tmp_path) == "records"


def write(folder, **ranks):
    """Files of ranks: name=rank, or (rank, world size)."""
    for name, rank in ranks.items():
        rank, size = rank if isinstance(rank, tuple) else (rank, len(ranks))
        (folder / f"{name}.json").write_bytes(kineto(rank, size))


def test_ranks_come_from_the_trace_and_not_from_the_name(tmp_path):
    write(tmp_path, a_rank7=1, b_rank8=0)
    source = open_source(tmp_path)
    assert source.ranks == [0, 1]
    assert source.read(0).rank == 0
    assert "b_rank8" in source.files[0].name


def test_ranks_that_nothing_tells_are_assumed_in_order_of_names(tmp_path):
    for pid in (10, 9, 100):
        (tmp_path / f"{pid}_results.json").write_bytes(rocprofv3_json())
    source = open_source(tmp_path)
    assert [source.files[rank].name.rsplit("/", 1)[1] for rank in source.ranks] == [
        "9_results.json", "10_results.json", "100_results.json",
    ]  # fmt: skip
    trace = source.read(2)
    assert (trace.rank, trace.timeline.rank, trace.steps[0].rank) == (2, 2, 2)
    assert any("2 is assumed" in note for note in trace.quality.notes)


def test_one_capture_in_several_formats_is_read_once(tmp_path):
    write_rocpd(tmp_path / "908_results.db")
    (tmp_path / "908_results.json").write_bytes(rocprofv3_json())
    write_csv_set(tmp_path, "908")
    source = open_source(tmp_path)
    assert [file.format for file in source.files.values()] == ["rocprofv3-json"]
    assert "exists as" in source.notes[0]


def test_other_files_of_a_folder_do_not_matter(tmp_path):
    write(tmp_path, rank0=0, rank1=1)
    (tmp_path / "run.json").write_text('{"schema": 1}')
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / ".hidden.json").write_text("")
    deep = tmp_path / "host"
    deep.mkdir()
    (deep / "x.csv").write_text("a,b\n1,2\n")
    assert open_source(tmp_path).ranks == [0, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda d: None, "holds neither rank_<n>_metrics.jsonl nor Kineto", id="empty-folder"),
        pytest.param(lambda d: (d / "a.json").write_bytes(b""), "a.json is empty", id="empty-file"),
        pytest.param(lambda d: (d / "a.json").write_bytes(b" \n"), "a.json is empty", id="blank-file"),
        pytest.param(lambda d: (d / "a.json").write_bytes(b'{"a": 1}'), "a.json is none", id="other-json"),
        pytest.param(
            lambda d: (d / "a.json.gz").write_bytes(b"\x1f\x8bxx"), "damaged gzip", id="damaged-gzip"
        ),
        pytest.param(
            lambda d: write(d, a=0, b=0), "rank 0 appears twice, in .*a.json and .*b.json", id="twice"
        ),
        pytest.param(lambda d: write(d, a=(0, 2), b=(1, 4)), "mixes runs of 2 and 4 ranks", id="mixed-sizes"),
        pytest.param(lambda d: write(d, a=(0, 2), b=(5, 2)), "holds rank 5 of a run of 2", id="beyond"),
        pytest.param(
            lambda d: (write(d, a=(0, 1)), write_nsys(d / "b.sqlite")),
            "mixes kineto and nsys",
            id="mixed-kinds",
        ),
        pytest.param(
            lambda d: (
                (d / "908_results.json").write_bytes(rocprofv3_json()),
                (d / "rank1_results.json").write_bytes(rocprofv3_json()),
            ),
            "908_results.json does not say its rank",
            id="some-ranks-told",
        ),
    ],
)
def test_a_folder_that_is_no_run_is_one_clear_line(tmp_path, make, message):
    make(tmp_path)
    with pytest.raises(TraceError, match=message) as error:
        open_source(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.json", b'{"a": 1}', "neither traceEvents nor rocprofiler-sdk-tool"),
        ("x.json", b'{"schema":2,"rank":0,"world_size":1}', "give the folder"),
        ("x.txt", b"hello", "is not one of Kineto"),
        ("x.csv", b"a,b\n1,2\n", "is not one of Kineto"),
        ("x.tar", b"hello", "no archive that can be read"),
        ("x.db", b"SQLite format 3\0" + b"\0" * 100, "x.db"),
    ],
)
def test_a_file_that_is_no_trace_is_one_clear_line(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TraceError, match=message) as error:
        recognise(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(TraceError, match="there is no file or folder"):
        recognise(tmp_path / "none")


def test_truncated_json_is_found_when_it_is_read(tmp_path):
    (tmp_path / "rank0.json").write_bytes(kineto()[:-40])
    source = open_source(tmp_path)
    with pytest.raises(TraceError, match="not a readable Kineto trace"):
        source.read(0)


def test_a_rank_that_a_source_lacks(tmp_path):
    write(tmp_path, a=0)
    with pytest.raises(TraceError, match="holds no rank 3; it has 0"):
        open_source(tmp_path).read(3)


def test_some_ranks_of_a_run_are_read(tmp_path):
    write(tmp_path, a=(3, 8))
    source = open_source(tmp_path)
    assert (source.ranks, source.world_size, source.num_ranks) == ([3], 8, 8)
    write(tmp_path, b=(5, 8))
    assert open_source(tmp_path).ranks == [3, 5]


def test_ranks_missing_between_others_are_ranks_of_the_run(tmp_path):
    for rank in (0, 5):
        (tmp_path / f"rank{rank}_results.json").write_bytes(rocprofv3_json())
    assert open_source(tmp_path).num_ranks == 6


def test_a_large_list_is_not_read_for_a_key(tmp_path, monkeypatch):
    """Data sets are such lists, of many GB."""
    (tmp_path / "data.json").write_text(f"[{'0, ' * HEAD_BYTES}0]")
    monkeypatch.setattr("aorta.traces.sniff.read_bytes", None)
    with pytest.raises(TraceError, match="data.json is none"):
        open_source(tmp_path)


def test_a_rank_told_only_after_a_large_header(tmp_path):
    padding = [{"ph": "M", "name": "x" * 1000} for _ in range(300)]
    data = json.loads(kineto(1, 2))
    data["traceEvents"] = padding + data["traceEvents"]
    body = {"traceEvents": data["traceEvents"], "distributedInfo": data["distributedInfo"]}
    (tmp_path / "t.json").write_text(json.dumps(body))
    assert open_source(tmp_path).ranks == [1]
    (tmp_path / "t.json").write_bytes(gzip.compress(json.dumps(body).encode()))
    assert open_source(tmp_path).ranks == [1]


# ---- archives ----------------------------------------------------------------------------------


def archive(path, *members):
    with tarfile.open(path, "w:gz") as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("name", ["../rank0.json", "/tmp/rank0.json", "a/../../rank0.json", "..\\rank0.json"])
def test_a_member_that_leaves_its_folder_is_refused(tmp_path, name):
    archive(tmp_path / "x.tar.gz", (name, kineto()))
    with pytest.raises(TraceError, match="leaves the archive's folder"):
        open_source(tmp_path / "x.tar.gz")
    assert [p.name for p in tmp_path.iterdir()] == ["x.tar.gz"]


def test_links_and_devices_of_an_archive_are_left_alone(tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_bytes(kineto())
    with tarfile.open(tmp_path / "x.tar", "w") as file:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            info = tarfile.TarInfo("rank0.json")
            info.type, info.linkname = kind, str(secret)
            file.addfile(info)
    with pytest.raises(TraceError, match="holds no trace"):
        open_source(tmp_path / "x.tar")


def test_packed_members_and_others(tmp_path):
    archive(
        tmp_path / "x.tgz",
        ("run/rank0.json.gz", gzip.compress(kineto(0, 2))),
        ("run/rank1.json", kineto(1, 2)),
        ("run/._rank1.json", kineto(1, 2)),
        ("run/README", b"hello"),
        ("run/empty", b""),
    )
    source = open_source(tmp_path / "x.tgz")
    assert source.ranks == [0, 1]
    assert total(source.read(0).timeline) == total(source.read(1).timeline)


def test_a_cut_archive_is_one_clear_line(tmp_path):
    path = tmp_path / "x.tar.gz"
    archive(path, ("rank0.json", kineto() * 50))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(TraceError, match="archive|gzip") as error:
        open_source(path).read(0)
    assert "\n" not in str(error.value)


def test_what_must_be_unpacked_first(tmp_path):
    write_nsys(tmp_path / "a.sqlite")
    archive(tmp_path / "x.tar.gz", ("a.sqlite", (tmp_path / "a.sqlite").read_bytes()))
    with pytest.raises(TraceError, match=r"unpack it to read a\.sqlite"):
        open_source(tmp_path / "x.tar.gz")


# ---- many ranks --------------------------------------------------------------------------------


def comm_ms(source, rank, scale=1.0):
    assert source.ranks == [rank] or scale == 1.0
    return rank, scale * total(source.read(rank).timeline).comm_ms


def killed(source, rank):
    os._exit(9)


@pytest.fixture
def source(tmp_path):
    write(tmp_path, a=0, b=1, c=2)
    return open_source(tmp_path)


@pytest.mark.heavy
def test_ranks_in_this_process_and_in_others_give_the_same(source):
    here = list(map_ranks(comm_ms, source))
    assert here == [(rank, pytest.approx(0.040)) for rank in range(3)]
    there = list(map_ranks(functools.partial(comm_ms, scale=2.0), source, jobs=2))
    assert there == [(rank, pytest.approx(0.080)) for rank in range(3)]


@pytest.mark.heavy
def test_a_fault_in_another_process_is_its_own_line(source, tmp_path):
    (tmp_path / "b.json").write_bytes(kineto(1, 3)[:-30])
    with pytest.raises(TraceError, match=r"b\.json is not a readable Kineto trace"):
        list(map_ranks(comm_ms, source, jobs=2))


@pytest.mark.heavy
def test_a_process_that_is_killed_is_one_clear_line(source):
    with pytest.raises(TraceError, match="was killed, for want of memory"):
        list(map_ranks(killed, source, jobs=2))


def test_dask_that_is_not_installed(source, monkeypatch):
    monkeypatch.setitem(sys.modules, "dask.distributed", None)
    with pytest.raises(TraceError, match=r"pip install dask\[distributed\]"):
        list(map_ranks(comm_ms, source, dask="tcp://127.0.0.1:1"))


class Cluster:
    """Stands in for dask.distributed.Client: a scheduler with two threads."""

    def __init__(self, address, timeout):
        if address == "tcp://nowhere":
            raise OSError("timed out\nafter 10 s")
        self.most = self.running = 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def nthreads(self):
        return {"worker": 2}

    def submit(self, function, *arguments, pure):
        self.running += 1
        assert self.running <= 4
        result = function(*arguments)

        def give():
            self.running -= 1
            return result

        return types.SimpleNamespace(result=give)


def test_dask_runs_the_same_function(source, monkeypatch):
    module = types.ModuleType("dask.distributed")
    module.Client = Cluster
    monkeypatch.setitem(sys.modules, "dask", types.ModuleType("dask"))
    monkeypatch.setitem(sys.modules, "dask.distributed", module)
    assert list(map_ranks(comm_ms, source, dask="tcp://somewhere")) == list(map_ranks(comm_ms, source))
    with pytest.raises(TraceError, match="no dask scheduler answers at tcp://nowhere: timed out after 10 s"):
        list(map_ranks(comm_ms, source, dask="tcp://nowhere"))


# ---- nothing is written ------------------------------------------------------------------------


def test_nothing_is_written_beside_the_traces(tmp_path, source):
    before = sorted(tmp_path.iterdir())
    Reading().read(source, 0)
    assert sorted(tmp_path.iterdir()) == before


# ---- quality -----------------------------------------------------------------------------------


def texts(trace):
    return [f"{finding.severity}: {finding.text}" for finding in verdict(trace)]


def changed(change):
    from aorta.traces.kineto import parse_kineto

    data = json.loads(kineto())
    data["traceEvents"] = [event for event in data["traceEvents"] if change(event) is not False]
    return parse_kineto(json.dumps(data).encode(), "rank0.json")


def test_missing_streams_are_said():
    """As of MI300X with ROCm 7.0.1: launches of a stream whose kernels never appear."""
    trace = changed(lambda e: not (e.get("cat") == "kernel" and e["tid"] == 1))
    assert any("warning: there are collectives but no other kernel" in text for text in texts(trace))
    assert any("whole streams are missing" in text for text in texts(trace))


def test_clocks_that_disagree_are_said():
    def early(event):
        if event.get("cat") == "kernel" and event["tid"] == 1:
            event["ts"] -= 120

    assert "by up to 100.0 µs" in next(
        text for text in texts(changed(early)) if "before their launch" in text
    )


def test_unequal_ranks_are_said(source):
    ranks = [facts(t := source.read(r), total(t.timeline)) for r in source.ranks]
    assert not list(verdict_of_ranks(ranks))
    fewer = ranks[1]._replace(
        num_kernels=2, num_collectives=0, steps=(1,), start_unix_ns=ranks[0].end_unix_ns + 1
    )
    found = [finding.text for finding in verdict_of_ranks([ranks[0], fewer])]
    assert found[0].startswith("ranks hold unequal numbers of collectives: rank 1 0, rank 0 1")
    assert found[1].startswith("ranks hold unequal numbers of kernels")
    assert "starts after rank 0 has ended" in found[2]
    assert found[3] == "1 of 2 steps are not on all ranks"
