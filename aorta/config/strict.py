"""Plain data from YAML or JSON into structs: an unknown key is an error that names the near one."""

from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
import msgspec.inspect as inspect
import yaml

from aorta.errors import ConfigError, did_you_mean

T = TypeVar("T")
MOST_NAMES = 30
"""Of known names in one message."""

# The C loader reads the same files several times faster; a command has little time to start.
_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path) -> Any:
    """The content of a YAML file."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _YAML_LOADER)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        # PyYAML's constructors raise these for dates, integers and tags that are none.
        raise ConfigError(f"{path}: not valid YAML: {type(error).__name__}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', error)}") from None


def convert(value: Any, wanted: type[T], origin: str) -> T:
    """A struct from plain data. origin (a file) begins the message of an error."""
    _check_keys(value, wanted, origin, "")
    try:
        return msgspec.convert(value, wanted)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {str(error).replace(' - at `$.', ', at `')}") from None


def near(name: str, names: Any) -> str:
    """The part of a message that points to the name that was probably meant."""
    names = list(names)
    shown = ", ".join(names[:MOST_NAMES])
    rest = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return did_you_mean(name, names, f"; there is {shown}{rest}")


def _check_keys(value: Any, wanted: Any, origin: str, key: str) -> None:
    struct = _struct(wanted)
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


def _struct(wanted: Any) -> type[msgspec.Struct] | None:
    for choice in (wanted, *get_args(wanted)):
        if inspect.is_struct_type(choice):
            return choice
    return None
