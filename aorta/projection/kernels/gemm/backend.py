"""GEMM models by name."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from aorta.config.strict import near
from aorta.errors import ProjectionError
from aorta.hardware import Hardware
from aorta.projection.kernels.gemm.size import GemmBackend

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "aorta.gemm_backends"


def entry_points(group: str) -> "Iterable[EntryPoint]":
    """Installed backends of a group. Loaded when somebody asks for one: it costs a tenth of a command."""
    from importlib import metadata

    return metadata.entry_points(group=group)


def get_gemm_simulation_backend(name: str, hardware: Hardware, **options: Any) -> GemmBackend:
    """The GEMM model of that name: tile, roofline, table (path=...), origami, or one of an entry point.

    A package adds its own under the entry point group aorta.gemm_backends: a callable that takes the
    hardware and the options.
    """
    # A model is imported when it is asked for: one of them needs a package that may be absent.
    if name == "tile":
        from aorta.projection.kernels.gemm.tile import TileGemm

        return TileGemm(hardware, **options)
    if name == "roofline":
        from aorta.projection.kernels.gemm.roofline import RooflineGemm

        return RooflineGemm(hardware, **options)
    if name == "table":
        from aorta.projection.kernels.gemm.table import TableGemm

        if "path" not in options:
            raise ProjectionError("the GEMM backend table needs path=FILE of measurements; tile needs none")
        return TableGemm(hardware, **options)
    if name == "origami":
        from aorta.projection.kernels.gemm.origami import OrigamiGemm

        return OrigamiGemm(hardware, **options)
    plugins = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in plugins:
        names = ["tile", "roofline", "table", "origami", *plugins]
        raise ProjectionError(f"{name!r} is not a GEMM backend{near(name, names)}")
    backend: GemmBackend = plugins[name].load()(hardware, **options)
    return backend
