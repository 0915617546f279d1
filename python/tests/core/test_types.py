"""What type checkers are told of the package."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
README = HERE.parents[2] / "README.md"


# mypy reads all of torch's types first, which takes minutes on busy cores.
@pytest.mark.timeout(1100)
def test_mypy_strict_accepts_the_readme_and_a_program(tmp_path):
    (program,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.S | re.M)
    readme = tmp_path / "readme.py"
    readme.write_text(program)
    # Not the clone's own settings: those of a user, who has none.
    command = [sys.executable, "-P", "-m", "mypy", "--strict", "--config-file="]
    command += ["--cache-dir", tmp_path / "cache", "--no-error-summary"]
    command += [HERE / "typed/program.py", readme]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
