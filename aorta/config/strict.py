"""Plain data (from YAML, JSON) into structs: an unknown key is an error that names the near one."""

from typing import Any, TypeVar, get_args

import msgspec
import msgspec.inspect as inspect

from aorta.errors import ConfigError, did_you_mean

T = TypeVar("T")
MOST_NAMES = 30
"""Of known names in one message."""


def convert(value: Any, expected: type[T], origin: str) -> T:
    """A struct from plain data. origin (a file) begins the message of an error."""
    _check_keys(value, expected, origin, "")
    try:
        return msgspec.convert(value, expected)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {str(error).replace(' - at `$.', ', at `')}") from None


def near(name: str, names: Any) -> str:
    """The part of a message that points to the name that was probably meant."""
    names = list(names)
    name_list = ", ".join(names[:MOST_NAMES])
    remainder = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return did_you_mean(name, names, f"; there is {name_list}{remainder}")


def _check_keys(value: Any, expected: Any, origin: str, key: str) -> None:
    struct = _struct(expected)
    if struct is None:
        return
    if isinstance(value, list):
        for number, part in enumerate(value):
            _check_keys(part, struct, origin, f"{key}[{number}]")
        return
    if value is None and key:
        return
    if not isinstance(value, dict):
        raise ConfigError(f"{origin}: {key or 'the file'} must hold settings, got {value!r}")
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
    for name, part in value.items():
        dotted = f"{key}.{name}" if key else str(name)
        if name not in fields:
            raise ConfigError(f"{origin}: {dotted} is not a setting{near(str(name), fields)}")
        _check_keys(part, fields[name], origin, dotted)


def _struct(expected: Any) -> type[msgspec.Struct] | None:
    for choice in (expected, *get_args(expected)):
        if inspect.is_struct_type(choice):
            return choice
    return None
