"""FlashInfer's paged attention kernels, and the memory for their plans.

FlashInfer's wrappers copy page tables back and forth and wait for the device while they plan. The modules
that they call do not: `plan` takes lengths on the host, computes each block's work, and enqueues one copy
from pinned memory; `run` launches. All plans can share one workspace, because steps run one after the other
on one stream, and the copy of a plan is enqueued after the step before.

With a KV cache in FP8, decode steps use a kernel of our own. For prompts, pages are widened layer by layer to
the queries' dtype, which represents every FP8 number, and attended to by the usual kernel. These kernels
apply no scales: see `rotate_and_store` and `scaled_outputs_`.

Shapes: T tokens, R requests, N query heads, K KV heads, H head_dim, P pages, S page_size.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.kernel_cache import add_scripts_to_path, compiled_as_they_are
from ebbtide.srt.layers.attention.base import AttentionShape, Progress
from ebbtide.srt.layers.attention.decode_choice import DecodeKernel, kernel_for, unsplit_from
from ebbtide.srt.layers.attention.paged_kernel import HostLens, Operands, PagedKernel, UntilCompiled
from ebbtide.srt.layers.heads import AttentionKind, Pages
from ebbtide.srt.layers.kernels.launch import can_overlap, num_multiprocessors

# FlashInfer's plans for Hopper prefill list every block: at most 4,096 per head, with 28 bytes each.
_PLAN_BYTES = 16 << 20
# For alignment, on top of the partial results.
_SPARE_BYTES = 1 << 20
_THREADS_PER_SM, _DECODE_THREADS = 2048, 128
_NO_WINDOW, _NO_SOFT_CAP = -1, 0.0  # FlashInfer's values for None
_ROPE_SCALE, _ROPE_THETA = 1.0, 1e4  # unused, since rotation inside the kernels is off
# The most tokens that a step with prompts widens: 256 MiB for eight heads of 128. Steps with more tokens
# attend to FP8 directly.
_ROOM_TOKENS = 65_536
_FIRST_BACKEND = "fa2"  # its kernels compile in 20 s, those for Hopper in a minute or more


class Workspace:
    """Memory for plans, on the device and pinned on the host, and for partial results of split requests.

    It holds the plan of one step. Partial results may be shared with other workspaces. There are two pinned
    buffers, since the copy of the previous plan may still wait for its step; an event for each says that its
    last copy has run.
    """

    def __init__(self, partial: Tensor) -> None:
        self.partial = partial
        self.plans = torch.zeros(_PLAN_BYTES, dtype=torch.uint8, device=partial.device)
        self._staging = [torch.zeros(_PLAN_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._next = 0

    def plan(self, plan: Any, *args: Any) -> Any:
        """Call a module's plan function with this memory."""
        turn = self._next
        self._next = 1 - turn
        self._copied[turn].synchronize()
        planned = plan(self.partial, self.plans, self._staging[turn], *args)
        self._copied[turn].record()
        return planned


class StreamKernel:
    """One token per request, on CUDA cores. The kernel reads keys and values once per group of heads."""

    def __init__(self, shape: AttentionShape, kind: AttentionKind, workspace: Workspace) -> None:
        from flashinfer.decode import get_batch_decode_module
        from flashinfer.utils import TensorLayout

        self._shape, self._kind, self._workspace = shape, kind, workspace
        with compiled_as_they_are():
            self._module = get_batch_decode_module(*_module_key(shape, kind))
        self._layout = TensorLayout.NHD.value
        self._of_dtype = torch.empty(0, dtype=shape.dtype)
        self._of_kv_dtype = torch.empty(0, dtype=shape.kv_dtype)
        self._overlapped = can_overlap(workspace.partial.device)

    def plan(self, lens: HostLens, *, captured: bool) -> Any:
        shape = self._shape
        return self._workspace.plan(
            self._module.plan,
            lens.kv_indptr_R1,
            len(lens.lens_R),
            shape.num_q_heads,
            shape.num_kv_heads,
            shape.page_size,
            captured,
            _window_left(self._kind),
            _soft_cap(self._kind),
            shape.head_dim,
            shape.head_dim,
            self._of_dtype,
            self._of_kv_dtype,
        )

    def run(self, plan: Any, pages: Pages, x: Operands) -> None:
        self._module.run(
            self._workspace.partial,
            self._workspace.plans,
            plan,
            x.q_TNH,
            x.k_PSKH,
            x.v_PSKH,
            pages.kv_indptr_R1,
            pages.kv_indices,
            pages.last_page_len_R,
            x.out_TNH,
            x.sums_TN,
            self._layout,
            _window_left(self._kind),
            self._overlapped,
            None,
            _soft_cap(self._kind),
            self._kind.scale,
            _ROPE_SCALE,
            _ROPE_THETA,
        )


class TileModule:
    """FlashInfer's compiled kernel for tiles of queries, on tensor cores.

    Args:
        causal: false if every request has just one new token, which attends to everything.
        backend: FlashInfer's name: fa2, or fa3 for Hopper. Only fa2 can be captured.
    """

    def __init__(
        self, shape: AttentionShape, kind: AttentionKind, device: torch.device, *, causal: bool, backend: str
    ) -> None:
        from flashinfer.prefill import get_batch_prefill_module
        from flashinfer.utils import MaskMode, TensorLayout

        self._kind = kind
        self._mask = (MaskMode.CAUSAL if causal else MaskMode.NON_CAUSAL).value
        self._layout = TensorLayout.NHD.value
        with compiled_as_they_are():
            self._module = get_batch_prefill_module(backend, *_module_key(shape, kind), False)
        self._overlapped = backend == "fa2" and can_overlap(device)
        self.plan = self._module.plan

    def run(self, partial: Tensor, plans: Tensor, plan: Any, pages: Pages, x: Operands) -> None:
        """Attend by a plan that is in `plans`, with partial results in `partial`."""
        self._module.paged_run(
            float_workspace_buffer=partial,
            int_workspace_buffer=plans,
            plan_info_vec=plan,
            q=x.q_TNH,
            paged_k_cache=x.k_PSKH,
            paged_v_cache=x.v_PSKH,
            qo_indptr=pages.q_indptr_R1,
            paged_kv_indptr=pages.kv_indptr_R1,
            paged_kv_indices=pages.kv_indices,
            paged_kv_last_page_len=pages.last_page_len_R,
            o=x.out_TNH,
            maybe_lse=x.sums_TN,
            mask_mode=self._mask,
            layout=self._layout,
            window_left=_window_left(self._kind),
            enable_pdl=self._overlapped,
            maybe_custom_mask=None,
            maybe_mask_indptr=None,
            maybe_alibi_slopes=None,
            maybe_prefix_len_ptr=None,
            maybe_token_pos_in_items_ptr=None,
            maybe_max_item_len_ptr=None,
            logits_soft_cap=_soft_cap(self._kind),
            sm_scale=self._kind.scale,
            scale_q=None,
            scale_k=None,
            scale_v=None,
            rope_scale=_ROPE_SCALE,
            rope_theta=_ROPE_THETA,
            token_pos_in_items_len=0,
            workspace_size=partial.nbytes,
        )


class PrefillKernel:
    """Any number of new tokens per request, on tensor cores. Arguments as for `TileModule`."""

    def __init__(
        self, shape: AttentionShape, kind: AttentionKind, workspace: Workspace, *, causal: bool, backend: str
    ) -> None:
        device = workspace.partial.device
        self._shape, self._kind, self._workspace = shape, kind, workspace
        self._causal, self._backend = causal, backend
        self._module = TileModule(shape, kind, device, causal=causal, backend=backend)
        self._unsplit_from = unsplit_from(shape, device)

    def plan(self, lens: HostLens, *, captured: bool) -> Any:
        shape, num_requests = self._shape, len(lens.lens_R)
        # With so many requests every multiprocessor is busy without splits. FlashInfer's plan for graphs
        # always splits, so this one is not for graphs; without splits its grid depends only on the number of
        # requests.
        unsplit = captured and num_requests >= self._unsplit_from
        args: list[Any] = [
            lens.q_indptr_R1,
            lens.kv_indptr_R1,
            lens.lens_R,
            int(lens.q_indptr_R1[-1]),
            num_requests,
            shape.num_q_heads,
            shape.num_kv_heads,
            shape.page_size,
            captured and not unsplit,
            shape.head_dim,
            shape.head_dim,
            self._causal,
            _window_left(self._kind),
        ]
        if self._backend == "fa2":
            no_fixed_split, num_colocated_blocks = -1, 0
            args += [no_fixed_split, unsplit, num_colocated_blocks]
        return self._workspace.plan(self._module.plan, *args)

    def run(self, plan: Any, pages: Pages, x: Operands) -> None:
        self._module.run(self._workspace.partial, self._workspace.plans, plan, pages, x)


def prefill_kernel(shape: AttentionShape, kind: AttentionKind, workspace: Workspace) -> PagedKernel:
    """The best kernel for prompts; it cannot be captured. Until it is compiled, fa2's kernel serves."""
    backend = _prefill_backend(shape, workspace.partial.device)
    spec = _prefill_spec(shape, kind, backend)

    def make(name: str) -> PagedKernel:
        return PrefillKernel(shape, kind, workspace, causal=True, backend=name)

    def compile_and_make() -> PagedKernel:
        spec.build(verbose=False)
        return make(backend)

    if backend == _FIRST_BACKEND or spec.is_compiled:
        return make(backend)
    return UntilCompiled(make(_FIRST_BACKEND), compile_and_make)


class Fp8DecodeKernel:
    """One new token per request, 8-bit pages. Plans are empty: the kernel reads lengths and pages itself."""

    def __init__(self, kind: AttentionKind) -> None:
        self._kind = kind

    def plan(self, lens: HostLens, *, captured: bool) -> Any:
        return []

    def run(self, plan: Any, pages: Pages, x: Operands) -> None:
        from ebbtide.srt.layers.kernels.fp8.decode import attend_fp8

        assert x.sums_TN is None, "layers with sinks have no pages in FP8 here"
        attend_fp8(x.q_TNH, x.k_PSKH, x.v_PSKH, pages, x.out_TNH, self._kind)


class WidePages:
    """Buffers for pages that are widened from FP8, shared by all layers.

    Attributes:
        k_MSKH, v_MSKH: `num_pages` pages in the queries' dtype.
        order_M: int32, their page ids in order.
    """

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self.num_pages = _ROOM_TOKENS // shape.page_size
        size = (self.num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self.k_MSKH, self.v_MSKH = (torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(2))
        self.order_M = torch.arange(self.num_pages, dtype=torch.int32, device=device)


class Fp8PrefillKernel:
    """Any number of new tokens per request, with 8-bit pages. Cannot be captured."""

    def __init__(
        self, shape: AttentionShape, kind: AttentionKind, workspace: Workspace, room: WidePages
    ) -> None:
        self._wide: PagedKernel = prefill_kernel(wide(shape), kind, workspace)
        self._narrow: PagedKernel = PrefillKernel(shape, kind, workspace, causal=True, backend="fa2")
        self._room = room

    def plan(self, lens: HostLens, *, captured: bool) -> tuple[int, Any]:
        """Returns how many pages to widen, and a plan; 0: none, the plan is for attending to FP8."""
        num_pages = int(lens.kv_indptr_R1[-1])
        if num_pages > self._room.num_pages:
            return 0, self._narrow.plan(lens, captured=captured)
        return num_pages, self._wide.plan(lens, captured=captured)

    def run(self, plan: Any, pages: Pages, x: Operands) -> None:
        from ebbtide.srt.layers.kernels.fp8.decode import widen_pages

        num_pages, planned = plan
        if num_pages == 0:
            self._narrow.run(planned, pages, x)
            return
        room = self._room
        widen_pages(x.k_PSKH, x.v_PSKH, pages.kv_indices[:num_pages], room.k_MSKH, room.v_MSKH)
        read = replace(pages, kv_indices=room.order_M)
        self._wide.run(planned, read, x._replace(k_PSKH=room.k_MSKH, v_PSKH=room.v_MSKH))


def module_specs(shape: AttentionShape, device: torch.device, *, whole: bool = True) -> dict[str, Any]:
    """The kernels that FlashInfer compiles for this shape: use → its `JitSpec`.

    Args:
        whole: false: only those that a start waits for. Kernels for prompts that are not compiled yet are
            replaced by substitutes that compile in a third of the time.
    """
    from flashinfer.jit import gen_batch_decode_module, gen_batch_prefill_module

    specs = {}
    for kind in shape.kinds:
        key = _module_key(shape, kind)
        variant = f"{', windowed' if kind.window is not None else ''}{', capped' if kind.soft_cap else ''}"
        tiles = gen_batch_prefill_module("fa2", *key, False)
        if kernel_for(shape) is DecodeKernel.CUDA_CORES:
            specs[f"decode attention{variant}"] = gen_batch_decode_module(*key)
            if kind.window is None:
                specs[f"attention to shared prefixes{variant}"] = tiles
        else:
            specs[f"decode attention{variant}"] = tiles
        # Prompts attend to FP8 pages after these are widened.
        prefill = _prefill_spec(wide(shape), kind, _prefill_backend(wide(shape), device))
        if not (whole or prefill.is_compiled):
            prefill = _prefill_spec(wide(shape), kind, _FIRST_BACKEND)
        if all(spec.name != prefill.name for spec in specs.values()):
            specs[f"prefill attention{variant}"] = prefill
    return specs


def _prefill_spec(shape: AttentionShape, kind: AttentionKind, backend: str) -> Any:
    from flashinfer.jit import gen_batch_prefill_module

    return gen_batch_prefill_module(backend, *_module_key(shape, kind), False)


def wide(shape: AttentionShape) -> AttentionShape:
    """The same shape with keys and values in the queries' dtype."""
    return replace(shape, kv_dtype=shape.dtype)


def _prefill_backend(shape: AttentionShape, device: torch.device) -> str:
    from flashinfer.utils import PosEncodingMode, determine_attention_backend

    no_half_sums, no_custom_mask = False, False
    name: str = determine_attention_backend(
        device, PosEncodingMode.NONE.value, no_half_sums, no_custom_mask, shape.dtype, shape.kv_dtype
    )
    return name


def partial_bytes(shape: AttentionShape, device: torch.device) -> int:
    """Bytes for partial results, the most of any kernel: float32 values and one sum per row."""
    num_sms = num_multiprocessors(device)
    row_bytes = 4 * (shape.head_dim + 1)
    blocks = 2 * num_sms // shape.num_kv_heads + 1
    # The kernels for Hopper need no partial results, but fa2's may serve before them.
    prefill_rows = blocks * _LARGEST_TILE
    decode_rows = num_sms * (_THREADS_PER_SM // _DECODE_THREADS) // shape.num_kv_heads
    # The grid of a graph: FlashInfer's upper bound for tiles, or as many blocks as run at once.
    tile = next((rows for rows in (16, 64) if shape.group <= rows), _LARGEST_TILE)
    num_requests = unsplit_from(shape, device)
    tiles = -(-num_requests * shape.group // tile) + num_requests
    graph_rows = max(blocks, tiles) * tile
    return shape.num_q_heads * max(prefill_rows, decode_rows, graph_rows) * row_bytes + _SPARE_BYTES


_LARGEST_TILE = 128


def _module_key(shape: AttentionShape, kind: AttentionKind) -> tuple[Any, ...]:
    """The parameters of a compiled module, in FlashInfer's order."""
    from flashinfer.utils import PosEncodingMode

    dtype, head_dim = shape.dtype, shape.head_dim
    return (
        dtype,
        shape.kv_dtype,
        dtype,
        torch.int32,
        head_dim,
        head_dim,
        PosEncodingMode.NONE.value,
        kind.window is not None,
        kind.soft_cap is not None,
    )


def _window_left(kind: AttentionKind) -> int:
    """How many tokens before itself a token attends to, as FlashInfer counts."""
    return kind.window - 1 if kind.window is not None else _NO_WINDOW


def _soft_cap(kind: AttentionKind) -> float:
    return kind.soft_cap if kind.soft_cap is not None else _NO_SOFT_CAP


# How much of a compiler's output is quoted; it repeats commands of thousands of characters.
_MAX_LINES, _MAX_LINE_CHARS = 20, 300


def compile_kernels(specs: Mapping[str, Any], progress: Progress) -> None:
    """Compile the attention kernels that are not in the cache yet, all modules in parallel.

    Args:
        specs: use → FlashInfer's `JitSpec`.
        progress: called at the start and after each module, e.g. with ("compiling attention", 1, 2); not
            called if everything is in the cache.

    Raises:
        ConfigurationError: FlashInfer's compiler fails. The message ends with the end of its output.
    """
    add_scripts_to_path()
    missing = {use: spec for use, spec in specs.items() if not (spec.is_aot or spec.is_compiled)}
    if not missing:
        return
    progress("compiling attention", 0, len(missing))
    with ThreadPoolExecutor(len(missing)) as threads:
        builds = [threads.submit(_build, use, spec) for use, spec in missing.items()]
        for number, build in enumerate(as_completed(builds), start=1):
            build.result()
            progress("compiling attention", number, len(missing))


def _build(use: str, spec: Any) -> None:
    try:
        spec.build(verbose=False)
    except (RuntimeError, OSError) as error:
        lines = [line.rstrip()[:_MAX_LINE_CHARS] for line in str(error).splitlines() if line.strip()]
        output = "\n".join(lines[-_MAX_LINES:])
        raise ConfigurationError(
            f"FlashInfer could not compile the kernels of {use}; attention_backend=torch_native works "
            f"without them, attention_backend=triton too. The end of the compiler's output:\n{output}"
        ) from error
