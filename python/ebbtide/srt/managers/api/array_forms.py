"""Routed experts, and the most likely tokens as arrays, in the forms that clients read and give.

Shapes: T tokens, L hidden layers, K experts of a token, or most likely tokens listed for it.
Source: wire_vllm section 6.1; SGLang's `/generate`.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.io_struct import RoutedExperts

# "int32": base64 of the numbers alone. "npy": base64 of a .npy file. "packed": an object with the shape, the
# dtype, the first token (`start`) and, before them, `data`: base64 of the numbers as they are kept.
# "canonical": such an object without `start`, in the smallest of uint8, int16 and int32 that holds them.
RoutedForm: TypeAlias = Literal["int32", "npy", "packed", "canonical"]

_NPY_MAGIC: Final = b"\x93NUMPY"
_KINDS: Final = ("uint8", "int8", "uint16", "int16", "int32", "int64")


@dataclass(frozen=True)
class ExpertSlots:
    """The experts of a model.

    Attributes:
        num_layers: the number of all hidden layers.
        num_experts: experts of each sparse layer.
        per_token: experts that a token goes through in each sparse layer.
        sparse_layers: the layers that have experts.
    """

    num_layers: int
    num_experts: int
    per_token: int
    sparse_layers: Sequence[int]


def encoded(routed: RoutedExperts, form: RoutedForm, start: int) -> Any:
    """Routed experts in the form of an answer. Their rows begin with token `start`."""
    rows = routed.rows
    match form:
        case "int32":
            return _base64(rows.astype(np.int32).data)
        case "npy":
            file = io.BytesIO()
            np.save(file, rows, allow_pickle=False)
            return _base64(file.getbuffer())
        # `data` comes first, because clients find it by its position.
        case "packed":
            form_fields = {"shape": list(routed.shape), "start": start, "dtype": routed.dtype}
            return {"data": _base64(rows.data), **form_fields}
        case "canonical":
            largest = int(rows.max(initial=0))
            kind = "uint8" if largest < 256 else "int16" if largest < 1 << 15 else "int32"
            return {"data": _base64(rows.astype(kind).data), "shape": list(routed.shape), "dtype": kind}


def decoded(given: Any, slots: ExpertSlots, num_prompt_tokens: int) -> RoutedExperts:
    """The experts that a request sets for the first tokens of its prompt, in any form that answers have.

    Raises:
        RequestRejected: they are in no such form, or the model has no such experts.
    """
    shape = f"[tokens, {slots.num_layers} layers, {slots.per_token} experts]"
    try:
        rows = _read(given, slots)
    except (ValueError, TypeError, KeyError) as error:
        raise _rejected(
            f"expected base64 of int32 numbers or of a .npy file, or an object of data, shape and dtype: "
            f"{shape}; got what is none of these: {error}"
        ) from None
    if rows.ndim != 3 or rows.shape[1:] != (slots.num_layers, slots.per_token):
        raise _rejected(f"expected {shape}, got {list(rows.shape)}")
    if len(rows) > num_prompt_tokens:
        raise _rejected(f"expected at most the {num_prompt_tokens} tokens of the prompt, got {len(rows)}")
    chosen = rows[:, list(slots.sparse_layers)]
    bad = chosen[(chosen < 0) | (chosen >= slots.num_experts)]
    if len(bad):
        raise _rejected(f"expected experts from 0 to {slots.num_experts - 1}, got {bad[0]}")
    ordered = np.sort(chosen, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise _rejected("expected different experts of a token in a layer, got one twice")
    kind = "uint8" if slots.num_experts <= 256 else "uint16"
    # Rows of layers without experts may hold anything: they are zeroed.
    kept = np.zeros(rows.shape, dtype=kind)
    kept[:, list(slots.sparse_layers)] = chosen
    return RoutedExperts(kept.tobytes(), (len(kept), slots.num_layers, slots.per_token), kind)


def namespace_of(routed: RoutedExperts | None) -> tuple[str, ...]:
    """The part of a cache namespace that separates KV computed with these experts from other KV."""
    if routed is None:
        return ()
    return (f"routed_experts={hashlib.blake2b(routed.data, digest_size=16).hexdigest()}",)


def _read(given: Any, slots: ExpertSlots) -> NDArray[Any]:
    if isinstance(given, dict):
        if given.get("start"):
            raise ValueError("its rows begin with the first token: start is not 0")
        if given["dtype"] not in _KINDS:
            raise ValueError(f"its dtype is none of {', '.join(_KINDS)}")
        data = base64.b64decode(given["data"], validate=True)
        return np.frombuffer(data, given["dtype"]).reshape(given["shape"])
    data = base64.b64decode(given, validate=True)
    if not data.startswith(_NPY_MAGIC):
        return np.frombuffer(data, dtype=np.int32).reshape(-1, slots.num_layers, slots.per_token)
    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) == (1, 0):
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(file)
    if is_fortran or dtype.name not in _KINDS:
        raise ValueError(f"the file is not in C order, or its dtype is none of {', '.join(_KINDS)}")
    return np.frombuffer(data, dtype=dtype, offset=file.tell()).reshape(shape)


def _rejected(problem: str) -> RequestRejected:
    return RequestRejected(f"replay_routed_experts: {problem}")


def _base64(data: memoryview) -> str:
    return base64.b64encode(data).decode("ascii")


# "numbers": lists of numbers; "base64": base64 of their bytes.
FlatForm: TypeAlias = Literal["numbers", "base64"]


def flat_form(is_flat: bool | None, is_base64: bool | None) -> FlatForm | None:
    """The flat form that a request asks for; None: the usual lists of triples."""
    return None if not is_flat else "base64" if is_base64 else "numbers"


def flat_top_logprobs(positions_TK: Sequence[Sequence[Any]], form: FlatForm) -> dict[str, Any]:
    """The fields that replace `output_top_logprobs` in the answer, with one row for each token."""
    shape = [len(positions_TK), len(positions_TK[0]) if positions_TK else 0]
    fields: dict[str, Any] = {"output_top_logprobs_shape": shape, "output_top_logprobs_null_prefix": 0}
    for name, place, dtype in (("val", 0, np.float32), ("idx", 1, np.int32)):
        values = np.array([entry[place] for position in positions_TK for entry in position], dtype=dtype)
        key = f"output_top_logprobs_{name}_flat"
        if form == "base64":
            fields[f"{key}_b64"] = base64.b64encode(values.data).decode("ascii")
            fields[f"{key}_b64_dtype"] = values.dtype.name
        else:
            fields[key] = values.tolist()
    return fields
