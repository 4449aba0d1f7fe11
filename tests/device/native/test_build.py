"""Libraries are built once, also where many processes share a cache."""

import threading
from pathlib import Path

import pytest

from aorta.device.native import build
from aorta.device.native.build import NativeError

SOURCE = "int answer(void) { return 42; }\n"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Paths that the compiler was asked to write; a compiler that writes them at once."""
    paths: list[Path] = []

    def compile_it(_: str, path: Path) -> None:
        paths.append(path)
        path.write_bytes(b"library")

    monkeypatch.setattr(build, "build", compile_it)
    monkeypatch.setattr(build, "POLL_S", 0.01)
    return paths


def test_many_that_start_at_once_build_once(built: list[Path], tmp_path: Path) -> None:
    library = tmp_path / "x.so"
    threads = [threading.Thread(target=build._build_once, args=(SOURCE, library)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [library]
    assert list(tmp_path.iterdir()) == [library]


def test_those_who_wait_hear_what_failed(built: list[Path], tmp_path: Path) -> None:
    (tmp_path / "x.building").write_text("gcc failed: no space left")
    with pytest.raises(NativeError, match="no space left"):
        build._build_once(SOURCE, tmp_path / "x.so")
    assert built == []


def test_the_claim_of_a_killed_process_is_taken_over(
    built: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.building").touch()
    monkeypatch.setattr(build, "TIMEOUT_S", -10.0)
    build._build_once(SOURCE, tmp_path / "x.so")
    assert built == [tmp_path / "x.so"]


def test_a_build_that_fails_leaves_nothing(
    built: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise NativeError("gcc failed: no such header")

    monkeypatch.setattr(build, "build", fail)
    with pytest.raises(NativeError, match="no such header"):
        build._build_once(SOURCE, tmp_path / "x.so")
    assert list(tmp_path.iterdir()) == []


def test_every_c_source_is_one_of_the_libraries() -> None:
    sources = {path.stem for path in Path(build.__file__).parent.glob("*.c")}
    assert sources == set(build.LIBRARIES)
