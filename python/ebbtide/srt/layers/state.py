"""Layers that keep a state of each request: their part of a pass, and their operations in torch.

The torch operations are for devices without kernels of ours, and the reference in tests of the kernels.

Shapes: T tokens, R requests, P prompts, or pieces of them, C channels, K key heads, V value heads, N heads,
H head_dim, G groups of heads, S state_size, L tokens of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbtide.srt.distributed.parallel_group import ParallelGroup

# How many tokens a layer with a state processes at once.
PIECE_TOKENS = 64
# Added to the sum of squares when a key or a query is scaled to a unit vector.
KEY_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class StateStep:
    """The requests of a pass, as layers with a state see them.

    A slot holds a request's state after all tokens before its first new one. If that is at position 0, the
    state is zero, whatever the slot holds. Layers write the state after the last new token back to the slot.

    Attributes:
        layers: for each such layer its tensors [slots, *shape], see `StatePool`.
        slots_R: int64, the slot of each request.
        num_decoding: the number of requests with one new token, which come first.
        indptr_P1: int32, first new token of each of the other requests, and the end.
        lens_P: the numbers of new tokens of these requests.
        pieces_P3: int32, their tokens in pieces of at most `PIECE_TOKENS` of one request: first token, count,
            number of the request.
    """

    layers: Sequence[tuple[Tensor, ...]]
    slots_R: Tensor
    num_decoding: int
    indptr_P1: Tensor | None = None
    lens_P: Sequence[int] = ()
    pieces_P3: Tensor | None = None


class StateLayer(nn.Module):
    """A layer that keeps a state of each request.

    Args:
        number: of the layer, among those with states.

    Attributes:
        group: the ranks that divide the heads.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.group = ParallelGroup()


def convolve(
    inputs_TC: Tensor,
    weight_C1K: Tensor,
    conv_states: Tensor,
    positions_T: Tensor,
    states: StateStep,
    bias_C: Tensor | None = None,
) -> Tensor:
    """Convolve each channel over a token and the ones before it, then apply silu.

    Args:
        conv_states: [slots, C, K − 1], the inputs of the previous tokens; replaced by the latest inputs.
    """
    size = weight_C1K.shape[-1]
    outputs = []
    for slots, tokens in _requests(states):
        new_RCT = _by_request(inputs_TC[tokens], slots).transpose(1, 2)
        all_RCT = torch.cat([_before(conv_states, slots, positions_T[tokens]), new_RCT], dim=2)
        conv_states[slots] = all_RCT[:, :, all_RCT.shape[2] - size + 1 :]
        out_RCT = F.conv1d(all_RCT, weight_C1K, bias_C, groups=len(weight_C1K))
        outputs.append(out_RCT.transpose(1, 2).flatten(0, 1))
    return F.silu(torch.cat(outputs))


def delta_rule(
    qkv_TC: Tensor,
    rates_TV: Tensor,
    decays_TV: Tensor,
    decay_log_V: Tensor,
    rate_bias_V: Tensor,
    matrices: Tensor,
    positions_T: Tensor,
    states: StateStep,
) -> Tensor:
    """The outputs [T, V, H] of value heads by the gated delta rule, see `layers.gated_delta_net`.

    Args:
        qkv_TC: queries of all key heads, then keys, then values.
        rates_TV, decays_TV: the projections from which β and g are computed.
        matrices: float32 [slots, V, key H, value H], updated in place.
    """
    num_v_heads, k_dim, v_dim = matrices.shape[1:]
    v_size = num_v_heads * v_dim
    k_size = (qkv_TC.shape[1] - v_size) // 2
    q, k, v = torch.split(qkv_TC.float(), [k_size, k_size, v_size], dim=1)
    per_key = num_v_heads * k_dim // k_size
    q_TVH, k_TVH = (_unit(x.reshape(len(x), -1, k_dim)).repeat_interleave(per_key, dim=1) for x in (q, k))
    q_TVH = q_TVH * k_dim**-0.5
    v_TVH = v.reshape(len(v), num_v_heads, v_dim)
    rate_TV = rates_TV.float().sigmoid()
    decay_TV = -decay_log_V.exp() * F.softplus(decays_TV.float() + rate_bias_V)
    inputs = (q_TVH, k_TVH, v_TVH, rate_TV, decay_TV)
    return _scan(_delta_piece, matrices, inputs, positions_T, states).to(qkv_TC.dtype)


def _delta_piece(
    matrix: Tensor, q: Tensor, k: Tensor, v: Tensor, rate: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs of L tokens of each request, and the matrices after them.

    The tokens' updates u solve (1 + A) u = β (v − exp(g) S k), where the strictly lower triangular A is how
    much each update depends on the earlier ones. So all tokens are solved at once, not one after the other.
    """
    total = decay.cumsum(-1)
    since = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    keys = k * rate[..., None]
    owed = (keys @ k.transpose(-1, -2) * since).tril(-1)
    wanted = v * rate[..., None] - (keys * total.exp()[..., None]) @ matrix
    updates = torch.linalg.solve_triangular(owed, wanted, upper=False, unitriangular=True)
    out = (q * total.exp()[..., None]) @ matrix + (q @ k.transpose(-1, -2) * since) @ updates
    last = total[..., -1:]
    kept = k * (last - total).exp()[..., None]
    return out, matrix * last.exp()[..., None] + kept.transpose(-1, -2) @ updates


def gated_norm(heads_TVH: Tensor, gates_TVH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """rms_norm(heads) · silu(gates)."""
    normed = F.rms_norm(heads_TVH.float(), weight_H.shape, None, eps).to(heads_TVH.dtype) * weight_H
    return (normed * F.silu(gates_TVH.float())).to(heads_TVH.dtype)


def selective_scan(
    xbc_TC: Tensor,
    steps_TN: Tensor,
    decay_log_N: Tensor,
    step_bias_N: Tensor,
    skip_N: Tensor,
    matrices: Tensor,
    positions_T: Tensor,
    states: StateStep,
) -> Tensor:
    """The outputs [T, N, H] of heads of Mamba-2, see `models.nemotron_h`.

    Args:
        xbc_TC: inputs x of all heads, then B of all groups, then C of all groups.
        steps_TN: the projections from which time steps are computed.
        matrices: float32 [slots, N, H, S], updated in place.
    """
    num_heads, head_dim, state_size = matrices.shape[1:]
    inner = num_heads * head_dim
    of_groups = (xbc_TC.shape[1] - inner) // 2
    x, b, c = torch.split(xbc_TC.float(), [inner, of_groups, of_groups], dim=1)
    x_TNH = x.reshape(len(x), num_heads, head_dim)
    b_TNS, c_TNS = (
        each.reshape(len(x), -1, state_size).repeat_interleave(num_heads * state_size // of_groups, dim=1)
        for each in (b, c)
    )
    step_TN = F.softplus(steps_TN.float() + step_bias_N)
    decay_TN = -decay_log_N.exp() * step_TN
    inputs = (x_TNH * step_TN[:, :, None], b_TNS, c_TNS, decay_TN)
    out_TNH = _scan(_mamba_piece, matrices, inputs, positions_T, states)
    return (out_TNH + x_TNH * skip_N[:, None]).to(xbc_TC.dtype)


def _mamba_piece(matrix: Tensor, x: Tensor, b: Tensor, c: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of L tokens of each request, and the matrices after them."""
    total = decay.cumsum(-1)
    since = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    out = (c * total.exp()[..., None]) @ matrix.transpose(-1, -2) + (c @ b.transpose(-1, -2) * since) @ x
    last = total[..., -1:]
    kept = x * (last - total).exp()[..., None]
    return out, matrix * last.exp()[..., None] + kept.transpose(-1, -2) @ b


def gated_group_norm(x_TC: Tensor, gates_TC: Tensor, weight_C: Tensor, num_groups: int, eps: float) -> Tensor:
    """rms_norm(x · silu(gates)), with a norm for each group of channels."""
    gated_TC = x_TC.float() * F.silu(gates_TC.float())
    groups_TGC = gated_TC.view(len(x_TC), num_groups, -1)
    normed_TC = F.rms_norm(groups_TGC, groups_TGC.shape[2:], None, eps).flatten(1)
    return normed_TC.to(x_TC.dtype) * weight_C


def _scan(
    run_piece: Callable[..., tuple[Tensor, Tensor]],
    matrices: Tensor,
    inputs: Sequence[Tensor],
    positions_T: Tensor,
    states: StateStep,
) -> Tensor:
    """Compute the outputs [T, heads, H] of all tokens, piece by piece of each request; update the matrices.

    Args:
        run_piece: takes the matrices before L tokens and the tokens' inputs [R, heads, L, ...]; returns the
            outputs and the matrices after them.
        inputs: [T, heads, ...].
    """
    outputs = []
    for slots, tokens in _requests(states):
        matrix = _before(matrices, slots, positions_T[tokens])
        of_requests = [_by_request(x[tokens], slots).transpose(1, 2) for x in inputs]
        pieces = []
        for piece in zip(*(torch.split(x, PIECE_TOKENS, dim=2) for x in of_requests), strict=True):
            out, matrix = run_piece(matrix, *piece)
            pieces.append(out)
        matrices[slots] = matrix
        outputs.append(torch.cat(pieces, dim=2).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + KEY_EPS)


def _requests(states: StateStep) -> Iterator[tuple[Tensor, slice]]:
    """Yield slots and tokens: first of all decoding requests together, then of each other request."""
    first = states.num_decoding
    if first:
        yield states.slots_R[:first], slice(0, first)
    for index, count in enumerate(states.lens_P, states.num_decoding):
        yield states.slots_R[index : index + 1], slice(first, first + count)
        first += count


def _by_request(x: Tensor, slots: Tensor) -> Tensor:
    """Reshape tokens of requests with equally many tokens to [requests, tokens, ...]."""
    return x.reshape(len(slots), -1, *x.shape[1:])


def _before(pool: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """The slots' contents, or zero for requests whose first token here is at position 0."""
    firsts = _by_request(positions, slots)[:, 0]
    held = pool[slots]
    return held.where((firsts > 0).view(-1, *[1] * (held.dim() - 1)), 0.0)
