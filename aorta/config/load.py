"""Reads YAML files and overrides into a Config; a mistake is one line: the key, the value, the way out.

load_config is called by every command that trains.
"""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect as inspect

from aorta.config.structs import Config
from aorta.config.yaml_files import MAX_DEPTH, parse_yaml, read_yaml
from aorta.errors import ConfigError, did_you_mean

BASE_KEY = "base"
"""Key of a file whose settings this one changes."""
FILES = Path(__file__).resolve().parent / "files"
"""Configurations that come with aorta: default, ddp, fsdp, ..."""


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Settings of a YAML file over those of its bases, changed by overrides ("a.b=c") in their order.

    path: a file, or the name of a configuration that comes with aorta (configuration_path).
    """
    settings = _read_with_base(configuration_path(path), ())
    for override in overrides:
        _merge(settings, _parse_override(override))
    return config_from_settings(settings)


def configuration_path(name_or_path: str | Path) -> Path:
    """The file with this path, or else the configuration of this name that comes with aorta.

    A name may be written as fsdp, fsdp.yaml or config/fsdp.yaml. A path that is neither is returned as it is.
    """
    path = Path(name_or_path)
    if path.exists() or path.parent.name not in ("", "config") or path.is_absolute():
        return path
    packaged = FILES / f"{path.name.removesuffix('.yaml')}.yaml"
    return packaged if packaged.is_file() else path


def configuration_names() -> list[str]:
    """Names of the configurations that come with aorta."""
    return sorted(path.stem for path in FILES.glob("*.yaml"))


def config_from_settings(settings: Mapping[str, Any]) -> Config:
    """Check nested plain data against the structs; what is absent gets its default."""
    _check(settings, inspect.type_info(Config), "")
    return msgspec.convert(settings, Config)


def _read_with_base(path: Path, visited: tuple[Path, ...]) -> dict[str, Any]:
    path = Path(os.path.realpath(path))
    if path in visited:
        raise ConfigError(f"{path}: is its own base, by way of {visited[-1].name}")
    settings = _read(path, is_base=bool(visited))
    base = settings.pop(BASE_KEY, None)
    if base is None:
        return settings
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base must be a file name, got {base!r}")
    merged = _read_with_base(path.parent / base, (*visited, path))
    _merge(merged, settings)
    return merged


def _read(path: Path, is_base: bool) -> dict[str, Any]:
    if not path.exists():
        siblings = ", ".join(sorted(sibling.name for sibling in path.parent.glob("[!.]*.yaml")))
        hint = "" if is_base else f"; aorta comes with {', '.join(configuration_names())}"
        hint += f"; {path.parent} has {siblings}" if siblings else ""
        raise ConfigError(f"{path}: no such config file{hint}")
    settings = read_yaml(path)
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: must hold sections such as 'training:', got {_value_text(settings)}")
    return {key: value for key, value in settings.items() if value is not None}  # a section left empty


def _parse_override(override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names) or len(names) > MAX_DEPTH:
        raise ConfigError(f"--override {override!r} must look like training.max_steps=50")
    value: Any = parse_yaml(text, f"--override {key}")
    for name in reversed(names):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def _merge(settings: dict[str, Any], differences: Mapping[str, Any]) -> None:
    """Put the differences into settings: sections key by key, everything else replaced.

    An empty section changes nothing.
    """
    for key, value in differences.items():
        current = settings.get(key)
        if isinstance(current, dict) and isinstance(value, dict):
            _merge(current, value)
        elif not (isinstance(current, dict) and value is None):
            settings[key] = value


def _check(value: Any, expected: inspect.Type, key: str) -> None:
    if isinstance(expected, inspect.StructType):
        if value is None and key:
            raise ConfigError(f"{key} is a section and must hold settings, got null")
        if not isinstance(value, dict):
            raise ConfigError(f"{key} is a section and must hold settings, got {_value_text(value)}")
        _check_section(value, expected, key)
        return
    try:
        msgspec.convert(value, _annotation(key))
    except msgspec.ValidationError:
        raise ConfigError(f"{key} must be {_described(expected)}, got {_value_text(value)}") from None
    numbers = value if isinstance(value, list) else [value]
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        # YAML reads .inf and 1e999 as infinite.
        raise ConfigError(f"{key} must be finite, got {_value_text(value)}")


def _check_section(section: Mapping[str, Any], expected: inspect.StructType, key: str) -> None:
    fields = {field.name: field.type for field in expected.fields}
    for name, value in section.items():
        dotted = f"{key}.{name}" if key else str(name)
        if name not in fields:
            raise ConfigError(f"{dotted} is not a setting{_suggestion(str(name), fields, key)}")
        _check(value, fields[name], dotted)


def _suggestion(name: str, fields: Mapping[str, Any], key: str) -> str:
    """End of a message about an unknown setting: the same name in another section, or a near one here."""
    elsewhere = [
        f"{section.name}.{name}"
        for section in msgspec.structs.fields(Config)
        if section.name != key and name in section.type.__struct_fields__
    ]
    if elsewhere:
        return did_you_mean(name, fields, f", did you mean '{elsewhere[0]}'?")
    return did_you_mean(name, fields, f"; {key or 'the top level'} has {', '.join(fields)}")


def _annotation(key: str) -> Any:
    """Type that the structs declare for a dotted key."""
    annotation: Any = Config
    for name in key.split("."):
        field = next(f for f in msgspec.structs.fields(annotation) if f.name == name)
        annotation = field.type
    return annotation


def _described(expected: inspect.Type) -> str:
    """Type of a setting in words, with its bounds."""
    match expected:
        case inspect.IntType():
            return "an integer" + _bounds(expected)
        case inspect.FloatType():
            return "a number" + _bounds(expected)
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "text"
        case inspect.NoneType():
            return "null"
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(str(value) for value in values)
        case inspect.UnionType(types=types):
            null_last = sorted(types, key=lambda t: isinstance(t, inspect.NoneType))
            return " or ".join(_described(t) for t in null_last)
        case inspect.TupleType(item_types=items):
            return f"a list of {len(items)}, each {_described(items[0])}"
        case inspect.Metadata(type=inner):
            return _described(inner)
    raise AssertionError(f"no words for {expected}")


def _bounds(expected: inspect.IntType | inspect.FloatType) -> str:
    words = [
        f"{word} {bound}"
        for word, bound in (
            ("at least", expected.ge),
            ("above", expected.gt),
            ("at most", expected.le),
            ("below", expected.lt),
        )
        if bound is not None
    ]
    return f" {' and '.join(words)}" if words else ""


def _value_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
