"""What pyproject.toml cannot say: examples and pages within the package, and C libraries that are built.

A wheel with built libraries is for this platform, and any Python: ctypes opens them. Without a compiler the
wheel has their sources alone, and says what that means.
"""

import platform
import sys
from functools import cache
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from aorta.device.native.build import LIBRARIES, NativeError, build, built_name, find_compiler, source_text  # noqa: E402


@cache
def builds_libraries() -> bool:
    try:
        find_compiler()
    except NativeError as error:
        print(
            f"aorta: {error}. This installation has no built C libraries: without a compiler where it runs, "
            "GPUs are timed by events, without kernels, and NCCL's own events are not read.",
            file=sys.stderr,
        )
        return False
    return platform.system() == "Linux"


class BuildLibraries(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode or not builds_libraries():
            return
        folder = Path(self.build_lib) / "aorta" / "device" / "native"
        folder.mkdir(parents=True, exist_ok=True)
        for name in LIBRARIES:
            source = source_text(name)
            build(source, folder / built_name(name, source))


class OfThisPlatform(Distribution):
    def has_ext_modules(self) -> bool:
        return builds_libraries()


class WheelForAnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    packages=[*find_packages(include=["aorta*"]), "aorta.examples", "aorta.docs"],
    package_dir={"aorta.examples": "examples", "aorta.docs": "docs"},
    distclass=OfThisPlatform,
    cmdclass={"build_py": BuildLibraries, "bdist_wheel": WheelForAnyPython},
)
