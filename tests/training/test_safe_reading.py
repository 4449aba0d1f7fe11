"""A checkpoint's pickles may name what a checkpoint consists of, and nothing else."""

import os
import pickle

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from aorta.training.checkpoint import SafeReader, checksum


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


def test_plain_metadata_is_read(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(state_dict_metadata={})))
    assert SafeReader(tmp_path).read_metadata().state_dict_metadata == {}


def test_a_flipped_bit_changes_the_checksum(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"\x00" * 1000)
    before = checksum(path)
    path.write_bytes(b"\x00" * 999 + b"\x01")
    assert checksum(path) != before
