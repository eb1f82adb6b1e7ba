"""Layers that keep a state of each request: what they are handed with a pass, and what they do, in torch.

That is for devices without kernels of ours, and what the kernels are tested against.

Shapes: T tokens, R requests, P prompts, or pieces of them, C channels, K key heads, V value heads, N heads,
H head_dim, G groups of heads, S numbers of a state for each of a head, L tokens of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbtide.srt.distributed.parallel_group import ParallelGroup

# Tokens that a layer with a state takes at once.
PIECE_TOKENS = 64
# Added to the sum of squares of a key or a query before it is made a unit vector.
KEY_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class StateStep:
    """The requests of a pass, as layers that keep a state see them.

    A request's state is that behind all tokens before its first new one; before position 0 it is zero,
    whatever its slot holds. Layers leave there the state behind the last new token.

    Attributes:
        layers: of each such layer its tensors, [slots, *shape]: see `StatePool`.
        slots_R: int64, the slot of each request.
        num_decoding: requests with one new token, which come first, as many tokens.
        indptr_P1: int32, first new token of each of the other requests, and the end.
        lens_P: how many those are.
        pieces_P3: int32, those tokens in pieces of at most `PIECE_TOKENS` of one request: first token, count,
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
        group: the ranks that divide the heads among them.
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
    """silu of each channel's convolution over a token and those before it.

    Args:
        conv_states: [slots, C, K − 1], the inputs of the tokens before, which are replaced by those of now.
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
    """The outputs of value heads, [T, V, H].

    Args:
        qkv_TC: queries of all key heads, then keys, then values.
        rates_TV, decays_TV: what β and g are made of.
        matrices: float32 [slots, V, key H, value H], which are brought up to date.
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
    """Outputs of L tokens of each request, and the matrices behind them.

    The tokens' updates u solve (1 + A) u = β (v − exp(g) S k), where A is how much of its update each token
    owes to those before it: all at once in place of one after the other.
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
    """The outputs of heads, [T, N, H].

    Args:
        xbc_TC: inputs x of all heads, then B of all groups, then C of all groups.
        steps_TN: what time steps are made of.
        matrices: float32 [slots, N, H, S], which are brought up to date.
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
    """Outputs of L tokens of each request, and the matrices behind them."""
    total = decay.cumsum(-1)
    since = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    out = (c * total.exp()[..., None]) @ matrix.transpose(-1, -2) + (c @ b.transpose(-1, -2) * since) @ x
    last = total[..., -1:]
    kept = x * (last - total).exp()[..., None]
    return out, matrix * last.exp()[..., None] + kept.transpose(-1, -2) @ b


def gated_group_norm(x_TC: Tensor, gates_TC: Tensor, weight_C: Tensor, num_groups: int, eps: float) -> Tensor:
    """rms_norm(x · silu(gates)), each group of channels by itself."""
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
    """Outputs of all tokens, [T, heads, H]: piece by piece of each request, whose matrices are replaced.

    Args:
        run_piece: the outputs of L tokens and the matrices behind them, by the matrices before them and the
            tokens' inputs [R, heads, L, ...].
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
    """Those that decode together, then the others one by one: their slots, and their tokens."""
    first = states.num_decoding
    if first:
        yield states.slots_R[:first], slice(0, first)
    for index, count in enumerate(states.lens_P, states.num_decoding):
        yield states.slots_R[index : index + 1], slice(first, first + count)
        first += count


def _by_request(x: Tensor, slots: Tensor) -> Tensor:
    """Tokens of requests that have as many each, by request."""
    return x.reshape(len(slots), -1, *x.shape[1:])


def _before(pool: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """What slots hold; zero where a request has no token before its first one here."""
    firsts = _by_request(positions, slots)[:, 0]
    held = pool[slots]
    return held.where((firsts > 0).view(-1, *[1] * (held.dim() - 1)), 0.0)
