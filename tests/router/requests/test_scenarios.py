"""Scenarios of one request (`tests/router/scenarios/*.txt`): the machine's response to each event.

`pytest tests/router/requests/test_scenarios.py --rewrite` writes the responses into the files; review the diff.
"""

from __future__ import annotations

import pytest

from tests.support.scenarios import Scenario, scenario_files


@pytest.mark.parametrize("path", scenario_files(), ids=lambda path: path.stem)
def test_a_story_is_told_as_it_is_written(path, request):
    written = path.read_text()
    told = Scenario(written).play()
    if request.config.getoption("--rewrite"):
        path.write_text(told)
    else:
        assert told == written
