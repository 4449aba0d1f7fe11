"""What pyproject.toml cannot say: examples and pages within the package, and C libraries that are built.

A wheel with built libraries is for this platform, and any Python: ctypes opens them. Without a compiler the
wheel has their sources alone, and says what that means.
"""

import shutil
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from aorta.device.native.build import LIBRARIES, NativeError, build, built_name, source_text  # noqa: E402


@cache
def built() -> TemporaryDirectory[str] | None:
    """A folder with all libraries, or None where this machine cannot build them."""
    folder = TemporaryDirectory(prefix="aorta-")
    try:
        for name in LIBRARIES:
            source = source_text(name)
            build(source, Path(folder.name) / built_name(name, source))
    except NativeError as error:
        print(
            f"aorta: {error}. This installation has no built C libraries: without a compiler where it runs, "
            "GPUs are timed by events, without kernels, and NCCL's own events are not read.",
            file=sys.stderr,
        )
        return None
    return folder


class BringLibraries(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode and (folder := built()) is not None:
            shutil.copytree(
                folder.name, Path(self.build_lib) / "aorta" / "device" / "native", dirs_exist_ok=True
            )


class OfThisPlatform(Distribution):
    def has_ext_modules(self) -> bool:
        return built() is not None


class WheelForAnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    packages=[*find_packages(include=["aorta*"]), "aorta.examples", "aorta.docs"],
    package_dir={"aorta.examples": "examples", "aorta.docs": "docs"},
    distclass=OfThisPlatform,
    cmdclass={"build_py": BringLibraries, "bdist_wheel": WheelForAnyPython},
)
