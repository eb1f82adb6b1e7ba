"""The README's Python example runs as it stands but for the model, and what the documents name exists."""

import argparse
import ast
import fnmatch
import importlib
import re
from pathlib import Path

import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.compat import play

from ebbtide.srt.server_args import ServerArgs

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DOCUMENTS = [README, ROOT / "docs" / "control_plane.md"]
# Flags of other programs and of the demo.
FOREIGN_FLAGS = {"--dashboard-port", "--editable", "--index-url", "--shm-size", "--steps"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_flags_that_are_named_exist(path: Path) -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = set(re.findall(r"--[a-z][a-z-]+", parser.format_help())) | FOREIGN_FLAGS
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text(encoding="utf-8")))
    assert named - known == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_functions_that_are_named_exist(path: Path) -> None:
    for dotted in set(re.findall(r"`(ebbtide(?:\.\w+)+)(?:\(\))?`", path.read_text(encoding="utf-8"))):
        module, _, name = dotted.rpartition(".")
        if not hasattr(importlib.import_module(module), name):
            importlib.import_module(dotted)


def walks() -> list[list[tuple[str, ...]]]:
    """The lists of "How the code is read": of each step its file and its function."""
    text = CONTRIBUTING.read_text(encoding="utf-8")
    section = text.partition("## How the code is read\n")[2].partition("\n## ")[0]
    lists = [re.findall(r"^\d+\. .*", paragraph, re.M) for paragraph in section.split("\n\n")]
    steps = [[re.match(r"\d+\. `(\S+)` `(\S+)`: ", line) for line in lines] for lines in lists if lines]
    return [[step.groups() if step else ("", "") for step in walk] for walk in steps]


def functions(path: Path) -> set[str]:
    """Every function and method of a file, as `f` or `Class.f`."""
    known = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        known |= {owner + member.name for member in members if isinstance(member, kinds)}
    return known


def test_the_walks_through_the_code_lead_somewhere() -> None:
    assert [len(steps) <= 12 for steps in walks()] == [True] * 4
    missing = [
        f"{file} {name}"
        for steps in walks()
        for file, name in steps
        if not file or name not in functions(ROOT / "python/ebbtide/srt" / file)
    ]
    assert missing == []


def test_files_that_contributing_names_exist() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    named = {name for name in re.findall(r"[\w./*]+\.py\b", text) if "foo" not in name}
    files = [str(path) for folder in ("python", "test", "bench") for path in (ROOT / folder).rglob("*.py")]
    assert [name for name in sorted(named) if not fnmatch.filter(files, f"*/{name}")] == []


def test_the_python_example_runs(tmp_path: Path) -> None:
    # The others need a cluster, or GPUs.
    example, *_ = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "Qwen3ForCausalLM")
    script = tmp_path / "example.py"
    script.write_text(example.replace('"Qwen/Qwen3-0.6B"', repr(str(checkpoint))))
    written = play(script)
    assert " bytes of weights are free\n" in written
    assert "[{'version': '1', 'start': 0, " in written.splitlines()[-1]
