"""Reads YAML as plain data (read_yaml), and makes structs of it (convert, read_structs); used for every YAML
file of aorta.

Files come from users: limits on size and nesting, and errors of one line that name the file and the key.
"""

import re
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
import msgspec.inspect as inspect
import yaml

from aorta.errors import ConfigError, did_you_mean

T = TypeVar("T")
MAX_CHARACTERS, MAX_DEPTH, MAX_VALUES = 1 << 20, 32, 100_000
"""Limits of one file; real ones are a screen or two of text."""
MAX_C_DEPTH = 1000
"""Nesting that libyaml's composer, which recurses in C, takes without overflowing the stack."""
MOST_NAMES = 30
"""Known names in one message."""
# libyaml reads the same files several times faster; a command has little time to start.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):  # type: ignore[misc]
    """Loader that refuses a key that appears twice, reads 1e9 as a number, and on, off, yes and no as text.

    YAML 1.2's booleans: true and false alone. `recording.kernels=off` is a word, and so is `NCCL_X: on`.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in _SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in names:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value} appears twice", key.start_mark
                    )
                names.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_yaml(path: Path | str, origin: str | None = None, *, aliases: bool = True) -> Any:
    """Content of a YAML file as plain data: dicts, lists, text, numbers, booleans and None.

    origin begins the message of an error (None: the path). aliases: whether `&a` and `*a` are allowed. Raises
    ConfigError, one line, where the file cannot be read, is not YAML or holds anything else.
    """
    origin = origin or str(path)
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            # A device or a pipe may never end.
            raise ConfigError(f"{origin}: cannot be read: not a regular file")
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except OSError as error:
        raise ConfigError(f"{origin}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # UnicodeDecodeError; a path with a null character
        raise ConfigError(f"{origin}: cannot be read: not a text file ({_first_line(error)})") from None
    return parse_yaml(text, origin, aliases=aliases)


def read_structs(path: Path | str, expected: type[T], origin: str | None = None) -> T:
    """Structs from a YAML file: convert(read_yaml(path))."""
    origin = origin or str(path)
    return convert(read_yaml(path, origin), expected, origin)


def parse_yaml(text: str, origin: str, *, aliases: bool = True) -> Any:
    """read_yaml for a text; origin begins the message of an error."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"{origin}: larger than {MAX_CHARACTERS} characters")
    try:
        _check_events(text, aliases)
        return plain_data(yaml.load(text, _Loader), origin)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError, OverflowError) as error:
        # PyYAML's constructors raise these for dates, integers and tags that are none.
        raise ConfigError(f"{origin}: not valid YAML: {_first_line(error)}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        num_lines = text.count("\n") + 1  # libyaml puts what is missing at the end on a line behind it
        line = f", line {max(1, min(mark.line + 1, num_lines))}" if mark is not None else ""
        raise ConfigError(f"{origin}{line}: not valid YAML: {problem}") from None


def plain_data(value: Any, origin: str) -> Any:
    """`value` itself, if it is plain data of the limits above.

    Raises ConfigError for dates, sets and bytes, and for what is nested too deeply or, by references to
    itself, without end.
    """
    waiting, num_values = [(value, 0)], 0
    while waiting:
        item, depth = waiting.pop()
        num_values += 1
        if depth > MAX_DEPTH or num_values > MAX_VALUES:
            raise ConfigError(f"{origin}: nested too deeply, or more than {MAX_VALUES} values")
        if isinstance(item, dict):
            waiting += [(entry, depth + 1) for entry in item.values()]
        elif isinstance(item, list):
            waiting += [(entry, depth + 1) for entry in item]
        elif isinstance(item, int) and abs(item) >= 2**63:
            raise ConfigError(f"{origin}: an integer must be below 2**63 in size")
        elif item is not None and not isinstance(item, bool | int | float | str):
            raise ConfigError(f"{origin}: {type(item).__name__} is not a setting's value; put text in quotes")
    return value


def _check_events(text: str, aliases: bool) -> None:
    """Raise YAMLError for forbidden aliases and for nesting that would overflow the stack in libyaml."""
    if (aliases or "*" not in text) and _depth_bound(text) <= MAX_C_DEPTH:
        return
    depth = 0
    for event in yaml.parse(text, _SafeLoader):
        if isinstance(event, yaml.AliasEvent) and not aliases:
            raise _problem("aliases are not allowed here", event)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_C_DEPTH:
            raise _problem("nested too deeply", event)


def _problem(problem: str, event: yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]


def _depth_bound(text: str) -> int:
    """Upper bound of the depth of nesting, without parsing.

    A flow collection has a bracket, a block one its own column (a sequence in a mapping may share the
    mapping's).
    """
    return text.count("[") + text.count("{") + 2 * max(map(len, text.splitlines()), default=0)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200] or type(error).__name__


def convert(value: Any, expected: type[T], origin: str) -> T:
    """A struct from plain data. origin (a file) begins the message of an error."""
    _check_keys(value, expected, origin, "")
    try:
        return msgspec.convert(value, expected)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {str(error).replace(' - at `$.', ', at `')}") from None


def _check_keys(value: Any, expected: Any, origin: str, key: str) -> None:
    """Raise ConfigError for a key that the struct does not have, at any depth."""
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
    """Struct of an annotation: of itself, of an optional one, of a list's items."""
    for choice in (expected, *get_args(expected)):
        if inspect.is_struct_type(choice):
            return choice
    return None


def near(name: str, names: Any) -> str:
    """End of a message about an unknown name: the nearest known one, or all of them."""
    names = list(names)
    name_list = ", ".join(names[:MOST_NAMES])
    remainder = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return did_you_mean(name, names, f"; there is {name_list}{remainder}")
