"""Asking for memory ahead of time."""

# Triton has no types, and a kernel is not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

import triton
import triton.language as tl


@triton.jit
def prefetch(pointers) -> None:
    """Bring the lines of these addresses into the second-level cache; nobody waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
