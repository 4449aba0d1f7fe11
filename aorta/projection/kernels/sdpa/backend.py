"""Attention models by name."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from aorta.config.strict import near
from aorta.errors import ProjectionError
from aorta.hardware import Hardware
from aorta.projection.kernels.sdpa.size import SdpaBackend

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "aorta.sdpa_backends"


def entry_points(group: str) -> "Iterable[EntryPoint]":
    """Installed backends of a group. Loaded when somebody asks for one: it costs a tenth of a command."""
    from importlib import metadata

    return metadata.entry_points(group=group)


def get_sdpa_simulation_backend(name: str, hardware: Hardware, **options: Any) -> SdpaBackend:
    """The attention model of that name: tile, roofline, table (path=...), origami or an entry point."""
    if name == "tile":
        from aorta.projection.kernels.sdpa.tile import TileSdpa

        return TileSdpa(hardware, **options)
    if name == "roofline":
        from aorta.projection.kernels.sdpa.roofline import RooflineSdpa

        return RooflineSdpa(hardware, **options)
    if name == "table":
        from aorta.projection.kernels.sdpa.table import TableSdpa

        if "path" not in options:
            raise ProjectionError(
                "the attention backend table needs path=FILE of measurements; tile needs none"
            )
        return TableSdpa(hardware, **options)
    if name == "origami":
        from aorta.projection.kernels.sdpa.origami import OrigamiSdpa

        return OrigamiSdpa(hardware, **options)
    plugins = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in plugins:
        names = ["tile", "roofline", "table", "origami", *plugins]
        raise ProjectionError(f"{name!r} is not an attention backend{near(name, names)}")
    backend: SdpaBackend = plugins[name].load()(hardware, **options)
    return backend
