"""The README's Python example, run as it stands but for the model."""

import re
import subprocess
import sys
from pathlib import Path

from fixtures.checkpoints import make_checkpoint

README = Path(__file__).parent.parent / "README.md"


def test_the_python_example_runs(tmp_path: Path) -> None:
    [example] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "Qwen3ForCausalLM")
    script = tmp_path / "example.py"
    script.write_text(example.replace('"Qwen/Qwen3-0.6B"', repr(str(checkpoint))))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=200, check=False, errors="replace"
    )
    assert done.returncode == 0, done.stderr
    assert " bytes of weights are free\n" in done.stdout
    assert "[{'version': '1', 'start': 0, " in done.stdout.splitlines()[-1]
