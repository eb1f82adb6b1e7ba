"""How a layer of experts is cut for a number of tokens: tiles that were measured, kept as data.

`moe_tiles.json`: card → sizes of the layer → up to how many tokens → a plan; bench/gpu_moe.py finds them.
Cards of one compute capability have room for the same tiles; what is not in it takes the plans that are here.

Shapes: E experts, D hidden, I an expert's inner size.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ebbtide.srt.layers.kernels.launch import card, card_like

TILES_FILE = Path(__file__).with_name("moe_tiles.json")


@dataclass(frozen=True)
class Tile:
    """How one product is cut.

    Attributes:
        rows: weight rows of a program (for gate and up: of each).
        step: columns taken at once along the summed dimension.
    """

    rows: int
    step: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Plan:
    """How a batch is cut.

    Attributes:
        block_tokens: tokens of one expert that a program multiplies, a power of two ≥ 16; 1: each token
            reads the weights of its experts by itself.
    """

    block_tokens: int
    gate_up: Tile
    down: Tile

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Plan:
        return cls(fields["block_tokens"], Tile(**fields["gate_up"]), Tile(**fields["down"]))

    def fields(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Layer:
    """What plans depend on beside the number of tokens."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int

    @property
    def key(self) -> str:
        return f"experts={self.num_experts},top={self.top_k},hidden={self.hidden},inner={self.inner}"


# Up to so many tokens each reads the weights of its experts by itself: few have an expert in common.
FEW_TOKENS = 4
ONE_BY_ONE = Plan(1, Tile(2, 2048, 4, 1), Tile(4, 1024, 8, 1))
# Plans by the number of tokens in a block. If these are few, all the time goes into reading weights, so there
# are many small programs.
DEFAULTS = {
    16: Plan(16, Tile(64, 128, 4, 4), Tile(128, 64, 8, 5)),
    32: Plan(32, Tile(32, 128, 4, 4), Tile(128, 64, 8, 5)),
    64: Plan(64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    128: Plan(128, Tile(128, 64, 8, 3), Tile(128, 64, 8, 4)),
}
# What was measured for so many tokens serves from a fourth of them on.
_REACH = 4
# float32 has no tensor cores and takes twice the room: it has to work, not to be quick.
WIDE = Plan(32, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))


def choose_plan(num_tokens: int, layer: Layer, dtype: torch.dtype, device: torch.device) -> Plan:
    """The plan for a batch: what was measured where there is any."""
    if dtype == torch.float32:
        return ONE_BY_ONE if num_tokens <= FEW_TOKENS else WIDE
    for most_tokens, plan in measured(layer.key, card(device)) or measured(layer.key, card_like(device)):
        if most_tokens // _REACH < num_tokens <= most_tokens:
            return plan
    if num_tokens <= FEW_TOKENS:
        return ONE_BY_ONE
    # Room for half as much again as an expert's share.
    room = 3 * num_tokens * layer.top_k // (2 * layer.num_experts)
    return DEFAULTS[next((size for size in DEFAULTS if room <= size), 128)]


@cache
def measured(layer: str, card: str) -> tuple[tuple[int, Plan], ...]:
    """Upper bounds of tokens and plans, ascending; nothing for what was not measured."""
    rows = json.loads(TILES_FILE.read_text()).get(card, {}).get(layer, {})
    return tuple(sorted((int(tokens), Plan.of(fields)) for tokens, fields in rows.items()))
