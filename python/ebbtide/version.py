"""The version of this package, and where it lies: for what must not import the names of `ebbtide`."""

from pathlib import Path
from typing import Final

__version__ = "0.1.0"

# The folder that has the package `ebbtide`.
SOURCE_ROOT: Final = Path(__file__).resolve().parent.parent
