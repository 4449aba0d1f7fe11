"""Jobs in a file and in KEY=VALUE arguments, for every `aorta project` command.

    # job.yaml: options without their dashes; `set` holds what-ifs as for --set
    model: llama3-8b
    gpu_arch: h100
    nodes: 8
    global_batch_size: 1024
    set: {factors.gemm: x1.1}

    aorta project performance --job job.yaml tp=4 --seq-len 8192

An option or a KEY=VALUE on the command line goes before the file. A job may hold keys that one command does
not read, so that one file serves all of them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from aorta.command_line import OneScreenCommand
from aorta.config.yaml_files import read_yaml
from aorta.errors import ConfigError, did_you_mean
from aorta.projection.plan import RATES

DAILY = frozenset(
    ["job", "model", "gpu_arch", "gpus", "nodes", "tp", "pp", "ep", "global_batch_size", "seq_len", "dtype"]
    + ["sharding", "recompute", "stack", "changes", "as_json"]
)
"""Options that --help shows; the others are accepted all the same."""
AXES = frozenset({"tp", "pp", "cp", "nodes", "gpus_per_node"})
"""Settings whose change makes the file's dp void."""


class JobCommand(OneScreenCommand):
    """A command whose options may come from --job FILE and from KEY=VALUE arguments."""

    settings_argument = "settings"
    """Argument whose texts are settings of the job."""

    def __init__(self, *args: Any, **extra: Any) -> None:
        super().__init__(*args, **extra)
        job = click.Option(
            ["--job"],
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Options in a YAML file (tp: 4). Or as KEY=VALUE (tp=4, factors.gemm=x1.1).",
        )
        self.params = [job, *self.params]

    def is_daily(self, option: click.Option) -> bool:
        return option.name in DAILY

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        parsed, _, _ = self.make_parser(ctx).parse_args(list(args))
        settings = self._settings_of(parsed)
        words = [word for text in settings for word in self._as_option(ctx, text)]
        if isinstance(parsed.get("job"), str):
            job = read_job(Path(parsed["job"]), self, ctx)
            if parsed.keys() & AXES or any(_name(text) in AXES for text in settings):
                job.values.pop("dp", None)
            ctx.default_map = {**(ctx.default_map or {}), **job.values}
            args = [*job.changes, *args]
        return super().parse_args(ctx, [*args, *words])

    def _settings_of(self, parsed: Mapping[str, Any]) -> tuple[str, ...]:
        texts = parsed.get(self.settings_argument)  # click has a sentinel for "none"
        return tuple(texts) if isinstance(texts, list | tuple) else ()

    def _as_option(self, ctx: click.Context, text: str) -> Iterator[str]:
        """A KEY=VALUE as the words of an option: tp=4 is --tp 4, factors.gemm=x1.1 is a --set."""
        key, equals, value = text.partition("=")
        if "." in key and equals:
            yield from ("--set", text)
            return
        options = _options(self)
        option = options.get(_name(text))
        if not equals or option is None:
            known = sorted({option.opts[0].lstrip("-") for option in options.values()})
            hint = did_you_mean(_name(text), known, f"; there is {', '.join(known)}" if equals else "")
            raise ConfigError(f"{text}: write KEY=VALUE with an option as KEY, such as tp=4{hint}")
        if option.is_flag:
            is_set = click.BOOL.convert(value, option, ctx)
            yield from (option.opts[:1] if is_set else option.secondary_opts[:1])
        else:
            yield from (option.opts[0], value)


class SweepCommand(JobCommand):
    """A command that sweeps the last of its KEY=VALUE arguments; the others are settings."""

    def _settings_of(self, parsed: Mapping[str, Any]) -> tuple[str, ...]:
        return super()._settings_of(parsed)[:-1]


class CompareCommand(JobCommand):
    """A command whose KEY=VALUE arguments change the second job and not the first."""

    settings_argument = ""


class JobFile:
    """Values of a job file by the name of their option, and its what-ifs as words of the command line."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.changes: list[str] = []


def read_job(path: Path, command: click.Command, ctx: click.Context) -> JobFile:
    """The job of a file, checked key by key; keys that only other project commands read are left out."""
    document = read_yaml(path)
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must hold options of a job, such as model: llama3-8b")
    options, known, job = _options(command), job_keys(), JobFile()
    for key, value in document.items():
        name = str(key).replace("-", "_")
        if name == "set":
            job.changes = list(_changes(path, value))
            continue
        if name not in known and name not in options:
            raise ConfigError(
                f"{path}: {key} is not a setting of a job"
                f"{did_you_mean(name, known, '; docs/projection.md lists them')}"
            )
        option = options.get(name)
        if option is None or value is None:
            continue
        if isinstance(value, dict):
            raise ConfigError(f"{path}: {key} must be one value")
        # As text, as on the command line: int(2.5) would be 2.
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        try:
            job.values[str(option.name)] = option.type_cast_value(ctx, text)
        except click.BadParameter as error:
            raise ConfigError(f"{path}: {key}: {error.message}") from None
    if "nodes" in document and "gpus" in options and "gpus" not in document:
        job.values["gpus"] = _gpus(path, document)
    return job


def job_keys() -> frozenset[str]:
    """Keys that a job may hold: those that any project command reads."""
    from aorta.projection.options import CLOCK_OPTION, PLAN_OPTIONS, WHAT_IF_OPTIONS

    @click.command()
    def every() -> None: ...

    for option in (*PLAN_OPTIONS, *CLOCK_OPTION, *WHAT_IF_OPTIONS):
        every = option(every)
    return frozenset({"gpus", "top", "set", *RATES, *_options(every)})


def _options(command: click.Command) -> dict[str, click.Option]:
    """Options by name and by what stands after the dashes; not those that only say what to print."""
    options: dict[str, click.Option] = {}
    for option in command.params:
        if isinstance(option, click.Option) and option.name not in ("job", "as_json", "help", "help_all"):
            for name in (str(option.name), *(text.lstrip("-").replace("-", "_") for text in option.opts)):
                options[name] = option
    return options


def _name(text: str) -> str:
    return text.partition("=")[0].strip().lstrip("-").replace("-", "_")


def _changes(path: Path, value: Any) -> Iterator[str]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: set must hold KEY: VALUE, such as factors.gemm: x1.1")
    for key, change in value.items():
        yield from ("--set", f"{key}={change}")


def _gpus(path: Path, document: Mapping[str, Any]) -> int:
    """GPUs of a job that names its nodes, for `search`."""
    nodes, node = document["nodes"], document.get("gpus_per_node", document.get("gpus-per-node", 8))
    if not isinstance(nodes, int) or not isinstance(node, int):
        raise ConfigError(f"{path}: nodes and gpus_per_node must be whole numbers")
    return nodes * node
