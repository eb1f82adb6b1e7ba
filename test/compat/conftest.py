"""These tests import the compatibility package as its users do: by its folder on the path."""

import sys
from pathlib import Path

COMPAT = Path(__file__).parents[2] / "compat"
sys.path.insert(0, str(COMPAT))
