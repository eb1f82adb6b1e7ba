"""The version of SGLang whose surface this is; some frameworks know only a list of their own."""

import os

__version__ = os.environ.get("EBBTIDE_SGLANG_VERSION", "0.5.23")
