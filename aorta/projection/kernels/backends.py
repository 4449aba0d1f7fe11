"""Kernel models by name: those of this package, and those of others under an entry point."""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from aorta.config.strict import near
from aorta.errors import ProjectionError
from aorta.hardware import Hardware
from aorta.projection.kernels.gemm.size import GemmBackend
from aorta.projection.kernels.sdpa.size import SdpaBackend

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class BackendKind(NamedTuple):
    """The models of one kind of kernel."""

    title: str
    entry_points: str
    """Group under which other packages add theirs: callables that take the hardware and the options."""
    places: Mapping[str, str]
    """By name, module:class. Imported when asked for: some need packages that may be absent."""


GEMM = BackendKind(
    "GEMM",
    "aorta.gemm_backends",
    {
        "tile": "aorta.projection.kernels.gemm.tile:TileGemm",
        "roofline": "aorta.projection.kernels.gemm.roofline:RooflineGemm",
        "table": "aorta.projection.kernels.gemm.table:TableGemm",
        "origami": "aorta.projection.kernels.gemm.origami:OrigamiGemm",
    },
)
SDPA = BackendKind(
    "attention",
    "aorta.sdpa_backends",
    {
        "tile": "aorta.projection.kernels.sdpa.tile:TileSdpa",
        "roofline": "aorta.projection.kernels.sdpa.roofline:RooflineSdpa",
        "table": "aorta.projection.kernels.sdpa.table:TableSdpa",
        "origami": "aorta.projection.kernels.sdpa.origami:OrigamiSdpa",
    },
)


def get_gemm_simulation_backend(name: str, hardware: Hardware, **options: Any) -> GemmBackend:
    """The GEMM model of that name: tile, roofline, table (path=...), origami, or one of an entry point."""
    backend: GemmBackend = _backend(GEMM, name, hardware, options)
    return backend


def get_sdpa_simulation_backend(name: str, hardware: Hardware, **options: Any) -> SdpaBackend:
    """The attention model of that name: tile, roofline, table (path=...), origami or an entry point."""
    backend: SdpaBackend = _backend(SDPA, name, hardware, options)
    return backend


def _backend(kind: BackendKind, name: str, hardware: Hardware, options: dict[str, Any]) -> Any:
    if name == "table" and "path" not in options:
        raise ProjectionError(
            f"the {kind.title} backend table needs path=FILE of measurements; tile needs none"
        )
    if name in kind.places:
        module, _, attribute = kind.places[name].partition(":")
        return getattr(import_module(module), attribute)(hardware, **options)
    plugins = {point.name: point for point in entry_points(group=kind.entry_points)}
    if name not in plugins:
        article = "an" if kind.title[0] in "aeiou" else "a"
        names = [*kind.places, *plugins]
        raise ProjectionError(f"{name!r} is not {article} {kind.title} backend{near(name, names)}")
    return plugins[name].load()(hardware, **options)


def entry_points(group: str) -> "Iterable[EntryPoint]":
    """Installed backends of a group. Loaded when somebody asks for one: it costs a tenth of a command."""
    from importlib import metadata

    return metadata.entry_points(group=group)
