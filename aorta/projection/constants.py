"""Numbers that a projection adds to kernels and layouts; constants.yaml says where each comes from."""

from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from aorta.config.yaml_files import convert, read_yaml
from aorta.errors import ConfigError
from aorta.hardware.part import NumberSource, sourced_values

PATH = Path(__file__).resolve().with_suffix(".yaml")
Section = TypeVar("Section")


def constants(expected: type[Section], *names: str, **further: float) -> Section:
    """A section, the later of several over the earlier: constants(Factors, "factors.any", "factors.amd").

    further: numbers of the same struct that other files hold.
    """
    values: dict[str, Any] = {}
    for name in names:
        section = _sections()[0]
        for part in name.split("."):
            section = section[part]
        values |= section
    return convert(values | further, expected, str(PATH))


@cache
def _sections() -> tuple[dict[str, Any], dict[str, NumberSource]]:
    """The numbers, and of each, by its dotted name, where it comes from."""
    document = read_yaml(PATH)
    cited = {
        name: convert(source, NumberSource, f"{PATH}: sources.{name}")
        for name, source in document.pop("sources").items()
    }
    provenance: dict[str, str] = {}
    values = sourced_values(document, "", str(PATH), provenance)
    for key, source in provenance.items():
        if source not in cited:
            raise ConfigError(f"{PATH}: {key} names the source {source!r}, which sources: does not have")
    return values, {key: cited[source] for key, source in provenance.items()}
