"""Hostile input: each gives numbers or one line, within 1 GB and 5 s of CPU time, and nothing leaks.

    python benchmarks/reliability/hostile.py --output hostile.csv [-k WORD]

Groups: bomb (traces that grow or never end), folder (output folders that vanish or are not what they seem),
disk (a limit on file size instead of a full disk), clock (the system clock jumps), process (what a program
does to itself and to the process that writes), injection (markup and escapes in names), secret (tokens in
arguments and environment). Exit status 1 where one case fails.
"""

import gzip
import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import arguments, write  # noqa: E402

EXAMPLE = ROOT / "docs" / "example" / "ddp"
MAX_CPU_S, MAX_RSS_MB, LIMIT_S = 5.0, 1024, 120
LOOP = """
import os, shutil, sys, time, aorta
folder = sys.argv[1]
with aorta.instrument(folder) as recorder:
    for number in range(30):
        with recorder.step() as step:
            step.log(loss=1.0)
            time.sleep(0.005)
        if number == 10:
            exec(sys.argv[2])
print("trained")
"""


@dataclass
class Case:
    group: str
    what: str
    verdict: str = "survived"
    answer: str = ""
    cpu_s: float = 0.0
    peak_mb: int = 0
    faults: list[str] = field(default_factory=list)


CASES: list[tuple[str, str, Callable[[Case, Path], None]]] = []


def case(group: str, what: str) -> Callable[[Callable[[Case, Path], None]], Callable[[Case, Path], None]]:
    def add(function: Callable[[Case, Path], None]) -> Callable[[Case, Path], None]:
        CASES.append((group, what, function))
        return function

    return add


def command(row: Case, arguments: list[str], codes: tuple[int, ...] = (0, 2), **environment: str) -> str:
    """Runs aorta with `arguments`; notes time, memory, tracebacks and other exit codes than `codes`."""
    run = [sys.executable, "-m", "aorta", *arguments]
    return process(row, run, codes, **environment)


def process(row: Case, run: list[str], codes: tuple[int, ...] = (0,), **environment: str) -> str:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", **environment}
    wrapped = [sys.executable, "-c", PEAK, *run]
    try:
        ended = subprocess.run(
            wrapped, capture_output=True, env=env, timeout=LIMIT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        row.faults.append(f"not ended after {LIMIT_S} s")
        return ""
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = (ended.stdout + ended.stderr).decode(errors="replace")
    text, _, peak = text.rpartition("peak_kb=")
    row.cpu_s += round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2)
    row.peak_mb = max(row.peak_mb, int(peak or 0) // 1024)
    if "Traceback" in text:
        row.faults.append("traceback: " + text.strip().splitlines()[-1][:200])
    if ended.returncode not in codes:
        row.faults.append(f"exit status {ended.returncode}")
    return text


PEAK = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
sys.stderr.write("peak_kb=%d" % resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def report(row: Case, path: Path, out: Path) -> str:
    """`aorta report` of what a hostile hand wrote; within the limits of time and memory."""
    text = command(row, ["report", str(path), "-o", str(out)])
    if row.cpu_s > MAX_CPU_S:
        row.faults.append(f"{row.cpu_s} s of CPU time")
    if row.peak_mb > MAX_RSS_MB:
        row.faults.append(f"{row.peak_mb} MB")
    lines = [line for line in text.splitlines() if line.startswith(("error", "Error"))]
    row.answer = (lines or text.strip().splitlines() or ["(nothing printed)"])[0][:160]
    return text


def chunks(head: bytes, body: bytes, num: int, tail: bytes) -> Iterator[bytes]:
    yield head
    for _ in range(num):
        yield body
    yield tail


BOMBS: dict[str, tuple[bytes, bytes, int, bytes]] = {
    "3 GB of spaces after traceEvents": (b'{"traceEvents":[', b" " * (1 << 20), 3000, b"]}"),
    "10 GB of zeros": (b"", b"\0" * (1 << 20), 10_000, b""),
    "3 GB of one string": (b'{"traceEvents":[{"name":"', b"a" * (1 << 20), 3000, b'"}]}'),
    "20 million opening brackets": (b'{"traceEvents":', b"[" * (1 << 20), 20, b""),
    "3 GB of digits": (b'{"traceEvents":[{"ts":', b"9" * (1 << 20), 3000, b"}]}"),
    "2 GB of empty events": (b'{"traceEvents":[', b"{}," * (1 << 18), 2700, b"{}]}"),
    "1 GB of keys that differ": (b'{"traceEvents":[],"a":{', b'"k":1,' * (1 << 17), 1300, b'"z":1}}'),
}


def bomb(name: str) -> Callable[[Case, Path], None]:
    def write(row: Case, place: Path) -> None:
        path = place / "rank_0.json.gz"
        with gzip.open(path, "wb", compresslevel=1) as file:
            for part in chunks(*BOMBS[name]):
                file.write(part)
        report(row, path, place / "out")

    return write


for _name in BOMBS:
    case("bomb", _name)(bomb(_name))


@case("bomb", "FIFO named as a trace")
def fifo(row: Case, place: Path) -> None:
    (place / "traces").mkdir()
    os.mkfifo(place / "traces" / "rank_0.json")
    report(row, place / "traces", place / "out")


@case("bomb", "link to /dev/zero named as a trace")
def endless(row: Case, place: Path) -> None:
    (place / "rank_0.json").symlink_to("/dev/zero")
    report(row, place / "rank_0.json", place / "out")


@case("bomb", "tar with paths that climb out")
def climbing_tar(row: Case, place: Path) -> None:
    with tarfile.open(place / "traces.tar", "w") as archive:
        for name in ("../../escaped.json", "/tmp/aorta_escaped.json", "rank_0.json"):
            member = tarfile.TarInfo(name)
            member.size = 2
            archive.addfile(member, io.BytesIO(b"{}"))
    report(row, place / "traces.tar", place / "out")
    if Path("/tmp/aorta_escaped.json").exists() or (place.parent.parent / "escaped.json").exists():
        row.faults.append("a member was written outside")


@case("bomb", "tar of 20 GB in a sparse member")
def sparse_tar(row: Case, place: Path) -> None:
    member = tarfile.TarInfo("rank_0.json")
    member.size = 20 << 30
    with open(place / "traces.tar", "wb") as file:
        file.write(member.tobuf())
        file.truncate(512 + (20 << 30))
    report(row, place / "traces.tar", place / "out")


@case("bomb", "one line of records of 1 GB")
def long_line(row: Case, place: Path) -> None:
    run = place / "run"
    subprocess.run(["cp", "-r", str(EXAMPLE), str(run)], check=True)
    with open(run / "rank_0_metrics.jsonl", "ab") as file:
        file.write(b'{"rank":0,"global_step":')
        for _ in range(1024):
            file.write(b"1" * (1 << 20))
    report(row, run, place / "out")


def loop(row: Case, place: Path, at_step_10: str, codes: tuple[int, ...] = (0,), **environment: str) -> Path:
    """Trains 30 steps with the instrument; `at_step_10` happens in between. Training must go on."""
    folder = place / "run"
    text = process(row, [sys.executable, "-c", LOOP, str(folder), at_step_10], codes, **environment)
    if "trained" not in text:
        row.faults.append("training did not end")
    words = [line for line in text.splitlines() if "aorta" in line or "record" in line]
    row.answer = (words or [""])[-1][:160]
    return folder


FOLDERS = {
    "removed in the middle": "shutil.rmtree(folder)",
    "replaced by a file": "shutil.rmtree(folder); open(folder, 'w').close()",
    "moved away": "os.rename(folder, folder + '_moved')",
    "records truncated": "open(folder + '/rank_0_metrics.jsonl', 'w').close()",
}


def noticed(row: Case, place: Path, code: str) -> None:
    folder = loop(row, place, code)
    out = command(row, ["report", str(folder), "-o", str(place / "out")])
    row.answer = row.answer or (out.strip().splitlines() or [""])[0][:160]


for _name, _code in FOLDERS.items():
    case("folder", f"output folder {_name}")(partial(noticed, code=_code))


@case("folder", "a link planted where the page is written")
def planted_link(row: Case, place: Path) -> None:
    victim = place / "victim"
    victim.write_text("precious")
    (place / "out").mkdir()
    for name in (".report.html.tmp", "report.html.tmp", ".summary.json.tmp"):
        (place / "out" / name).symlink_to(victim)
    report(row, EXAMPLE, place / "out")
    if victim.read_text() != "precious":
        row.faults.append("a file behind a link was overwritten")


@case("folder", "a name with spaces, quotes and a newline")
def odd_name(row: Case, place: Path) -> None:
    odd = place / "a 'run' \"of\"\nmine"
    subprocess.run(["cp", "-r", str(EXAMPLE), str(odd)], check=True)
    report(row, odd, place / "out")


@case("folder", "read-only output")
def read_only(row: Case, place: Path) -> None:
    (place / "file").write_text("")
    report(row, EXAMPLE, place / "file")


@case("disk", "files limited to 4 kB: training goes on, the loss is counted")
def full_disk(row: Case, place: Path) -> None:
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))"
    )
    folder = loop(row, place, code)
    text = command(row, ["report", str(folder), "-o", str(place / "out")])
    row.answer = (text.strip().splitlines() or [""])[0][:160]


@case("disk", "no room for a report")
def no_room(row: Case, place: Path) -> None:
    limit = "import resource, signal, sys, runpy; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096));"
    limit += "sys.argv = ['aorta', *sys.argv[1:]]; runpy.run_module('aorta', run_name='__main__')"
    run = [sys.executable, "-c", limit, "report", str(EXAMPLE), "-o", str(place / "out")]
    text = process(row, run, codes=(2,))
    row.answer = (text.strip().splitlines() or [""])[-1][:160]
    if (place / "out" / "report.html").exists():
        row.faults.append("half a page was left")


def clock(row: Case, place: Path, jump_s: int) -> None:
    code = f"""
real, real_ns = time.time, time.time_ns
time.time = lambda: real() + {jump_s}
time.time_ns = lambda: real_ns() + {jump_s} * 10**9
"""
    folder = loop(row, place, code)
    steps = [json.loads(line) for line in (folder / "rank_0_metrics.jsonl").read_text().splitlines()]
    longest = max(step["step_ms"] for step in steps if step.get("step_ms") is not None)
    row.answer = f"{len(steps)} steps, the longest {longest:.0f} ms"
    if len(steps) < 29 or longest > 2000:
        row.faults.append("steps lost or stretched by the jump")
    command(row, ["report", str(folder), "-o", str(place / "out")])


for _name, _jump in {"an hour back": -3600, "a year ahead": 31_536_000}.items():
    case("clock", f"system clock set {_name} in the middle")(partial(clock, jump_s=_jump))


WRITER = """
import aorta.record.recorder as recorder_module
from aorta.record.sending import ProcessSink
sinks = []
def in_a_process(settings, writer, tell, tally):  # as on a GPU
    writer.close()
    sinks.append(ProcessSink(settings, writer.path, tell))
    return sinks[-1]
recorder_module.ThreadSink = in_a_process
"""
WAITS = "end = time.monotonic() + 20\nwhile len(open(folder + '/rank_0_metrics.jsonl').readlines()) < 5:\n"
WAITS += "    assert time.monotonic() < end\n    time.sleep(0.01)\n"
KILLED_WRITER = WAITS + "import signal; os.kill(sinks[0].pid, signal.SIG%s)"
PAUSED_WRITER = """
import signal, threading
os.kill(sinks[0].pid, signal.SIGSTOP)
def go_on():
    if sinks[0]._process.poll() is None:
        os.kill(sinks[0].pid, signal.SIGCONT)
threading.Timer(2, go_on).start()
"""
FORK_THAT_ENDS = """
pid = os.fork()
if pid == 0:
    time.sleep(0.1)
    sys.exit(0)
os.waitpid(pid, 0)
"""
RELATIVE = "os.chdir(os.path.dirname(folder)); folder = os.path.basename(folder)"
NO_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')), 4096))
"""
RUN_IS_A_FOLDER = """
path = folder + '/run.json'
if os.path.exists(path):
    os.remove(path)
os.mkdir(path)
"""
FULL_FOR_A_WHILE = """
import resource, signal, threading
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
free = (resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
threading.Timer(0.3, resource.setrlimit, free).start()
"""


@dataclass(frozen=True)
class Mishap:
    """Code that runs within a loop of 30 steps."""

    at_step_10: str
    num_lines: int = 30
    """Lines that the file must have at least."""
    word: str = ""
    """Words that the report must have where lines are missing."""
    first: str = ""
    """Runs before the recorder starts."""


MISHAPS = {
    "the writing process is stopped for 2 s": Mishap(PAUSED_WRITER, first=WRITER),
    "the writing process is stopped for ever": Mishap(KILLED_WRITER % "STOP", first=WRITER),
    "the writing process is killed": Mishap(KILLED_WRITER % "KILL", 5, "were lost", WRITER),
    "a fork waits for a while and ends": Mishap(FORK_THAT_ENDS),
    "a fork trains on in its copy": Mishap("pid = os.fork()\nif pid: os.waitpid(pid, 0)"),
    "a relative output folder, and the working folder changes": Mishap("os.chdir('/')", first=RELATIVE),
    "stdout and stderr are closed": Mishap("os.close(1); os.close(2); print = len"),
    "no more files may be opened": Mishap(NO_FILES),
    "run.json is a folder": Mishap(RUN_IS_A_FOLDER),
    "the disk is full for a while and free again": Mishap(FULL_FOR_A_WHILE, 1, "could not be written"),
    "the state file is removed": Mishap("os.remove(folder + '/rank_0_state.jsonl')"),
    "the process leaves by os._exit": Mishap("os._exit(3)", 10, "killed"),
}


def broken(row: Case, place: Path, mishap: Mishap) -> None:
    loop = LOOP.replace("with aorta", mishap.first + "\nwith aorta", 1)
    process(row, [sys.executable, "-c", loop, str(place / "run"), mishap.at_step_10], codes=(0, 3))
    text = command(row, ["report", str(place / "run"), "-o", str(place / "out")])
    num_lines = len((place / "run" / "rank_0_metrics.jsonl").read_bytes().splitlines())
    words = [line for line in text.splitlines() if mishap.word and mishap.word in line]
    row.answer = f"{num_lines} lines; {'; '.join(words)}"[:160]
    if not mishap.num_lines <= num_lines <= 30:
        row.faults.append(f"{num_lines} lines")
    if num_lines < 30 and not words:
        row.faults.append("the report does not say what is missing")


for _name, _mishap in MISHAPS.items():
    case("process", _name)(partial(broken, mishap=_mishap))


HOSTILE = "<script>alert(1)</script>\x1b[31m\nEND"


@case("injection", "markup and escapes in names of ranks, metrics and kernels")
def injection(row: Case, place: Path) -> None:
    kernel = {"ph": "X", "cat": "kernel", "name": HOSTILE, "pid": 0, "tid": 7, "ts": 10, "dur": 50,
              "args": {"stream": 7, "device": 0, "correlation": 1}}  # fmt: skip
    trace = {"traceEvents": [kernel, {**kernel, "ts": 100, "name": "ncclDevKernel_AllReduce<img src=x>"}],
             "distributedInfo": {"rank": 0, "world_size": 1, "backend": HOSTILE}}  # fmt: skip
    path = place / "rank_0.json"
    path.write_text(json.dumps(trace))
    text = report(row, path, place / "out")
    page = place / "out" / "report.html"
    if "\x1b" in text:
        row.faults.append("an escape reached the terminal")
    if page.exists() and "<script>alert(1)" in page.read_text():
        row.faults.append("markup reached the page")


@case("secret", "tokens in arguments and environment")
def secrets(row: Case, place: Path) -> None:
    tokens = {
        "HF_TOKEN": "hf_abcdefghijklmnop",
        "NCCL_PWD": "swordfish123",
        "GPU_PASSPHRASE": "opensesame99",
        "PYTORCH_HUB_URL": "https://ghp_tokentoken@host/x",
    }
    folder = place / "run"
    run = [sys.executable, "-c", LOOP, str(folder), "pass"]
    run += ["--hf-token", "hf_argumentargument", "--password=hunter2222"]
    process(row, run, (0,), **tokens)
    command(row, ["report", str(folder), "-o", str(place / "out")])
    words = [*tokens.values(), "ghp_tokentoken", "hf_argumentargument", "hunter2222"]
    for path in (path for path in place.rglob("*") if path.is_file()):
        leaked = [word for word in words if word.encode() in path.read_bytes()]
        if leaked:
            row.faults.append(f"{path.name} holds {leaked}")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("-k", dest="word", default="", help="only cases with this word")
    options = parser.parse_args()
    rows = []
    for group, what, function in CASES:
        if options.word not in f"{group} {what}":
            continue
        row = Case(group, what)
        with tempfile.TemporaryDirectory() as name:
            function(row, Path(name))
            row.answer = row.answer.replace(name, "PLACE")
            row.faults = [fault.replace(name, "PLACE") for fault in row.faults]
        row.verdict = "FAILED" if row.faults else "survived"
        figures = f"{row.cpu_s:6.1f} s{row.peak_mb:6} MB"
        print(f"{group:10}{what:62}{row.verdict:9}{figures}  {'; '.join(row.faults)}", flush=True)
        rows.append(row)
    failed = sum(row.verdict == "FAILED" for row in rows)
    print(f"{len(rows)} tried, {len(rows) - failed} survived")
    write(options.output, [asdict(row) for row in rows])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
