"""Which library a file belongs to, by the folders that Python imports from."""

import sys
from types import SimpleNamespace

from aorta.records.libraries import library_of


def test_what_pip_installed_into_a_folder_of_pythonpath_is_a_library(tmp_path, monkeypatch):
    (tmp_path / "libs" / "accelerate-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    monkeypatch.syspath_prepend(str(tmp_path / "libs"))
    assert library_of(str(tmp_path / "libs" / "accelerate" / "utils" / "operations.py")) == "accelerate"
    assert library_of(str(tmp_path / "libs" / "six.py")) == "six"
    assert library_of(str(tmp_path / "project" / "model.py")) == ""


def test_packages_that_are_installed_beside_the_program_leave_it_the_program(tmp_path, monkeypatch):
    (tmp_path / "torchmetrics-1.0.dist-info").mkdir()
    script = SimpleNamespace(__file__=str(tmp_path / "train.py"), __spec__=None)
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert library_of(str(tmp_path / "data.py")) == ""


def test_cells_of_a_notebook_are_the_program_and_generated_code_is_not():
    assert [library_of(name) for name in ("<cell 3>", "<ipython-input-3-a1>", "<stdin>", "<string>")] == [
        "", "", "", "python",
    ]  # fmt: skip
