from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def python_examples():
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_readme_client_runs(cluster, tmp_path):
    script = tmp_path / "client.py"
    script.write_text(python_examples()[0], encoding="utf-8")
    result = subprocess.run(
        [sys.executable, script, cluster.router_address], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "mean acceptance length" in result.stdout
