"""The SGLang version that this package reports. Some frameworks accept certain versions only."""

import os

__version__ = os.environ.get("EBBTIDE_SGLANG_VERSION", "0.5.23")
