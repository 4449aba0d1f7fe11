"""A checkpoint's pickles may name what a checkpoint consists of, and nothing else."""

import enum
import io
import os
import pickle

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from aorta.training import checkpoint
from aorta.training.checkpoint import SafeReader, checksum


class StorageWriterVersion(enum.Enum):
    A = 1


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_metadata_that_calls_a_function_is_refused_before_it_does(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(pickle.UnpicklingError, match="which no checkpoint needs"):
        SafeReader(tmp_path).read_metadata()
    assert not (tmp_path / "ran").exists()


class Gets:
    """As Python 3.11.0 to 3.11.3 pickle members of enumerations, and what that could be used for."""

    def __init__(self, *of):
        self.of = of

    def __reduce__(self):
        return getattr, self.of


@pytest.mark.parametrize(
    ("of", "is_read"),
    [
        ((StorageWriterVersion, "A"), True),
        ((StorageWriterVersion, "__subclasses__"), False),
        ((os, "mkdir"), False),
        ((str, "format"), False),
    ],
)
def test_members_of_enumerations_are_all_that_getattr_gives(monkeypatch, of, is_read):
    written = io.BytesIO()
    pickler = pickle.Pickler(written)
    pickler.dispatch_table = {type(os): lambda module: (__import__, (module.__name__,))}
    pickler.dump(Gets(*of))
    written.seek(0)
    allowed = {(__name__, "StorageWriterVersion"), ("builtins", "str"), ("builtins", "__import__")}
    monkeypatch.setattr(checkpoint, "_SAFE_NAMES", allowed)
    if is_read:
        assert checkpoint._Unpickler(written).load() is StorageWriterVersion.A
    else:
        with pytest.raises(pickle.UnpicklingError, match="is no member of an enumeration"):
            checkpoint._Unpickler(written).load()


def test_plain_metadata_is_read(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(state_dict_metadata={})))
    assert SafeReader(tmp_path).read_metadata().state_dict_metadata == {}


def test_a_flipped_bit_changes_the_checksum(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"\x00" * 1000)
    before = checksum(path)
    path.write_bytes(b"\x00" * 999 + b"\x01")
    assert checksum(path) != before
