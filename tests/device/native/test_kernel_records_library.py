"""What is CUPTI's alone of its library of kernel records, and how a library is built."""

import json

import pytest

from aorta.device.native.build import NativeError, build, load_library
from tests.device.native.stand_ins import build_stand_in
from tests.dist.launch import run_python

PREAMBLE = """
import ctypes, json, sys
from tests.device.native.stand_ins import Cupti
source = Cupti(sys.argv[1])
driver = source.vendor
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Path of the stand-in."""
    try:
        return build_stand_in("cupti", tmp_path_factory.mktemp("driver"))
    except NativeError as error:
        pytest.skip(str(error))


def run(driver, body):
    # One cache for all: the library is compiled once.
    done = run_python("-c", f"{PREAMBLE}\n{body}", driver, AORTA_CACHE_DIR=str(driver.parent))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_equal_names_have_one_index_wherever_they_lie(driver):
    result = run(
        driver,
        """
source.opened()
texts = [ctypes.create_string_buffer(b"gemm") for _ in range(2)]
for text in texts:
    source.run(ctypes.cast(text, ctypes.c_char_p))
rows, taken = source.take()
print(json.dumps([rows["name"].tolist(), taken.num_names]))
""",
    )
    assert result == [[1, 1], 2]


def test_copies_say_from_which_memory_to_which_they_are(driver):
    result = run(
        driver,
        """
source.opened()
for kinds in (0x01030101, 0x00010302, 0x01030308):  # to the device, to pageable memory, within; flags first
    planned = source._planned(None, "copy", 3)
    planned.value = kinds
    source.done(source.play(planned))
print(json.dumps([[int(row["what"]), int(row["name"])] for row in source.take()[0]]))
""",
    )
    assert result == [[1, 0x030101], [1, 0x010302], [1, 0x030308]]


def test_buffers_of_another_client_are_left_alone(driver):
    result = run(
        driver,
        """
source.opened()
foreign = (ctypes.c_uint8 * 216)()
driver.play_foreign(foreign, 216)
print(json.dumps(len(source.take()[0])))
""",
    )
    assert result == 0


def test_records_have_the_hosts_monotonic_clock(driver):
    result = run(
        driver,
        """
import time
source.opened()
low = time.monotonic_ns(); now = driver.play_now(); high = time.monotonic_ns()
print(json.dumps(low <= now <= high))
""",
    )
    assert result is True


def test_a_driver_that_refuses_has_a_reason(driver):
    result = run(
        driver,
        """
driver.play_refusal(39)
assert source.open() == 0
print(json.dumps([source.library.aorta_kernels_claim(), source.error()]))
""",
    )
    assert result == [1, "cuptiActivityRegisterCallbacks (error 39)"]


@pytest.mark.processes
def test_it_is_built_once_into_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AORTA_CACHE_DIR", str(tmp_path))
    load_library("kernel_records")
    (built,) = (tmp_path / "native").glob("kernel_records-*.so")
    before = built.stat().st_mtime_ns
    load_library("kernel_records")
    assert built.stat().st_mtime_ns == before
    assert not list((tmp_path / "native").glob(".build-*"))


@pytest.mark.processes
def test_without_a_folder_to_write_it_is_built_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("AORTA_CACHE_DIR", str(tmp_path / "file"))
    assert load_library("kernel_records").aorta_kernels_record_bytes() == 40


@pytest.mark.processes
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        pytest.param("no-such-compiler", "no C compiler: CC=no-such-compiler is not on PATH", id="none"),
        pytest.param("false", "false failed: it printed nothing", id="fails"),
    ],
)
def test_a_compiler_that_is_not_there_or_fails_is_one_line(tmp_path, monkeypatch, compiler, reason):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(NativeError, match=reason):
        build("int f(void) { return 1; }", tmp_path / "f.so")
    assert not (tmp_path / "f.so").exists()
