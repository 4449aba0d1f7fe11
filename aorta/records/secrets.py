"""Keeps passwords, keys and tokens in environments, commands and errors out of records and reports.

By structure, and failing closed: of a URL, a header, an option, a key with a value, JSON, only the part stays
that cannot be the secret, and a long value stays only where it is words, numbers or a path. docs/stored.md
says what is stored.
"""

import json
import re
from collections.abc import Iterable, Iterator

REDACTED = "<redacted>"
MOST_TEXT = 4096
"""Characters of a text that are looked at and kept."""

_SECRET_NAME = re.compile(
    r"TOKEN(?!S\b|S_|IZER|_?(SIZE|LEN|COUNT|ID))|SECRET|PASS(W|PHRASE|CODE|KEY|$|_)"
    r"|(^|[_\W])(PWD|PW|PAT|OTP|PIN_?CODE)($|[_\W])|USERPWD"
    r"|CREDENTIAL|CREDS?($|[_\W])|API[_-]?KEY|ACCESS[_-]?KEY|PRIVATE[_-]?KEY|AUTH($|[_\W])|AUTHORI[SZ]ATION|BEARER|COOKIE"
    r"|SIGNATURE|(^|[_\W])(KEY|DSN|SAS|SIG)($|[_\W])|(LICEN[CS]E|MASTER|SSH|HMAC|SHARED|ACCOUNT|STORAGE)[_-]?KEY"
    r"|SESSION[_-]?ID|WEBHOOK|CONNECTION[_-]?STRING|CONN[_-]?STR",
    re.IGNORECASE,
)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ERROR_NAME = re.compile(r"\w*(Error|Exception|Warning)$")
_KNOWN_SECRET = re.compile(
    r"gh[pousr]_\w{8,}|github_pat_\w+|gl(pat|ptt|dt)-[\w-]+|hf_[A-Za-z0-9]{8,}|\bsk-[\w-]{8,}|xox[abeprs]-[\w-]+"
    r"|\b(AKIA|ASIA)[A-Z0-9]{12,}|\beyJ[\w-]{8,}(\.[\w-]+)*|\bya29\.[\w-]+|\bAIza[\w-]{20,}"
    r"|\bnpm_\w{16,}|\bpypi-[\w-]{16,}|\bdop_v1_\w+|\bwandb_v\d_\w+|\bSG\.[\w-]{10,}\.[\w-]{10,}"
)
"""Kinds of tokens that are told by their beginning, however short."""
_PEM = re.compile(r"-----BEGIN[^-]*-----.*?(-----END[^-]*-----|\Z)", re.DOTALL)
_SCHEME = re.compile(
    r"\b(bearer|negotiate|digest)\s+[^\s\"',;]{6,}|\bbasic\s+(?=[^\s\"',;]*[A-Z0-9=])[^\s\"',;]{6,}",
    re.IGNORECASE,
)
"""Credentials of HTTP: a scheme and what follows."""
_SEPARATOR = re.compile(r"([A-Za-z_][\w.-]{0,80})(\\?[\"']?\s{0,9}(?:=>|:=|=|:)\s{0,99})")
_SECRET_WORD = re.compile(
    r"\b(password|passwd|passphrase|passcode|pwd|token|secret|api[ _-]?key|access[ _-]?key|credentials?)\b"
    r"((?:\s{1,9}[a-z]{1,20}){0,2}?(?:\s{1,9}(?:is|was)\s{1,9}|\s{0,9}[:=]\s{0,9})|\s{1,9})(?=\S)",
    re.IGNORECASE,
)
_NOT_SECRET = """
a an and are as at authentication bad by can cannot count embedding embeddings error expired failed file for
from given has have id ids in index invalid is length limit mask mismatch missing must not of on or out
positions rejected required sequence should size stream tensor that the to too type value values was were
which with wrong
"""
_NO_SECRET = frozenset(_NOT_SECRET.split())
"""Words that follow 'token' or 'password' in an error and are none."""
_URL = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]*://)([^\s\"'<>]+)")
_PLAIN_AUTHORITY = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")
_QUERY = re.compile(r"([?&;#])([^=&;#\s]+)=([^&;#\s]*)")
_PLAIN_VALUE = re.compile(r"-?\d{1,12}(\.\d{1,12})?|[A-Za-z]{0,12}")
_USER_AT_HOST = re.compile(r"(?<![\w/])[^\s/@:\"'=]{1,80}:(?!//)[^\s@]{1,200}@(?=[\w\[])")
_RUN = re.compile(r"[A-Za-z0-9+/_=.~%@:$!*-]{12,}")
_BASE64 = re.compile(r"[A-Za-z0-9+/]{16,}={0,2}")
_UUID = re.compile(r"(?<!GPU-)(?<!MIG-)\b[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b")
_DEVICE = re.compile(r"(?:GPU|MIG)-[0-9a-fA-F-]{36}(?![0-9a-fA-F])")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{1,16}")
_NATURAL = re.compile(r"(?:[A-Z]?[a-z]+){1,4}\d*|[A-Z]+\d*|[A-Z]?[a-z]*\d+[A-Za-z]{0,3}|")
"""A word of a path: words, then a number; or a number with a unit."""
_CLASSES = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_OPTION = re.compile(r"(--?[\w.-]+|[+~]{0,2}[\w.@/-]+)=(.*)", re.DOTALL)
_OPTION_NAME = re.compile(r"--?[A-Za-z][\w.-]{0,60}")
_HEADER_OPTIONS = frozenset(("-H", "--header", "--headers", "--http-header", "--extra-header"))
_USER_OPTIONS = frozenset(("-u", "--user", "--userpwd", "--proxy-user"))
_CLOSING = {"{": "}", "[": "]", "(": ")"}


def is_secret_name(name: str) -> bool:
    """Return True for the name of a setting, option, header or variable whose value may be a secret."""
    return _SECRET_NAME.search(_HUMP.sub("_", name)) is not None and _ERROR_NAME.fullmatch(name) is None


def redacted(text: str) -> str:
    """The text without what may be a secret; words, numbers and paths stay."""
    if len(text) > MOST_TEXT:
        text = f"{text[:MOST_TEXT]}... ({len(text)} characters)"
    text = _PEM.sub(REDACTED, text)
    text = _URL.sub(lambda match: match[1] + _of_url(match[2]), text)
    text = _USER_AT_HOST.sub(f"{REDACTED}@", text)
    text = _SCHEME.sub(lambda match: f"{match[0].split()[0]} {REDACTED}", text)
    text = "".join(_without_values(text))
    text = "".join(_without_words(text))
    text = _KNOWN_SECRET.sub(REDACTED, text)
    return _RUN.sub(lambda match: _without_opaque(match[0]), text)


def is_secret_value(value: str) -> bool:
    """Return True where a part of a setting's value may be a secret."""
    return redacted(value) != value


def redacted_command(arguments: Iterable[str]) -> list[str]:
    """A command line: values of options with a secret's name, and what may be one elsewhere, are replaced."""
    result: list[str] = []
    before = ""
    for argument in arguments:
        option = _OPTION.fullmatch(argument)
        if option is not None:
            name, value = option.groups()
            result.append(f"{name}={REDACTED if is_secret_name(name) else _value(value)}")
        elif before in _HEADER_OPTIONS:
            result.append(f"{argument.partition(':')[0]}: {REDACTED}" if ":" in argument else REDACTED)
        elif before in _USER_OPTIONS and ":" in argument:
            result.append(f"{argument.partition(':')[0]}:{REDACTED}")
        elif is_secret_name(before.lstrip("-")) and not argument.startswith("--"):
            result.append(REDACTED)
        else:
            result.append(argument if _OPTION_NAME.fullmatch(argument) else _value(argument))
        is_name = option is None and (argument.startswith("-") or argument.isidentifier())
        before = argument if is_name else ""
    return result


def redacted_settings(value: object, name: str = "") -> object:
    """Plain data (of a config, say) without secrets, by the key's name or by the look of the text."""
    if is_secret_name(name) and value not in (None, "") and not isinstance(value, bool):
        return REDACTED
    if isinstance(value, dict):
        return {redacted(str(key)): redacted_settings(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_settings(item, name) for item in value]
    return redacted(value) if isinstance(value, str) else value


def _value(text: str) -> str:
    """The value of an option or a setting; JSON by its keys."""
    if text[:1] in ("{", "["):
        try:
            return json.dumps(redacted_settings(json.loads(text)))
        except (ValueError, RecursionError):
            pass
    return redacted(text)


# -- structures in a text ------------------------------------------------------------------------------


def _of_url(rest: str) -> str:
    """What follows the scheme of a URL: no user, no values of its query but plain ones.

    A password may hold any sign, so all up to the last @ goes, unless a plain host comes before it.
    """
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    has_user = "@" in authority or ("@" in rest and _PLAIN_AUTHORITY.fullmatch(authority) is None)
    if has_user:
        rest = f"{REDACTED}@{rest.rpartition('@')[2]}"
    return _QUERY.sub(
        lambda match: match[0] if _is_plain_pair(match[2], match[3]) else f"{match[1]}{match[2]}={REDACTED}",
        rest,
    )


def _is_plain_pair(name: str, value: str) -> bool:
    return not is_secret_name(name) and _PLAIN_VALUE.fullmatch(value) is not None


def _without_values(text: str) -> Iterator[str]:
    """The text without the values of keys that name secrets: token=..., "api_key": "...", Cookie: ..."""
    place = 0
    while (match := _SEPARATOR.search(text, place)) is not None:
        yield text[place : match.end()]
        place = match.end()
        if is_secret_name(match[1]) and text[place:] and not text.startswith(REDACTED, place):
            end, quote = _value_end(text, place, ends_at_space=match[2].strip("\\\"'") == "=")
            yield f"{quote}{REDACTED}"
            place = end
    yield text[place:]


def _without_words(text: str) -> Iterator[str]:
    """The text with what follows 'password' and its like replaced: password hunter2, token is abc."""
    place = 0
    while (match := _SECRET_WORD.search(text, place)) is not None:
        yield text[place : match.end()]
        place = match.end()
        is_named = match[2].strip() != ""
        word = re.match(r"\w*", text[place:])
        if text.startswith(REDACTED, place) or (not is_named and word and word[0].lower() in _NO_SECRET):
            continue
        end, quote = _value_end(text, place, ends_at_space=not is_named)
        yield f"{quote}{REDACTED}"
        place = end
    yield text[place:]


def _value_end(text: str, start: int, ends_at_space: bool) -> tuple[int, str]:
    """(place behind the value, the quote it opens with). All the rest where nothing closes it."""
    opening = re.match(r"[bru]?(\\?[\"'])", text[start:])
    if opening is not None:
        place = text.find(opening[1], start + opening.end())
        return (len(text) if place < 0 else place), opening[1]
    closing = _CLOSING.get(text[start])
    if closing is not None:
        place = text.rfind(closing, start)
        return (len(text) if place < 0 else place + 1), ""
    end = re.compile(r"[\s&\"')\]}]" if ends_at_space else r"[\n\"')\]}]").search(text, start)
    return (len(text) if end is None else end.start()), ""


# -- long values ---------------------------------------------------------------------------------------


def _without_opaque(run: str) -> str:
    """A run of signs without spaces; its opaque parts, or all of it where it is no path, are replaced."""
    run = _UUID.sub(REDACTED, run)
    base64 = _BASE64.fullmatch(run)
    if base64 is not None and ("+" in run or run.endswith("=")):
        return REDACTED if _is_opaque_word(re.sub(r"[+/=]", "", run)) else run
    parts = re.split(r"([/@:=])", run)
    opaque = [_is_opaque(part) for part in parts]
    odd = [not _is_natural(part) for part in parts]
    is_path = run.startswith(("/", ".", "~"))
    num_odd = sum(len(part) for part, is_odd in zip(parts, odd, strict=True) if is_odd and len(part) >= 6)
    if not any(opaque) and (is_path or "/" not in run or num_odd < 24):
        return run
    if "/" in run and not is_path and ":" not in run:
        return REDACTED
    hidden = [a or b for a, b in zip(opaque, odd, strict=True)]
    return "".join(REDACTED if is_hidden else part for part, is_hidden in zip(parts, hidden, strict=True))


def _is_natural(part: str) -> bool:
    return part in "/@:=" or all(map(_NATURAL.fullmatch, re.split(r"[^A-Za-z0-9]+", part)))


def _is_opaque(part: str) -> bool:
    """Return True for a name that is not made of words and numbers."""
    if len(part) < 12 or REDACTED in part or _DEVICE.search(part) or _ADDRESS.fullmatch(part):
        return False
    words = re.split(r"[^A-Za-z0-9]+", part)
    num_mixed = sum(len(_CLASSES.findall(word)) >= 3 for word in words if 4 <= len(word) <= 8)
    return any(map(_is_opaque_word, words)) or (len(part) >= 20 and num_mixed >= 3)


def _is_opaque_word(word: str) -> bool:
    """Return True for letters and digits in a wild order, which neither a word nor a number has."""
    num_pieces = len(_CLASSES.findall(word))
    if word.isdecimal():
        return len(word) > 24
    if word.isalpha():
        vowels = sum(letter in "aeiouyAEIOUY" for letter in word)
        return len(word) >= 20 and (num_pieces > len(word) / 4 or vowels < 0.2 * len(word))
    return (len(word) >= 12 and num_pieces >= 5) or (len(word) >= 16 and num_pieces >= 4) or len(word) >= 24
