"""Four weights of 8 bits at a time: a word of 32 bits becomes four numbers by the fewest instructions."""

# Triton has no types, and a kernel is not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

import triton
import triton.language as tl


@triton.jit
def _floats(words):
    """The lower and the upper bfloat16 of words of 32 bits, float32."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def four(words, ASM: tl.constexpr):
    """The four numbers of 8 bits in words of 32, float32."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
                .reg .b16 low, high, p, q;
                .reg .b32 first, second;
                mov.b32 {low, high}, $4;
                cvt.rn.f16x2.e4m3x2 first, low;
                cvt.rn.f16x2.e4m3x2 second, high;
                mov.b32 {p, q}, first;
                cvt.f32.f16 $0, p;
                cvt.f32.f16 $1, q;
                mov.b32 {p, q}, second;
                cvt.f32.f16 $2, p;
                cvt.f32.f16 $3, q;
            }""",
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        a = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        b = ((words >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        c = ((words >> 16) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        d = ((words >> 24) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return a, b, c, d


@triton.jit
def four_of(ptr, word, inside, ASM: tl.constexpr):
    """Four neighbours in bfloat16 at a time, float32."""
    if ASM:
        four = tl.load(ptr + word, mask=inside, other=0)
        low, high = four.to(tl.int32), (four >> 32).to(tl.int32)
        a, b = _floats(low)
        c, d = _floats(high)
    else:
        a = tl.load(ptr + 4 * word, mask=inside, other=0.0)
        b = tl.load(ptr + 4 * word + 1, mask=inside, other=0.0)
        c = tl.load(ptr + 4 * word + 2, mask=inside, other=0.0)
        d = tl.load(ptr + 4 * word + 3, mask=inside, other=0.0)
    return a, b, c, d


@triton.jit
def fours(words, x0, x1, x2, x3, ASM: tl.constexpr):
    """What the four numbers of each word come to."""
    w0, w1, w2, w3 = four(words, ASM)
    return w0 * x0[None, :] + w1 * x1[None, :] + w2 * x2[None, :] + w3 * x3[None, :]


@triton.jit
def row_sums(words, x0, x1, x2, x3, scale, ASM: tl.constexpr):
    return tl.sum(fours(words, x0, x1, x2, x3, ASM) * scale[None, :], axis=1)
