"""LoRA adapters in memory: slots of one arena, and where PEFT's tensors go in a slot.

Shapes: S slots, E experts, P fused tensors, R ranks, D inputs, O outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.config import AdapterLimits
from ebbtide.srt.errors import ConfigurationError, RequestRejected, first_few
from ebbtide.srt.hf_folder import MAX_TEXT, AdapterConfig
from ebbtide.srt.layers.linear import Linear
from ebbtide.srt.layers.lora import ProductAdapters
from ebbtide.srt.layers.moe import Experts
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.arena import round_up
from ebbtide.srt.memory_saver.saver import ArenaSource
from ebbtide.srt.model_executor.host_copies import upload
from ebbtide.srt.model_executor.weight_copies import CONVERTIBLE, NonFinite, Run, RunTable, WeightCopies
from ebbtide.srt.models.base import INPUTS, OUTPUTS, CausalLM
from ebbtide.srt.models.sharding import Part, Placement
from ebbtide.srt.slices import finish

if TYPE_CHECKING:
    from ebbtide.srt.device import Device

# A and B begin at multiples of this many elements.
ALIGNMENT = 256
# Ranks are padded to a multiple of this, for tensor cores.
RANK_MULTIPLE = 16


@dataclass(frozen=True)
class _AdapterLayout:
    """Where the adapters of one product are in a slot.

    Attributes:
        names: the checkpoint modules that are fused in the product, expert by expert, with their placements.
        ends: where the outputs of each fused tensor of an expert end.
        rank: R.
        first_scaling: index of the first of its P scalings in a slot.
        a_offset, b_offset: where A and B begin in a slot, in elements.
    """

    names: Mapping[str, Placement]
    num_experts: int
    num_inputs: int
    ends: tuple[int, ...]
    rank: int
    first_scaling: int
    a_offset: int

    @property
    def a_shape(self) -> tuple[int, int, int]:
        return self.num_experts, len(self.ends) * self.rank, self.num_inputs

    @property
    def b_shape(self) -> tuple[int, int, int]:
        return self.num_experts, self.ends[-1], self.rank

    @property
    def b_offset(self) -> int:
        return self.a_offset + round_up(math.prod(self.a_shape), ALIGNMENT)

    @property
    def end(self) -> int:
        return self.b_offset + round_up(math.prod(self.b_shape), ALIGNMENT)


@dataclass(frozen=True)
class _Module:
    """Where the adapter of one module goes.

    Attributes:
        expert: None: it is of all experts at once: their ranks follow each other in the rows of A, and in the
            columns of B.
        part: which of the fused tensors it is of.
        first_rank: the first of its rows of A, and of its columns of B.
        parts: ranges of rows of the sent B, and where they begin in the product's outputs.
        columns: the range of columns of the sent A.
        num_outputs, num_inputs: of the sent B and A.
        most_ranks: the largest rank that fits.
    """

    layout: _AdapterLayout
    expert: int | None
    part: int
    first_rank: int
    parts: tuple[tuple[slice, int], ...]
    columns: slice
    num_outputs: int
    num_inputs: int
    most_ranks: int


@dataclass(frozen=True, eq=False)
class AdapterFit:
    """Where the tensors of an adapter go in a slot.

    Attributes:
        places: name → (module, "A" or "B"), in the order in which the tensors are sent.
        scalings: all scalings of the slot.
        runs: where tensors go that are copied byte for byte, relative to the slot's first byte; None on a
            CPU, where it is not used.
    """

    places: Mapping[str, tuple[_Module, str]]
    scalings: tuple[float, ...]
    runs: RunTable | None


@dataclass(frozen=True, eq=False)
class SlotCopy:
    """The contents of a slot in host memory."""

    values: Tensor
    scalings: Tensor


class AdapterSlots:
    """A rank's adapters, slot by slot in one arena of the tag `weights`, and the products' views of them.

    Args:
        model: the model whose products get their `adapters`.
        placements: where a checkpoint's tensors are in this rank's parameters.
        saver: makes the arena.
        dtype: of A and B.

    Attributes:
        num_slots, max_rank: as configured.
        arena: resident after construction, with all slots zeroed.
        generation: a number that rises with every change of the contents.
        last_read_R: the slots of the last launched forward pass; None: it had no adapters.

    Raises ConfigurationError for targets that the model does not have.
    """

    def __init__(
        self,
        model: CausalLM,
        placements: Mapping[str, Placement],
        limits: AdapterLimits,
        saver: ArenaSource,
        dtype: torch.dtype,
        device: Device,
    ) -> None:
        self.num_slots, self.max_rank = limits.num_slots, limits.max_rank
        self.generation = 0
        self.last_read_R: NDArray[np.int32] | None = None
        self._device = device
        layouts = _layouts(model, placements, limits)
        self._modules = dict(_modules(model, layouts))
        self._stored_as = model.stored_as
        last = list(layouts.values())[-1]
        num_values, num_scalings = last.end, last.first_scaling + len(last.ends)
        values_bytes = self.num_slots * num_values * dtype.itemsize
        self.arena = saver.arena(MemoryTag.WEIGHTS, values_bytes + self.num_slots * num_scalings * 4)
        self.arena.resume()
        self._values_SN = self.arena.view(0, (self.num_slots, num_values), dtype)
        self._scalings_SQ = self.arena.view(values_bytes, (self.num_slots, num_scalings), torch.float32)
        self._values_SN.zero_()
        self._scalings_SQ.zero_()
        # By the product's first scaling, which is unique.
        self._adapters = {layout.first_scaling: self._views(layout) for layout in layouts.values()}
        for parameter, layout in layouts.items():
            _give(model, parameter, self._adapters[layout.first_scaling])

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot on this rank."""
        return self._values_SN[0].nbytes + self._scalings_SQ[0].nbytes

    def is_read(self, slot: int) -> bool:
        """Whether the last launched forward pass reads the slot."""
        return self.last_read_R is not None and slot in self.last_read_R

    def address(self, slot: int) -> int:
        """The address of a slot's first byte."""
        return self._values_SN[slot].data_ptr()

    def fit(
        self,
        config: AdapterConfig,
        names_shapes_dtypes: Iterable[tuple[str, Sequence[int], torch.dtype]],
    ) -> AdapterFit:
        """Check the tensors of an adapter, by PEFT's names, against the slots. Reads and changes no data.

        Raises RequestRejected: it names the tensor or field, and what was expected.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for name, shape, dtype in names_shapes_dtypes:
            if dtype not in CONVERTIBLE:
                raise _tensor_refused(name, f"a floating type of 16 bits or more, got {dtype}")
            if name in shapes:
                raise _tensor_refused(name, "it once, got it twice")
            shapes[name], dtypes[name] = tuple(shape), dtype
        scalings = [0.0] * self._scalings_SQ.shape[1]
        modules: dict[str, tuple[_Module, str]] = {}
        for module_name, names in _pairs(shapes).items():
            module, scaling = self._checked(config, module_name, names, shapes)
            scalings[module.layout.first_scaling + module.part] = scaling
            modules |= {name: (module, half) for half, name in names.items()}
        places = {name: modules[name] for name in shapes}
        runs = None
        if self._values_SN.is_cuda:
            runs = RunTable([self._run(*places[name], shapes[name], dtypes[name]) for name in shapes])
        return AdapterFit(places, tuple(scalings), runs)

    def write(
        self,
        slot: int,
        fit: AdapterFit,
        tensors: Iterable[tuple[str, Tensor]],
        copies: WeightCopies | None = None,
        looked_at: NonFinite | None = None,
    ) -> None:
        """Write an adapter into a slot that no request runs on, and that no pass in flight reads.

        On a GPU, copies are only launched, beside forward passes: tensors must live until
        `Device.copies_done`, and passes that use the slot must come after `Device.follow_copies`.

        Args:
            copies: prepared copies of some of the tensors; None: there are none.
            tensors: the other tensors.
            looked_at: searches the written tensors for NaN and Inf; None: nobody asks.
        """
        self.generation += 1
        with self._device.copying(beside=False):
            self._values_SN[slot].zero_()
            if copies is not None:
                finish(copies.launch())
            named = [
                (name, pair) for name, one in tensors for pair in self._copies(slot, *fit.places[name], one)
            ]
            # One call for all: a call for each of hundreds of small tensors would take as long as a pass.
            if named:
                rooms, pieces = zip(*(pair for _, pair in named), strict=True)
                torch._foreach_copy_(list(rooms), list(pieces), non_blocking=True)
            self._scalings_SQ[slot].copy_(upload(list(fit.scalings), self._scalings_SQ.device))
            if looked_at is not None:
                for name, (room, _) in named:
                    looked_at.add(name, room)
                looked_at.finish()

    def save(self, slot: int) -> SlotCopy:
        """Copy a slot to pinned host memory. On a GPU, the copy is only launched."""
        with self._device.copying(beside=False):
            return SlotCopy(_on_host(self._values_SN[slot]), _on_host(self._scalings_SQ[slot]))

    def restore(self, slot: int, copy: SlotCopy) -> None:
        """Copy saved contents into a slot, under the conditions of `write`."""
        self.generation += 1
        with self._device.copying(beside=False):
            self._values_SN[slot].copy_(copy.values, non_blocking=True)
            self._scalings_SQ[slot].copy_(copy.scalings, non_blocking=True)

    def _views(self, layout: _AdapterLayout) -> ProductAdapters:
        def view(offset: int, shape: tuple[int, ...]) -> Tensor:
            return self._values_SN[:, offset : offset + math.prod(shape)].view(-1, *shape)

        scalings = slice(layout.first_scaling, layout.first_scaling + len(layout.ends))
        return ProductAdapters(
            view(layout.a_offset, layout.a_shape),
            view(layout.b_offset, layout.b_shape),
            self._scalings_SQ[:, scalings],
            layout.ends,
        )

    def _run(self, module: _Module, half: str, shape: tuple[int, ...], dtype: torch.dtype) -> Run | None:
        """Where a tensor goes, if it is copied byte for byte into one piece; else None."""
        copies = list(self._copies(0, module, half, torch.empty(shape, dtype=dtype, device="meta")))
        if len(copies) != 1:
            return None
        [(room, piece)] = copies
        if dtype != room.dtype or not (room.is_contiguous() and piece.is_contiguous()):
            return None
        skipped_bytes = int(piece.storage_offset()) * dtype.itemsize
        return Run(room.data_ptr() - self.address(0), room.nbytes, skipped_bytes, dtype)

    def _copies(
        self, slot: int, module: _Module, half: str, given: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(destination, source) of each part of the sent A or B that this rank holds."""
        layout = module.layout
        adapters = self._adapters[layout.first_scaling]
        num_blocks = layout.num_experts if module.expert is None else 1
        experts = (
            slice(0, layout.num_experts) if module.expert is None else slice(module.expert, module.expert + 1)
        )
        rank = given.shape[0 if half == "A" else 1] // num_blocks
        if half == "A":
            # E·R rows of A, expert after expert.
            first = module.part * layout.rank + module.first_rank
            a_EPD = adapters.a_SEPD[slot, experts]
            yield a_EPD[:, first : first + rank], given[:, module.columns].reshape(num_blocks, rank, -1)
            return
        # E columns of B for each rank.
        given_EOR = given.reshape(len(given), rank, num_blocks).permute(2, 0, 1)
        b_EOR = adapters.b_SEOR[slot, experts, :, module.first_rank : module.first_rank + rank]
        for rows, start in module.parts:
            piece = given_EOR[:, rows]
            yield b_EOR[:, start : start + piece.shape[1]], piece

    def _checked(
        self,
        config: AdapterConfig,
        name: str,
        names: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> tuple[_Module, float]:
        """Check an A and its B; returns their module and scaling."""
        if len(names) < 2:
            (name,) = names.values()
            raise _tensor_refused(name, f"lora_{'B' if 'A' in names else 'A'} of the module with it")
        a_shape, b_shape = shapes[names["A"]], shapes[names["B"]]
        key, module = self._find(name, names["A"], a_shape, b_shape)
        num_blocks = module.layout.num_experts if module.expert is None else 1
        rank = config.rank_of(key)
        if rank > module.most_ranks:
            raise RequestRejected(
                f"adapter config: r: expected at most {module.most_ranks} (max_lora_rank) for {key}, "
                f"got {rank}"
            )
        for half, shape, expected in (
            ("A", a_shape, (num_blocks * rank, module.num_inputs)),
            ("B", b_shape, (module.num_outputs, num_blocks * rank)),
        ):
            if shape != expected:
                raise _tensor_refused(
                    names[half], f"shape {list(expected)} (rank {rank}), got {str(list(shape))[:MAX_TEXT]}"
                )
        return module, config.scaling_of(key)

    def _find(
        self, name: str, tensor: str, a_shape: tuple[int, ...], b_shape: tuple[int, ...]
    ) -> tuple[str, _Module]:
        """The module that a name means, with the module's own name."""
        if (module := self._modules.get(name) or self._modules.get(self._stored_as(name))) is not None:
            return name, module
        # PEFT wraps a layer's experts once for each parameter. The shapes tell which parameter it is.
        experts = name.removesuffix(".base_layer")
        fused = {key: self._modules.get(f"{experts}.{key}") for key in ("gate_up_proj", "down_proj")}
        for key, module in fused.items():
            if module is not None and (b_shape[:1], a_shape[1:]) == (
                (module.num_outputs,),
                (module.num_inputs,),
            ):
                return f"{experts}.{key}", module
        known = [module for module in fused.values() if module is not None]
        if known:
            ways = " or ".join(f"{module.num_outputs} x {module.num_inputs}" for module in known)
            raise _tensor_refused(
                tensor, f"an adapter of a weight of {ways}, got A {a_shape} and B {b_shape}"
            )
        if name.endswith(("embed_tokens", "lm_head")):
            raise _tensor_refused(
                tensor, "no adapter of embeddings or the output layer: these are not supported"
            )
        raise _tensor_refused(
            tensor, "modules of the model that take adapters, those of lora_target_modules if it is given"
        )


_PEFT_NAME = re.compile(r"(?:base_model\.model\.)?([\w.]+)\.lora_([AB])(?:\.default)?\.weight")


def _tensor_refused(name: str, expected: str) -> RequestRejected:
    return RequestRejected(f"adapter tensor {name[:MAX_TEXT]}: expected {expected}")


def _pairs(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Module → {"A": name, "B": name} of its tensors."""
    pairs: dict[str, dict[str, str]] = {}
    for name in names:
        match = _PEFT_NAME.fullmatch(name)
        if match is None:
            raise _tensor_refused(name, "a name of PEFT's, as in base_model.model.….q_proj.lora_A.weight")
        if pairs.setdefault(match[1], {}).setdefault(match[2], name) != name:
            raise _tensor_refused(name, f"it once, got {pairs[match[1]][match[2]][:MAX_TEXT]} too")
    if not pairs:
        raise RequestRejected("adapter: expected tensors, got none")
    return pairs


def _on_host(row: Tensor) -> Tensor:
    host = torch.empty(row.shape, dtype=row.dtype, pin_memory=row.is_cuda)
    return host.copy_(row, non_blocking=True)


def _products(model: CausalLM, placements: Mapping[str, Placement]) -> dict[str, dict[str, Placement]]:
    """The parameters that can have adapters, each with its checkpoint modules in order."""
    products: dict[str, dict[str, Placement]] = {}
    for name, placement in sorted(placements.items(), key=lambda item: item[1].target.start):
        parameter = placement.target.parameter
        module = model.get_submodule(parameter.rpartition(".")[0])
        is_product = isinstance(module, Linear) and module.may_be_adapted
        if name.endswith(".weight") and (
            isinstance(module, Experts) or (is_product and parameter.endswith(".weight"))
        ):
            products.setdefault(parameter, {})[name.removesuffix(".weight")] = placement
    return products


def _is_targeted(module: str, targets: tuple[str, ...] | None) -> bool:
    return targets is None or any(f".{module}".endswith(f".{target}") for target in targets)


def _layouts(
    model: CausalLM, placements: Mapping[str, Placement], limits: AdapterLimits
) -> dict[str, _AdapterLayout]:
    layouts: dict[str, _AdapterLayout] = {}
    end, num_scalings = 0, 0
    max_rank = round_up(limits.max_rank, RANK_MULTIPLE)
    for parameter, modules in _products(model, placements).items():
        module = model.get_submodule(parameter.rpartition(".")[0])
        num_experts = module.config.num_experts if isinstance(module, Experts) else 1
        if not any(_is_targeted(name, limits.targets) for name in modules) or len(modules) % num_experts:
            continue
        num_rows, num_inputs = model.get_parameter(parameter).shape
        if isinstance(module, Experts):
            # One A for all fused tensors of an expert, as PEFT's; separate ones are blocks of its rows.
            ends = [num_rows // num_experts]
            rank = max_rank * (len(modules) // num_experts)
        else:
            targets = [placement.target for placement in modules.values()]
            ends = [target.start + target.length for target in targets]
            rank = max_rank
        layout = _AdapterLayout(modules, num_experts, num_inputs, tuple(ends), rank, num_scalings, end)
        layouts[parameter] = layout
        end, num_scalings = layout.end, num_scalings + len(ends)
    for target in limits.targets or ():
        if not any(_is_targeted(name, (target,)) for layout in layouts.values() for name in layout.names):
            known = {name.rpartition(".")[2] for layout in layouts.values() for name in layout.names}
            raise ConfigurationError(
                f"lora_target_modules: the model has no module {target!r}; "
                f"known are {first_few(sorted(known))}"
            )
    if not layouts:
        raise ConfigurationError("enable_lora: the model has no products that take adapters")
    return layouts


def _modules(model: CausalLM, layouts: Mapping[str, _AdapterLayout]) -> Iterable[tuple[str, _Module]]:
    """Where the adapter of each module of a checkpoint goes, and that of all experts of a layer."""
    for parameter, layout in layouts.items():
        holder = parameter.rpartition(".")[0]
        is_experts = isinstance(model.get_submodule(holder), Experts)
        per_expert = len(layout.names) // layout.num_experts
        fused: list[tuple[slice, int]] = []
        for index, (name, placement) in enumerate(layout.names.items()):
            target, held = placement.target, placement.part
            num_outputs, num_inputs = target.shape
            expert, place = divmod(index, per_expert) if is_experts else (0, index)
            start = target.start - (expert * layout.ends[-1] if is_experts else 0)
            rows, [columns] = _held(held, OUTPUTS, num_outputs), _held(held, INPUTS, num_inputs)
            starts = accumulate((piece.stop - piece.start for piece in rows), initial=start)
            pieces = tuple(zip(rows, starts, strict=False))
            if is_experts:
                most, first_rank, part = layout.rank // per_expert, place * layout.rank // per_expert, 0
            else:
                most, first_rank, part = layout.rank, 0, place
            module = _Module(layout, expert, part, first_rank, pieces, columns, num_outputs, num_inputs, most)
            yield name, module
            if len(layout.names) == 1:
                # transformers may have another name for it than checkpoints.
                yield holder, module
            if is_experts and expert == 0:
                before = place * num_outputs
                fused += [(slice(before + piece.start, before + piece.stop), at) for piece, at in pieces]
        if is_experts:
            yield (
                parameter,
                _Module(
                    *(layout, None, 0, 0, tuple(fused), columns),
                    *(num_outputs * per_expert, num_inputs, layout.rank),
                ),
            )


def _held(part: Part | None, dim: int, length: int) -> list[slice]:
    """The ranges of a dimension that this rank holds."""
    if part is None or part.dim != dim:
        return [slice(0, length)]
    return [slice(start, start + count) for start, count in part.ranges]


def _give(model: CausalLM, parameter: str, adapters: ProductAdapters) -> None:
    holder, _, attribute = parameter.rpartition(".")
    module: Any = model.get_submodule(holder)
    if isinstance(module, Experts):
        module.adapters[attribute] = adapters
    else:
        module.adapters = adapters
