"""Commands that were documented under another module's name keep it."""

import importlib

import pytest

DOORS = {
    "aorta.profilers.merge": "aorta.merge.command",
    "aorta.profilers.hang": "aorta.hang.__main__",
    "aorta.hw_queue_eval.__main__": "aorta.queues.cli",
    "aorta.host_ir.__main__": "aorta.programs.cli",
}


@pytest.mark.parametrize(("earlier", "home"), DOORS.items())
def test_a_command_of_an_earlier_name_is_the_command_of_today(earlier, home):
    assert importlib.import_module(earlier).main is importlib.import_module(home).main
