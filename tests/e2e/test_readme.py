from __future__ import annotations

import re
from pathlib import Path

from tests.support.processes import run_python

README = Path(__file__).resolve().parents[2] / "README.md"


def python_examples():
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_readme_client_runs(cluster, tmp_path):
    script = tmp_path / "client.py"
    script.write_text(python_examples()[0], encoding="utf-8")
    result = run_python(script, cluster.router_address)
    assert result.returncode == 0, result.stderr
    assert "mean acceptance length" in result.stdout
