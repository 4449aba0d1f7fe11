"""The one reader of YAML."""

import os

import pytest

from aorta.config.yaml_files import MAX_CHARACTERS, parse_yaml, read_yaml
from aorta.errors import ConfigError

HOSTILE = {
    "open flow sequences": "[" * 1_000_000,
    "closed flow sequences": "[" * 300_000 + "]" * 300_000,
    "mappings in mappings": "{a: " * 200_000,
    "explicit keys in a line": "? " * 100_000,
    "sequences in a line": "- " * 100_000,
    "an alias to itself": "a: &x [*x]",
    "a billion laughs": "\n".join(
        ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 30)]
    ),
    "an object": "!!python/object/apply:os.system ['true']",
    "a date": "a: 2026-11-22",
    "a set": "a: !!set {x, y}",
    "bytes": "a: !!binary aGVsbG8=",
    "a huge integer": "a: 99999999999999999999",
    "no integer": "a: !!int x",
    "a null character": "\x00",
    "a key twice": "a: 1\nb:\n  c: 1\n  c: 2",
    "unhashable key": "? [a, b]\n: 1",
    "too long": "a: " + "x" * MAX_CHARACTERS,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_no_settings_is_one_line(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_yaml(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(path)) + 300


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.e-3", "+.1e-2", "1.0e-3"])
def test_a_number_with_an_exponent_is_a_number(text):
    assert parse_yaml(text, "x") == pytest.approx(1e-3)


@pytest.mark.parametrize("text", ["on", "off", "yes", "no", "On", "OFF"])
def test_on_and_off_are_words(text):
    assert parse_yaml(text, "x") == text


def test_true_and_false_are_truth_values():
    assert parse_yaml("[true, True, false]", "x") == [True, True, False]


def test_a_number_of_one_type_and_a_text_are_two_keys():
    assert parse_yaml("1: a\n'1': b", "x") == {1: "a", "1": "b"}


def test_merge_keys_override():
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}", "x")["b"] == {"x": 3, "y": 2}


def test_aliases_may_be_refused():
    with pytest.raises(ConfigError, match=r"^--budget b, line 2: not valid YAML: aliases are not allowed"):
        parse_yaml("a: &x 1\nb: *x", "--budget b", aliases=False)
    assert parse_yaml("a*b: 1", "x", aliases=False) == {"a*b": 1}


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x80")
    for path, reason in (
        (tmp_path / "absent", "No such file"),
        (tmp_path, "not a regular file"),
        (fifo, "not a regular file"),
        (tmp_path / "binary", "not a text file"),
    ):
        with pytest.raises(ConfigError, match=reason) as error:
            read_yaml(path)
        assert "\n" not in str(error.value)
