"""Building blocks of kernels: instructions that Triton lacks, and those with which kernels overlap.

If OVERLAPPED is true, a kernel was launched with programmatic dependent launch: it may start before the
previous kernel has ended, and must wait before it reads or writes what others write. The interpreter cannot
do this.
"""

# Triton kernels have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"
# mypy: disallow-untyped-calls=False

import triton
import triton.language as tl


@triton.jit
def exp2_or_0(x, ASM: tl.constexpr):
    """2ˣ, or 0 if that is subnormal, in one instruction; Triton's own takes four."""
    if ASM:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def prefetch(pointers) -> None:
    """Prefetch the cache lines of these addresses into the L2 cache, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def announce(OVERLAPPED: tl.constexpr) -> None:
    """Let blocks of the next kernel start as soon as there is room."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(OVERLAPPED: tl.constexpr) -> None:
    """Wait until the previous kernel has ended and its writes are visible."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def lead(OVERLAPPED: tl.constexpr) -> None:
    """Let the next kernel start, then wait for the previous one."""
    announce(OVERLAPPED)
    wait(OVERLAPPED)


@triton.jit
def follow(OVERLAPPED: tl.constexpr) -> None:
    """Wait for the previous kernel, then let the next one start, which can then read what this one can."""
    wait(OVERLAPPED)
    announce(OVERLAPPED)


@triton.jit
def capped(score, soft_cap, CAPPED: tl.constexpr):
    """soft_cap · tanh(score / soft_cap)."""
    if CAPPED:
        # tanh(z) = 1 − 2 / (1 + exp(2z))
        score = soft_cap - 2.0 * soft_cap / (1.0 + tl.exp(2.0 * score / soft_cap))
    return score
