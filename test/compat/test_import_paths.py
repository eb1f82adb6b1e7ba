"""Every import path of wire_api section 8, in interpreters of their own, and what is said of all others."""

import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from fixtures.compat import COMPAT, IMPORTS, output_of, run_python

LIGHT = """
import json, psutil, sys, threading
print(json.dumps({
    "heavy": sorted({"transformers", "triton", "flashinfer"} & sys.modules.keys()),
    "threads": threading.active_count(),
    "has a GPU": sys.modules["torch"].cuda.is_initialized(),
    "children": [child.pid for child in psutil.Process().children()],
}))
"""


def test_all_paths_are_there_and_importing_them_starts_nothing() -> None:
    found = json.loads(output_of(IMPORTS + LIGHT))
    assert found == {"heavy": [], "threads": 1, "has a GPU": False, "children": []}


def test_the_version_is_sglangs_or_as_told() -> None:
    show = "import sglang; print(sglang.__version__)"
    assert output_of(show) == "0.5.23\n"
    assert output_of(show, EBBTIDE_SGLANG_VERSION="0.5.7") == "0.5.7\n"


def test_other_paths_fail_with_one_line() -> None:
    statements = ["import sglang.srt.managers.scheduler", "from sglang.srt.layers import attention"]
    script = "\n".join(
        f"try:\n    {statement}\nexcept ImportError as error:\n    print(error)" for statement in statements
    )
    lines = output_of(script).splitlines()
    assert len(lines) == len(statements)
    assert all("sglang" in line for line in lines)


NAMES_ONLY = """
import importlib
for path, name in (
    ("sglang.srt.layers.quantization.fp8_utils", "initialize_fp8_gemm_config"),
    ("sglang.srt.model_loader", "get_model"),
):
    try:
        getattr(importlib.import_module(path), name)(1, a=2)
    except NotImplementedError as error:
        print(str(error).startswith(path) and "is not in Ebbtide" in str(error))
"""


def test_what_is_a_name_only_says_so_when_it_is_used() -> None:
    assert output_of(NAMES_ONLY) == "True\n" * 2


def fake_sglang(folder: Path) -> None:
    """The traces of a real SGLang."""
    metadata = folder / "sglang-0.5.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.9\n")


def test_a_real_sglang_is_not_hidden(tmp_path: Path) -> None:
    fake_sglang(tmp_path)
    script = f"import sys; sys.path.append({str(tmp_path)!r})\nimport sglang"
    done = run_python(script)
    assert "ImportError: sglang 0.5.9 is installed, and Ebbtide's package" in done.stderr


def test_installed_in_an_environment_of_its_own(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    [packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Ebbtide, torch and the tools that build: those of this environment.
    ours = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in ours]
    (packages / "ours.pth").write_text("".join(lines))
    # Building leaves things behind in the folder that is built.
    ignore = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    source = shutil.copytree(COMPAT, tmp_path / "compat", ignore=ignore)
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-build-isolation"]
    command += ["--no-deps", "--no-index", "--disable-pip-version-check", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [
        sorted(file.relative_to(folder) for file in (folder / "sglang").rglob("*.py"))
        for folder in (packages, COMPAT)
    ]
    assert names[0] == names[1]
    script = (
        "import sglang\nfrom importlib.metadata import version\nprint(sglang.__file__, version('sglang'))"
    )
    shown = run_python(script, python=str(python), PYTHONPATH=str(COMPAT.parent / "python"))
    assert shown.stdout == f"{packages}/sglang/__init__.py 0.5.23+ebbtide\n", shown.stderr


def test_a_real_sglang_is_not_replaced(tmp_path: Path) -> None:
    """What pip runs first, in an environment that has one."""
    fake_sglang(tmp_path)
    script = f"import runpy, sysconfig\nsysconfig.get_path = lambda name: {str(tmp_path)!r}\n"
    done = run_python(script + f"runpy.run_path({str(COMPAT / 'setup.py')!r})")
    assert done.returncode != 0
    assert "sglang 0.5.9 is installed in" in done.stderr
