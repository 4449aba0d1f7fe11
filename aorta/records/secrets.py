"""Keeps passwords, keys and tokens in environments, commands and errors out of records and reports.

A value is replaced where its name or the value itself may be a secret; where in doubt, it is.
"""

import re
from collections.abc import Iterable

REDACTED = "<redacted>"

_SECRET_NAME = re.compile(
    r"TOKEN(?!S\b|S_|IZER|_?(SIZE|LEN|COUNT|ID))|SECRET|PASS(W|PHRASE|CODE|$|_)|(^|[_\W])(PWD|PW|PAT)($|[_\W])"
    r"|CREDENTIAL|CREDS?($|[_\W])|API[_-]?KEY|ACCESS[_-]?KEY|PRIVATE[_-]?KEY|AUTH($|[_\W])|AUTHORI[SZ]ATION|BEARER|COOKIE"
    r"|SIGNATURE|(^|[_\W])(KEY|DSN|SAS)($|[_\W])|SESSION[_-]?ID|WEBHOOK",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"gh[pousr]_\w{8,}|github_pat_\w+|gl(pat|ptt|dt)-[\w-]+|hf_[A-Za-z0-9]{8,}|\bsk-[\w-]{8,}|xox[abeprs]-[\w-]+"
    r"|\b(AKIA|ASIA)[A-Z0-9]{12,}|\beyJ[\w-]{8,}(\.[\w-]+)*|-----BEGIN[^-]*-----|\bya29\.[\w-]+|\bAIza[\w-]{20,}"
    r"|\bnpm_\w{16,}|\bpypi-[\w-]{16,}|\bdop_v1_\w+|\bwandb_v\d_\w+|\bSG\.[\w-]{10,}\.[\w-]{10,}"
    r"|(?i:\bbearer\s+[\w.~+/-]{8,}=*)"
)
_USER_OF_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)
"""User, password or token before the host of a URL."""
_SECRET_OF_URL = re.compile(
    r"([?&](?:[\w-]*(?:token|key|secret|sig|signature|password|auth|credential)[\w-]*)=)[^&\s#]+",
    re.IGNORECASE,
)
_RANDOM_VALUE = re.compile(r"(?=[^\s]*[a-z])(?=[^\s]*[A-Z])(?=[^\s]*\d)[A-Za-z0-9+/_=-]{32,}")
_HEX_VALUE = re.compile(r"[0-9a-fA-F]{32,}")
_DEVICE_LIST = re.compile(r"(GPU|MIG)-[0-9a-fA-F,GPUMI-]+")
_OPTION = re.compile(r"(--?[\w.-]+|[\w.]+)=(.*)", re.DOTALL)


def is_secret_name(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def redacted(text: str) -> str:
    """The text with everything replaced that looks like a secret in any context."""
    text = _USER_OF_URL.sub(rf"\1{REDACTED}@", text)
    text = _SECRET_OF_URL.sub(rf"\1{REDACTED}", text)
    return _SECRET_VALUE.sub(REDACTED, text)


def is_secret_value(value: str) -> bool:
    """Return True where a setting's value looks like a secret.

    Long random values count, unless they name devices.
    """
    if redacted(value) != value:
        return True
    if _DEVICE_LIST.fullmatch(value):
        return False
    return bool(_RANDOM_VALUE.fullmatch(value) and "/" not in value.strip("/")) or bool(
        _HEX_VALUE.fullmatch(value)
    )


def redacted_command(arguments: Iterable[str]) -> list[str]:
    """A command line: values of options with a secret's name, and values that look like one, are replaced."""
    result: list[str] = []
    hides_next = False
    for argument in arguments:
        option = _OPTION.fullmatch(argument)
        if option is not None:
            name, value = option.groups()
            result.append(f"{name}={REDACTED if is_secret_name(name) else _without_secret(value)}")
        elif hides_next and not argument.startswith("--"):
            result.append(REDACTED)
        else:
            result.append(argument if argument.startswith("-") else _without_secret(argument))
        hides_next = option is None and argument.startswith("-") and is_secret_name(argument.lstrip("-"))
    return result


def _without_secret(value: str) -> str:
    text = redacted(value)
    return REDACTED if text == value and is_secret_value(value) else text


def redacted_settings(value: object, name: str = "") -> object:
    """Plain data (of a config, say) without secrets, by the key's name or by the look of the text."""
    if isinstance(value, dict):
        return {key: redacted_settings(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_settings(item, name) for item in value]
    if isinstance(value, str):
        return REDACTED if value and is_secret_name(name) else redacted(value)
    return value
