"""Metrics of a machine's ranks: what is served and written; the shipped rules ask for nothing else."""

import http.client
import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import yaml

from aorta.errors import ConfigError
from aorta.records.files import state_name, steps_name
from aorta.records.schema import StepRecord
from aorta.records.state import ProcessState, StateFile, Tally
from aorta.sinks import Place, Sinks, check_target, exporter
from aorta.sinks.exporter import Ranks
from aorta.sinks.prometheus import Address, read_target
from tests.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "example" / "fsdp"
DASHBOARD = ROOT / "docs" / "grafana" / "aorta.json"
ALERTS = ROOT / "docs" / "grafana" / "alerts.yaml"
OF_DEVICES = {
    "aorta_device_used_bytes",
    "aorta_memory_reserved_bytes",
    "aorta_sm_clock_hertz",
    "aorta_power_watts",
}
"""Metrics that the example, recorded on CPUs, has none of."""


def record_of(rank: int) -> list[StepRecord]:
    lines = (EXAMPLE / steps_name(rank)).read_bytes().splitlines()
    return [msgspec.json.decode(line, type=StepRecord) for line in lines]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two ranks on this machine, as a running job leaves it."""
    folder = tmp_path / "nightly"
    folder.mkdir()
    for rank in (0, 1):
        shutil.copy(EXAMPLE / steps_name(rank), folder)
        put_state(folder, rank, socket.gethostname())
    return folder


def put_state(folder: Path, rank: int, host: str, attempt: int = 0) -> None:
    state = ProcessState(
        run_id="run", attempt=attempt, rank=rank, world_size=2, host=host, pid=1, process_start=None,
        started_unix_ns=0, written_unix_ns=0,
    )  # fmt: skip
    path = folder / state_name(rank)
    StateFile(path, 0).write(state)
    tally = Tally(path, attempt)
    for record in record_of(rank):
        tally.add(msgspec.structs.replace(record, tokens=16), None)
    tally.close()


def samples(text: str) -> dict[str, float]:
    return {
        series: float(value)
        for series, value in (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    }


def test_each_metric_has_one_head_and_a_sample_of_each_rank(folder: Path) -> None:
    text = Ranks(folder, 2).page()
    names = re.findall(r"^# TYPE (\S+) (?:gauge|counter)$", text, re.MULTILINE)
    assert sorted(names) == sorted(set(names))
    found = samples(text)
    assert len(found) == text.count("\n") - 2 * len(names)
    for rank in (0, 1):
        labels = f'{{job="nightly",rank="{rank}",world_size="2"}}'
        steps = record_of(rank)
        assert found[f"aorta_steps_total{labels}"] == len(steps) == 32
        assert found[f"aorta_tokens_total{labels}"] == 32 * 16
        assert found[f"aorta_step_seconds{labels}"] == pytest.approx(steps[-1].step_ms / 1e3)
        total_ms = sum(step.step_ms or 0 for step in steps)
        assert found[f"aorta_step_seconds_total{labels}"] == pytest.approx(total_ms / 1e3)


def test_units_are_base_units_and_counters_end_in_total(folder: Path) -> None:
    text = Ranks(folder, 2).page()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        assert re.fullmatch(r"aorta_[a-z][a-z0-9_]*", name)
        assert name.endswith("_total") == (kind == "counter")
        assert not re.search(r"_(ms|us|mb|mib|mhz|w|c)(_total)?$", name)


def test_names_that_a_program_gives_are_made_fit_and_none_is_twice(folder: Path) -> None:
    last = msgspec.structs.replace(record_of(0)[-1], scalars={"my lr": 0.5, "my_lr": 0.25, "Ä\n": 1.0})
    with open(folder / steps_name(0), "ab") as file:
        file.write(msgspec.json.encode(msgspec.structs.replace(last, global_step=99)) + b"\n")
    text = Ranks(folder, 2).page()
    assert 'aorta_my_lr{job="nightly",rank="0",world_size="2"} 0.5\n' in text
    assert text.count("\naorta_my_lr{") == 1


def test_a_jobs_name_is_escaped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AORTA_RUN_ID", 'a "b"\\c\nd')
    assert 'job="a \\"b\\"\\\\c\\nd"' in Ranks(folder, 2).page()


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({"TORCHELASTIC_RUN_ID": "none"}, "nightly"),
        ({"TORCHELASTIC_RUN_ID": "dc64cc9e-ce4d-4c2f-8b54-def048f15836"}, "nightly"),
        ({"TORCHELASTIC_RUN_ID": "seven"}, "seven"),
        ({"SLURM_JOB_NAME": "pretrain"}, "pretrain"),
        ({"SLURM_JOB_NAME": "pretrain", "AORTA_RUN_ID": "mine"}, "mine"),
    ],
)
def test_a_job_has_the_name_that_its_user_gave(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], job: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert f'aorta_steps_total{{job="{job}",rank="0"' in Ranks(folder, 2).page()


def test_ranks_of_other_machines_and_of_earlier_attempts_are_theirs_to_show(folder: Path) -> None:
    put_state(folder, 1, "another-machine")
    assert 'rank="1"' not in Ranks(folder, 2).page()
    put_state(folder, 1, socket.gethostname(), attempt=1)
    assert 'rank="0"' not in Ranks(folder, 2).page()


def test_a_large_job_reads_the_ranks_of_its_machine_alone(folder: Path) -> None:
    put_state(folder, 1, "another-machine")
    ranks = Ranks(folder, exporter.MOST_RANKS + 1)
    assert "aorta_straggler" not in ranks.page()
    assert list(ranks._follower.ranks) == [0]


def test_a_folder_without_ranks_has_no_metric(tmp_path: Path) -> None:
    assert Ranks(tmp_path, 2).page() == ""


# ---- targets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "read"),
    [
        (":9400", Address("127.0.0.1", 9400)),
        ("0.0.0.0:9400", Address("0.0.0.0", 9400)),
        ("[::]:9400", Address("::", 9400)),
        ("node7:9400", Address("node7", 9400)),
        ("metrics/aorta.prom", Path("metrics/aorta.prom")),
        ("aorta.prom", Path("aorta.prom")),
        ("./9400", Path("9400")),
        ("/var/a:9400", Path("/var/a:9400")),
    ],
)
def test_a_target_is_an_address_or_a_file(target: str, read: Address | Path) -> None:
    assert read_target(target) == read


@pytest.mark.parametrize("target", ["9400", ":99999", "0.0.0.0:9400x", "::9400"])
def test_what_is_neither_is_refused_before_the_command_runs(target: str) -> None:
    with pytest.raises(ConfigError, match=f"--to prometheus={re.escape(target)}"):
        check_target(f"prometheus={target}")


# ---- served and written --------------------------------------------------------------------------


@contextmanager
def served(
    folder: Path, say: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, port: int = 0
) -> Iterator[None]:
    monkeypatch.setattr(exporter, "POLL_S", 0.05)
    monkeypatch.setattr(exporter, "BINDS_WITHIN_S", 0.3)
    monkeypatch.setattr(exporter, "_say", say)
    ended = threading.Event()
    address = Address("127.0.0.1", port)
    thread = threading.Thread(target=exporter.serve, args=(address, Ranks(folder, 2), ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(LIMIT_S)


def get(port: int, path: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_metrics_are_served_on_loopback_and_go_on_with_the_job(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with served(folder, said.append, monkeypatch):
        wait_for(lambda: bool(said))
        match = re.fullmatch(r"metrics are at http://127\.0\.0\.1:(\d+)/metrics", said[0])
        assert match is not None
        port = int(match[1])
        status, kind, text = get(port, "/metrics")
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert samples(text)['aorta_global_step{job="nightly",rank="0",world_size="2"}'] == 31
        later = msgspec.structs.replace(record_of(0)[-1], global_step=32)
        with open(folder / steps_name(0), "ab") as file:
            file.write(msgspec.json.encode(later) + b"\n")
        wait_for(lambda: 'aorta_global_step{job="nightly",rank="0",world_size="2"} 32\n' in get(port, "/")[2])
        assert get(port, "/secrets")[0] == 404
    with pytest.raises(ConnectionRefusedError):
        get(port, "/metrics")


def test_a_port_that_is_taken_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exporter, "BINDS_WITHIN_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        target = f":{taken.getsockname()[1]}"
        options = {"target": target, "folder": str(folder), "world_size": 2}
        monkeypatch.setattr("os.nice", lambda increment: 0)
        monkeypatch.setattr("sys.argv", ["exporter", json.dumps(options)])
        monkeypatch.setattr(exporter.signal, "signal", lambda *_: None)
        monkeypatch.setattr(exporter, "_wait_for_end", lambda ended: None)
        exporter.main()
    assert capsys.readouterr().err == (
        f"aorta: --to prometheus={target}: another program has that port; training goes on without it\n"
    )


@pytest.mark.processes
def test_a_file_per_rank_is_whole_and_has_the_last_step(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    sinks = Sinks([f"prometheus={tmp_path}/node/aorta.prom"], Place(folder, 0, 2), said.append)
    assert not sinks.takes_records
    sinks.close()
    assert said == []
    assert sorted(path.name for path in (tmp_path / "node").iterdir()) == [
        "aorta_rank0.prom", "aorta_rank1.prom",
    ]  # fmt: skip
    for rank in (0, 1):
        text = (tmp_path / "node" / f"aorta_rank{rank}.prom").read_text()
        assert f'aorta_steps_total{{job="nightly",rank="{rank}",world_size="2"}} 32\n' in text
        assert f'rank="{1 - rank}"' not in text
        if (promtool := shutil.which("promtool")) is not None:
            checked = subprocess.run(
                [promtool, "check", "metrics"], input=text, capture_output=True, text=True
            )
            assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("variables", "rank", "opens"),
    [
        ({}, 0, True),
        ({}, 1, False),
        ({"RANK": "8", "LOCAL_RANK": "0"}, 8, True),
        ({"RANK": "9", "LOCAL_RANK": "1"}, 9, False),
        ({"SLURM_PROCID": "8", "SLURM_LOCALID": "0"}, 8, True),
        # Processes spawned by one task of Slurm:
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, 3, False),
    ],
)
def test_one_rank_of_a_machine_exports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], rank: int, opens: bool
) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Place(tmp_path, rank, 16).opens("first of machine") is opens


# ---- the rules that ship -------------------------------------------------------------------------


def asked(text: str) -> set[str]:
    return set(re.findall(r"\baorta_[a-z_]+\b", text))


@pytest.fixture
def exported(folder: Path) -> set[str]:
    """Names of what a job exports whose ranks wait for each other."""
    for rank in (0, 1):
        lines = []
        for record in record_of(rank):
            arrives_ms = (1.0, 3.0)[rank]
            calls = [
                msgspec.structs.replace(call, start_ms=arrives_ms + i * 5, end_ms=3.5 + i * 5)
                for i, call in enumerate((record_of(0)[0].collectives or [])[:2])
            ]
            lines.append(
                msgspec.json.encode(
                    msgspec.structs.replace(
                        record, collectives=calls, start_unix_ns=record_of(0)[0].start_unix_ns, tokens=16
                    )
                )
            )
        (folder / steps_name(rank)).write_bytes(b"\n".join(lines) + b"\n")
    return set(re.findall(r"^# TYPE (\S+)", Ranks(folder, 2).page(), re.MULTILINE))


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    return [target["expr"] for panel in panels for target in panel["targets"]] + [
        rule["expr"] for rule in rules
    ]


def test_the_dashboard_and_the_alerts_ask_for_what_is_exported(exported: set[str]) -> None:
    names = set.union(*map(asked, expressions()), asked(DASHBOARD.read_text()), asked(ALERTS.read_text()))
    assert names - exported <= OF_DEVICES
    assert {"aorta_straggler", "aorta_wait_caused_seconds", "aorta_exposed_wait_seconds"} <= names


def test_the_documented_metrics_are_those_that_are_exported(exported: set[str]) -> None:
    section = (ROOT / "docs" / "run.md").read_text().partition("## Sinks")[2]
    assert asked(section) - exported <= OF_DEVICES
    of_account = {name for name in exported if re.search(r"(step|compute|exposed|idle|wait|straggler)", name)}
    assert of_account - asked(section) == set()


def test_every_alert_says_what_to_do(exported: set[str]) -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 3
    for rule in rules:
        assert {"alert", "expr", "for", "labels", "annotations"} == set(rule)
        assert {"summary", "description"} == set(rule["annotations"])


def test_labels_of_the_rules_are_exported() -> None:
    """A query by a label that no sample has would be silent."""
    labels = set(re.findall(r"(?:by|on|without|ignoring) *\(([^)]*)\)", " ".join(expressions())))
    assert {name.strip() for group in labels for name in group.split(",")} <= {"job", "rank", "instance"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool of Prometheus on PATH")
def test_prometheus_reads_every_query(tmp_path: Path) -> None:
    """Its own parser, through a file of rules; Grafana's variables are put in as Grafana does."""
    queries = [query.replace("$instance", ".*").replace("$job", ".*") for query in expressions()]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    for path in (tmp_path / "rules.yaml", ALERTS):
        checked = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True)
        assert checked.returncode == 0, checked
