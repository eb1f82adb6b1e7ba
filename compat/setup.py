"""Refuses to build if a real SGLang is installed, since pip would replace it silently."""

import sysconfig
from importlib.metadata import distributions

from setuptools import setup

OURS = "+ebbtide"


def check_nothing_is_replaced() -> None:
    """Check the target environment, whose interpreter pip builds with. Raises SystemExit."""
    folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    for found in distributions(name="sglang", path=folders):
        if not found.version.endswith(OURS):
            raise SystemExit(
                f"sglang {found.version} is installed in {folders[0]}: Ebbtide's package of that name would "
                "replace it. Uninstall it first (pip uninstall sglang), or use another environment."
            )


check_nothing_is_replaced()
setup()
