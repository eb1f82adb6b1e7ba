"""Kernels in CUDA: compiled once, with a stand-in for the compiler, and found in what came of it."""

import ctypes
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from ebbtide.srt.layers.kernels import nvrtc

CUBIN, WORDS = b"machine code", b"kernel.cu(3): error: no such type\n\0"


class Compiler:
    """Stands in for NVRTC: a program with an error in it is not compiled."""

    def __init__(self) -> None:
        self.programs: dict[int, bytes] = {}
        self.num_made = 0
        self.nvrtcVersion = lambda: (0, 13, 0)
        self.nvrtcGetProgramLogSize = lambda program: (0, len(WORDS))
        self.nvrtcGetCUBINSize = lambda program: (0, len(CUBIN))
        # Into the bytes that the caller gave, as the library writes.
        self.nvrtcGetProgramLog = lambda program, room: ctypes.memmove(room, WORDS, len(WORDS))
        self.nvrtcGetCUBIN = lambda program, room: ctypes.memmove(room, CUBIN, len(CUBIN))
        self.nvrtcDestroyProgram = self.programs.pop

    def nvrtcCreateProgram(self, text: bytes, *names: object) -> tuple[int, int]:
        self.num_made += 1
        self.programs[self.num_made] = text
        return 0, self.num_made

    def nvrtcCompileProgram(self, program: int, num_options: int, options: list[bytes]) -> tuple[int]:
        return (6 if b"error" in self.programs[program] else 0,)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    compiler = Compiler()
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", compiler)  # type: ignore[arg-type]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return compiler


def test_a_text_is_compiled_once_with_the_same_options(compiler: Compiler) -> None:
    options = ("-O3",), ("-O3",), ("-O1",)

    assert [nvrtc.compiled("text", given) for given in options] == [CUBIN] * 3

    assert compiler.num_made == 2
    assert not compiler.programs


def test_what_cannot_be_compiled_is_an_error_in_the_compilers_words_and_leaves_no_program(
    compiler: Compiler,
) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^kernel\.cu\(3\): error: no such type$"):
            nvrtc.compiled("an error", ())

    assert compiler.num_made == 2
    assert not compiler.programs


def test_the_kernel_is_found_among_names_that_have_its_own_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(nvrtc, "call", lambda name, *given: asked.append((name, given[-1])))
    names = (b"_ZSt9is_same_vIZ15fp8_gemm_kernelvE10DivisibleE", b".text._Z15fp8_gemm_kernelv", b"_Z1av")

    nvrtc.Kernel(b"\0".join(names), "fp8_gemm_kernel", 256, 1024)

    assert ("cuModuleGetFunction", b"_Z15fp8_gemm_kernelv") in asked
