"""Refuses to build where a real SGLang is installed: pip would replace it without a word."""

import sysconfig
from importlib.metadata import distributions

from setuptools import setup

OURS = "+ebbtide"


def check_nothing_is_replaced() -> None:
    """Look into the environment that is installed into; pip builds with its interpreter."""
    folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    for found in distributions(name="sglang", path=folders):
        if not found.version.endswith(OURS):
            raise SystemExit(
                f"sglang {found.version} is installed in {folders[0]}: Ebbtide's package of that name would "
                "replace it. Uninstall it first (pip uninstall sglang), or use another environment."
            )


check_nothing_is_replaced()
setup()
