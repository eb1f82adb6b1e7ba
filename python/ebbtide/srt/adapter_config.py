"""What PEFT's adapter_config.json says of a LoRA adapter."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ebbtide.srt.errors import RequestRejected

# PEFT's.
DEFAULT_ALPHA = 8
MAX_ALPHA = 1e6
MAX_TEXT, MAX_PATTERNS = 200, 1024
_NAME = re.compile(r"[\w.]+")
# So few things that can be long take a bounded time; PEFT itself writes patterns such as .*\.gate_up_proj.
_LITERAL = r"(?:\w|\.(?!\*)|\\\.)*"
_PATTERN = re.compile(rf"\^?{_LITERAL}(?:(?:\.\*|\\d\+|\([\w.|]+\)){_LITERAL}){{0,4}}\$?")
# Fields of adapter_config.json that change what an adapter computes, and the values that change nothing.
PLAIN_VALUES: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA", None),
    "bias": ("none", None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "use_qalora": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_bdlora": (None, False),
    "arrow_config": (None, {}),
    "kasa_config": (None, {}),
    "velora_config": (None, {}),
    "monteclora_config": (None, {}),
}


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter_config.json of PEFT says.

    Attributes:
        rank: r, where no pattern says otherwise.
        alpha, is_rank_stabilized: lora_alpha, and whether it is divided by √r instead of r.
        ranks, alphas: rank_pattern and alpha_pattern: regular expressions for the end of a module's name.
    """

    rank: int
    alpha: float
    is_rank_stabilized: bool
    ranks: tuple[tuple[str, int], ...] = ()
    alphas: tuple[tuple[str, float], ...] = ()

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter, by its checkpoint name."""
        return next((rank for pattern, rank in self.ranks if _ends_in(module, pattern)), self.rank)

    def scaling_of(self, module: str) -> float:
        alpha = next((alpha for pattern, alpha in self.alphas if _ends_in(module, pattern)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def adapter_config(fields: Mapping[str, object]) -> AdapterConfig:
    """Read the fields of an adapter_config.json. Which modules it targets, its tensors show.

    Raises RequestRejected, naming the field and what was expected.
    """
    for name, plain in PLAIN_VALUES.items():
        if (value := fields.get(name)) not in plain:
            raise _refused(name, f"{plain[0]!r}: other adapters are not supported", value)
    rank = _whole(fields, "r")
    alpha = _number(fields.get("lora_alpha", DEFAULT_ALPHA), "lora_alpha")
    is_rank_stabilized = fields.get("use_rslora") or False
    if not isinstance(is_rank_stabilized, bool):
        raise _refused("use_rslora", "true or false", is_rank_stabilized)
    ranks = tuple(
        (str(pattern), _whole({"rank_pattern": value}, "rank_pattern"))
        for pattern, value in _patterns(fields, "rank_pattern").items()
    )
    alphas = tuple(
        (str(pattern), _number(value, "alpha_pattern"))
        for pattern, value in _patterns(fields, "alpha_pattern").items()
    )
    return AdapterConfig(rank, alpha, is_rank_stabilized, ranks, alphas)


def _refused(name: str, expected: str, value: object) -> RequestRejected:
    return RequestRejected(f"adapter config: {name}: expected {expected}, got {str(value)[:MAX_TEXT]!r}")


def _whole(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 16:
        raise _refused(name, "a rank of 1 or more", value)
    return value


def _number(value: object, name: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= MAX_ALPHA:  # type: ignore[arg-type]
        raise _refused(name, f"a number up to {MAX_ALPHA:g}", value)
    return float(value)  # type: ignore[arg-type]


def _patterns(fields: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = fields.get(name) or {}
    if not isinstance(value, Mapping) or len(value) > MAX_PATTERNS:
        raise _refused(name, f"an object of at most {MAX_PATTERNS} names or patterns", value)
    for pattern in value:
        if len(str(pattern)) > MAX_TEXT or not _PATTERN.fullmatch(str(pattern)):
            expected = r"names of modules, with '.*', '\d+' and '(a|b)' at most four times"
            raise _refused(name, expected, pattern)
    return value


def _ends_in(module: str, pattern: str) -> bool:
    """As PEFT has it: a regular expression for whole parts of a name at its end."""
    if _NAME.fullmatch(pattern):
        return f".{module}".endswith(f".{pattern}")
    return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
