"""8-bit weights, applied to a model from outside after `sharding`: which layers, and where scales go."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from ebbtide.srt.errors import ConfigurationError, first_few
from ebbtide.srt.layers.fp8 import (
    BLOCKS,
    CHANNELS,
    ChannelExperts,
    ChannelLinear,
    Fp8Experts,
    Fp8Linear,
    RaggedFp8Linear,
    ScaleLayout,
)
from ebbtide.srt.layers.linear import Linear
from ebbtide.srt.layers.moe import BiasedExperts, Experts
from ebbtide.srt.models.base import CausalLM
from ebbtide.srt.models.sharding import Placement

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Quantization:
    """Which weights are kept in 8 bits, and how.

    Attributes:
        exclude: patterns of checkpoint modules that keep their dtype, as `model.layers.0.*` or `*.o_proj`. A
            pattern without a wildcard also covers everything below that module. After `re:` comes a regular
            expression that matches the start of a name, as in compressed-tensors.
        layout: of the scales.

    Raises ConfigurationError: a regular expression is invalid.
    """

    exclude: tuple[str, ...] = ()
    layout: ScaleLayout = BLOCKS

    def __post_init__(self) -> None:
        for pattern in self.exclude:
            try:
                _matches("", pattern)
            except re.error as error:
                raise ConfigurationError(
                    "quantization_exclude, or a checkpoint's ignore: expected names of modules, or regular "
                    f"expressions behind 're:', got {pattern!r}: {error}"
                ) from error

    def excludes(self, module: str) -> bool:
        """Whether a checkpoint's module keeps its dtype."""
        return any(_matches(module, pattern) for pattern in self.exclude)


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return fnmatchcase(module, pattern) or f".{pattern}." in f".{module}."


def quantize(
    model: CausalLM, placements: Mapping[str, Placement], quantization: Quantization
) -> dict[str, Placement]:
    """Make a model keep weights in 8 bits: replace their meta parameters, and add parameters for scales.

    Output layers, embeddings, norms and routers keep their dtype.

    Returns:
        The placements of a checkpoint's scales, by name: a weight's name with the layout's suffix.

    Raises ConfigurationError: a weight cannot be cut into blocks; the error names it.
    """
    scales: dict[str, Placement] = {}
    layout = quantization.layout
    for module_name, names in _chosen(model, placements, quantization).items():
        module = model.get_submodule(module_name)
        scales |= {name + layout.suffix: _scales_of(name, placements[name], layout, module) for name in names}
        model.set_submodule(module_name, _in_eight_bits(module, layout))
    logger.info("weights quantized to 8 bits: %d of %d tensors", len(scales), len(placements))
    return scales


def _in_eight_bits(module: nn.Module, layout: ScaleLayout) -> nn.Module:
    if isinstance(module, Experts):
        return ChannelExperts(module) if layout is CHANNELS else Fp8Experts(module)
    assert isinstance(module, Linear), f"{type(module)} has no weight that is quantised"
    if layout is CHANNELS:
        return ChannelLinear(module)
    return RaggedFp8Linear(module) if len(module.weight) % layout.multiple_of else Fp8Linear(module)


def _chosen(
    model: nn.Module, placements: Mapping[str, Placement], quantization: Quantization
) -> dict[str, list[str]]:
    """Module → names of the checkpoint tensors in its weight, for all modules to quantise."""
    fused: dict[str, list[str]] = {}
    for name, placement in placements.items():
        module_name, _, attribute = placement.target.parameter.rpartition(".")
        module = model.get_submodule(module_name)
        is_weight = isinstance(module, Linear) and module.is_quantizable and attribute == "weight"
        if is_weight or isinstance(module, Experts):
            fused.setdefault(module_name, []).append(name)
    chosen = {}
    for module_name, names in fused.items():
        excluded = [name for name in names if quantization.excludes(name.removesuffix(".weight"))]
        if not excluded:
            if (why := _problem(model.get_submodule(module_name), quantization.layout)) is not None:
                raise ConfigurationError(
                    f"quantization={quantization.layout.quantization}: {why}: name them in "
                    f"quantization_exclude, as {names[0].rpartition('.')[0]}"
                )
            chosen[module_name] = names
        elif len(excluded) < len(names):
            others = sorted(set(names) - set(excluded))
            raise ConfigurationError(
                f"quantization_exclude: {first_few(sorted(excluded))} are one weight with "
                f"{first_few(others)} here: exclude all of them or none"
            )
    return chosen


def _problem(module: nn.Module, layout: ScaleLayout) -> str | None:
    """Why a module has to keep its dtype; None: it can be quantised."""
    if isinstance(module, BiasedExperts):
        return "experts with biases keep their dtype"
    if isinstance(module, Experts) and not module.config.is_gated and layout is BLOCKS:
        return f"experts without gates keep their dtype, or take {CHANNELS.quantization}"
    return None


def _scales_of(name: str, placement: Placement, layout: ScaleLayout, module: nn.Module) -> Placement:
    target, part = placement.target, placement.part
    is_ragged = (
        part is None
        and isinstance(module, Linear)
        and module.may_be_ragged
        and target.start + target.length == len(module.weight)
    )
    held = list(target.shape)
    sizes = {"it begins at": target.start, "its length is": target.length}
    if part is not None:
        held[part.dim] = part.length
        sizes |= {f"a rank's part begins at ({index})": start for index, (start, _) in enumerate(part.ranges)}
    sizes |= {"rows": held[0], "columns": held[1]}
    if is_ragged:
        del sizes["its length is"], sizes["rows"]
    wrong = {what: size for what, size in sizes.items() if size % layout.multiple_of}
    if wrong:
        sizes_listed = ", ".join(f"{what} {size}" for what, size in wrong.items())
        ways = "choose another tp_size, or name it in quantization_exclude"
        if layout is BLOCKS:
            ways += f"; quantization={CHANNELS.quantization} takes multiples of {CHANNELS.multiple_of}"
        raise ConfigurationError(
            f"quantization={layout.quantization}: {name} of this rank cannot be cut into blocks of "
            f"{layout.multiple_of} ({sizes_listed}): {ways}"
        )
    scales_target = replace(
        target,
        parameter=target.parameter + layout.suffix,
        start=target.start // layout.block_rows,
        length=-(-target.length // layout.block_rows),
        shape=layout.shape(*target.shape),
        split=None,
    )
    if part is None:
        return Placement(scales_target, None)
    step = (layout.block_rows, layout.block_columns)[part.dim]
    # Ranks that divide columns hold all scales, since each row's scale covers all its columns.
    if step is None:
        return Placement(scales_target, None)
    ranges = tuple((start // step, length // step) for start, length in part.ranges)
    return Placement(scales_target, replace(part, ranges=ranges))
