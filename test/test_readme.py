"""What the README and the quick start show runs as it stands, and what the documents name exists."""

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
DOCS = ROOT / "docs"
PAGES = ("arguments", "control_plane", "features", "gpus", "operations", "quick_start", "recipes")
DOCUMENTS = [README, DOCS / "troubleshooting.md", *(DOCS / f"{name}.md" for name in PAGES)]
# Flags of other programs, of the demo, and of commands that ask a server.
FOREIGN_FLAGS = {"--client", "--dashboard-port", "--no-compile", "--shm-size", "--steps"}
FOREIGN_FLAGS |= {"--help", "--json", "--mode", "--update", "--url"}


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
    files = [
        str(path) for folder in ("python", "test", "bench", "docs") for path in (ROOT / folder).rglob("*.py")
    ]
    assert [name for name in sorted(named) if not fnmatch.filter(files, f"*/{name}")] == []


def example_of(path: Path) -> str:
    [found] = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


def test_the_python_of_the_readme_runs(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(example_of(README).replace("1500", "500"))  # tokens
    *_, spans = play(script).splitlines()
    assert "'version': 'default', 'start': 0, " in spans
    assert "'version': '1', " in spans


def test_the_training_step_of_the_quick_start_runs(tmp_path: Path) -> None:
    example = example_of(DOCS / "quick_start.md")
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "Qwen3ForCausalLM")
    script = tmp_path / "example.py"
    script.write_text(example.replace('"Qwen/Qwen3-0.6B"', repr(str(checkpoint))))
    written = play(script)
    assert " bytes of weights are free\n" in written
    assert "[{'version': '1', 'start': 0, " in written.splitlines()[-1]
