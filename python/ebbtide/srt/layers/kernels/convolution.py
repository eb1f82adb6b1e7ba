"""The causal convolution of layers with a state. `layers.state` defines what it computes.

Shapes: T tokens, R requests, C channels, P pieces.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.state import PIECE_TOKENS, StateStep

CHANNELS, TOKENS = 128, 16
# Not specialised, so that no other number of decoding requests compiles a kernel once more.
OF_PROMPTS = triton.jit(
    do_not_specialize=["num_decoding"], do_not_specialize_on_alignment=["indptr_ptr", "num_decoding"]
)


def convolve(
    inputs_TC: Tensor,
    weight_C1K: Tensor,
    conv_states: Tensor,
    positions_T: Tensor,
    states: StateStep,
    bias_C: Tensor | None = None,
) -> Tensor:
    num_tokens, channels = inputs_TC.shape
    size = weight_C1K.shape[-1]
    out_TC = torch.empty((num_tokens, channels), dtype=inputs_TC.dtype, device=inputs_TC.device)
    blocks = triton.cdiv(channels, CHANNELS)
    shared = (inputs_TC, inputs_TC.stride(0), weight_C1K, conv_states, conv_states.stride(0), states.slots_R)
    if states.num_decoding:
        _convolve_one[(states.num_decoding, blocks)](
            *shared, bias_C, positions_T, out_TC, channels, SIZE=size, BLOCK=CHANNELS
        )
    if states.pieces_P3 is not None:
        assert states.indptr_P1 is not None
        prompts = (states.indptr_P1, states.num_decoding, positions_T)
        grid = (len(states.pieces_P3), triton.cdiv(PIECE_TOKENS, TOKENS), blocks)
        _convolve_piece[grid](
            *shared,
            *prompts,
            states.pieces_P3,
            bias_C,
            out_TC,
            channels,
            SIZE=size,
            TOKENS=TOKENS,
            BLOCK=CHANNELS,
        )
        # Only now: the pieces above still read the states before this pass.
        _keep_last[(len(states.lens_P), blocks)](*shared, *prompts, channels, SIZE=size, BLOCK=CHANNELS)
    return out_TC


@triton.jit
def _convolve_one(  # type: ignore[no-untyped-def]
    x_ptr,
    x_stride,
    weight_ptr,
    state_ptr,
    state_stride,
    slots_ptr,
    bias_ptr,
    positions_ptr,
    out_ptr,
    channels,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program convolves some channels of one decoding request's token, and shifts its state by one."""
    request = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    held_ptr = state_ptr + tl.load(slots_ptr + request) * state_stride + channel * (SIZE - 1)
    has_before = channel < tl.where(tl.load(positions_ptr + request) > 0, channels, 0)
    new = tl.load(x_ptr + request * x_stride + channel, mask=inside, other=0.0)
    weight_ptr += channel * SIZE
    total = tl.load(weight_ptr + SIZE - 1, mask=inside, other=0.0).to(tl.float32) * new.to(tl.float32)
    for index in tl.static_range(SIZE - 1):
        before = tl.load(held_ptr + index, mask=has_before, other=0.0)
        weight = tl.load(weight_ptr + index, mask=inside, other=0.0).to(tl.float32)
        total += weight * before.to(tl.float32)
        if index > 0:
            tl.store(held_ptr + index - 1, before, mask=inside)
    tl.store(held_ptr + SIZE - 2, new, mask=inside)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + request * channels + channel, total * tl.sigmoid(total), mask=inside)


@OF_PROMPTS
def _convolve_piece(  # type: ignore[no-untyped-def]
    x_ptr,
    x_stride,
    weight_ptr,
    state_ptr,
    state_stride,
    slots_ptr,
    indptr_ptr,
    num_decoding,
    positions_ptr,
    pieces_ptr,
    bias_ptr,
    out_ptr,
    channels,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program convolves some tokens of a piece. Inputs before the first new token are in the state."""
    piece_ptr = pieces_ptr + tl.program_id(0) * 3
    start = tl.load(piece_ptr) + tl.program_id(1) * TOKENS
    end = tl.load(piece_ptr) + tl.load(piece_ptr + 1)
    request = tl.load(piece_ptr + 2)
    first = tl.load(indptr_ptr + request - num_decoding)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    token = start + tl.arange(0, TOKENS)
    held_ptr = state_ptr + tl.load(slots_ptr + request) * state_stride + channel[None, :] * (SIZE - 1)
    # A request that starts at position 0 has no earlier inputs.
    held_end = tl.where(tl.load(positions_ptr + first) > 0, end, 0)
    total = tl.zeros((TOKENS, BLOCK), dtype=tl.float32)
    for index in tl.static_range(SIZE):
        source = token - (SIZE - 1) + index
        is_new = (source >= first) & (token < end)
        new = tl.load(
            x_ptr + source[:, None].to(tl.int64) * x_stride + channel[None, :],
            mask=is_new[:, None] & inside[None, :],
            other=0.0,
        )
        is_held = (source < first) & (token < held_end)
        held = tl.load(
            held_ptr + (source - first)[:, None] + SIZE - 1,
            mask=is_held[:, None] & inside[None, :],
            other=0.0,
        )
        weight = tl.load(weight_ptr + channel * SIZE + index, mask=inside, other=0.0).to(tl.float32)
        total += weight[None, :] * (new.to(tl.float32) + held.to(tl.float32))
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + token[:, None].to(tl.int64) * channels + channel[None, :],
        total * tl.sigmoid(total),
        mask=(token < end)[:, None] & inside[None, :],
    )


@OF_PROMPTS
def _keep_last(  # type: ignore[no-untyped-def]
    x_ptr,
    x_stride,
    weight_ptr,
    state_ptr,
    state_stride,
    slots_ptr,
    indptr_ptr,
    num_decoding,
    positions_ptr,
    channels,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program writes a prompt's last inputs to its state; if they are few, some old ones are kept."""
    prompt = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    first = tl.load(indptr_ptr + prompt).to(tl.int64)
    count = tl.load(indptr_ptr + prompt + 1) - first
    slot = tl.load(slots_ptr + num_decoding + prompt)
    held_ptr = state_ptr + slot * state_stride + channel * (SIZE - 1)
    num_held = tl.where(tl.load(positions_ptr + first) > 0, channels, 0)
    for index in tl.static_range(SIZE - 1):
        source = count - (SIZE - 1) + index
        is_new, is_held = (
            channel < tl.where(source >= 0, channels, 0),
            channel < tl.where(source < 0, num_held, 0),
        )
        new = tl.load(x_ptr + (first + source) * x_stride + channel, mask=is_new, other=0.0)
        held = tl.load(held_ptr + SIZE - 1 + source, mask=is_held, other=0.0)
        tl.store(held_ptr + index, new + held, mask=inside)
