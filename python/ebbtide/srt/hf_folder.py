"""Reads the JSON files of a Hugging Face folder: of a checkpoint, or of a LoRA adapter.

`model_executor.loader` reads the weights.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ebbtide.srt.errors import ConfigurationError, RequestRejected
from ebbtide.version import SOURCE_ROOT

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# Models that come with Ebbtide.
_OWN_MODELS = SOURCE_ROOT / "ebbtide" / "models"
_SIZE = re.compile(r"_(dim|experts|groups?|heads|layers|rank|replace|size|step)$")
# Fields that other numbers are divided by, so they must not be 0.
_DIVISOR = re.compile(
    r"(head_dim|num_key_value_heads|linear_num_key_heads|n_groups?|topk_group|decoder_sparse_step)$"
)
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.py"]
_WEIGHT_FILES = ["*.safetensors", "*.bin"]
# Model type that transformers does not have → the equivalent one that it has.
_CONFIGS_ALIKE = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
# Fields that are taken from a multimodal model's whole config; the others are those of its text model.
_OF_THE_WHOLE = ("architectures", "model_type", "dtype", "quantization_config", "tie_word_embeddings")


def folder_of(given: str) -> Path:
    """The folder of a path, or of the name of a model that comes with Ebbtide, such as `tiny`."""
    # Unlike Path.expanduser, this does not raise for unknown users.
    folder = Path(os.path.expanduser(given))
    own = _OWN_MODELS / given
    return own if _HUB_ID.fullmatch(given) and not folder.exists() and own.is_dir() else folder


def local_folder(argument: str, given: str, revision: str | None, *, with_weights: bool) -> Path:
    """The folder of a path or hub id. Files of a hub id that are not in the hub's cache are downloaded.

    Args:
        argument: name of the argument, for errors.
        revision: of a hub id; None: the default branch.
        with_weights: whether to download weight files too.

    Raises ConfigurationError: there is no such folder, and it cannot be downloaded.
    """
    folder = folder_of(given)
    # Path("") would be the working directory, for instance from an unset shell variable.
    if given and folder.is_dir():
        return folder
    if folder.exists() or not _HUB_ID.fullmatch(given):
        raise ConfigurationError(
            f"{argument}: expected a checkpoint folder or a hub id, got {given!r} "
            f"({'a file' if folder.is_file() else 'no such folder'})"
        )
    from huggingface_hub import snapshot_download  # not needed for local folders

    patterns = _SMALL_FILES + (_WEIGHT_FILES if with_weights else [])
    try:
        return Path(snapshot_download(given, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{argument}: {given!r} is not a folder, and the hub download failed: {_first_line(error)}"
        ) from error


@contextmanager
def read_json(file: Path) -> Iterator[Any]:
    """Read a JSON file for the block.

    Raises RequestRejected: 400; the file cannot be read, or the block misses a key or finds a wrong type.
    """
    try:
        yield json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestRejected(f"{file} cannot be read: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise RequestRejected(f"{file} cannot be read: {error!r}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint folder. Raises ConfigurationError: none, or not a JSON object."""
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigurationError(
            f"{folder}: expected a Hugging Face checkpoint folder, it has no config.json"
        )
    return _read_object(file)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigurationError(f"{file}: expected a JSON object, got {fields!r:.100}")
    return fields


def has_weights(folder: Path) -> bool:
    """Whether a folder has weight files."""
    return any(True for pattern in _WEIGHT_FILES for _ in folder.glob(pattern))


def load_hf_config(folder: Path, *, trust_remote_code: bool, overrides_json: str) -> SimpleNamespace:
    """The fields of transformers' config of a folder, with the overrides merged into config.json.

    In addition, `changed_fields` has the names of fields that differ from transformers' defaults, and
    `other_names` maps further names of fields to these. All are JSON values, so ranks do not need to import
    transformers, which takes a second.

    Raises ConfigurationError: config.json or the overrides are wrong.
    """
    overrides = _parse_overrides(overrides_json)
    read_config(folder)
    from transformers import AutoConfig, PreTrainedConfig  # more than a second: not for `--help`

    try:
        raw, _ = PreTrainedConfig.get_config_dict(folder)
        if (same := _CONFIGS_ALIKE.get(raw.get("model_type"))) is not None:
            config: PreTrainedConfig = AutoConfig.for_model(same)
            overrides = {**overrides, "model_type": same}
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if overrides:
            # Build it again, since some fields are derived from others (rope, layer types).
            config = type(config).from_dict({**raw, **overrides})
        text = config.get_text_config(decoder=True)
        fields, defaults = text.to_dict(), type(text)().to_dict()
    except Exception as error:  # transformers raises many kinds of errors for a bad config
        raise ConfigurationError(f"{folder}/config.json: {_first_line(error)}") from error
    # Some configs derive it from a list of layers, so to_dict lacks it.
    fields.setdefault("num_hidden_layers", getattr(text, "num_hidden_layers", None))
    changed = [name for name, value in fields.items() if name in defaults and defaults[name] != value]
    other_names = {name: getattr(text, name, None) for name in text.attribute_map}
    more = {"changed_fields": changed, "other_names": dict(text.attribute_map)}
    if text is not config:
        whole = config.to_dict()
        fields |= {name: whole[name] for name in _OF_THE_WHOLE if whole.get(name) is not None}
    return SimpleNamespace(**{**other_names, **fields, **more})


def architectures(folder: Path, hf_config: SimpleNamespace) -> list[str]:
    """The model classes that config.json names, at least one. Raises ConfigurationError: there is none."""
    names = getattr(hf_config, "architectures", None)
    if not names:
        raise ConfigurationError(
            f'{folder}/config.json: expected "architectures" to name a class, got {names!r}'
        )
    return list(_names(folder, "architectures", names))


def _names(folder: Path, field: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise ConfigurationError(
            f"{folder}/config.json: expected {field} to be a list of names, got {given!r:.200}"
        )
    return tuple(given)


def positive_int(folder: Path, hf_config: SimpleNamespace, name: str) -> int:
    """A required field of config.json. Raises ConfigurationError: it is no integer from 1 on."""
    value = getattr(hf_config, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{folder}/config.json: expected {name} to be an integer ≥ 1, got {value!r}")
    return value


def require_sizes(folder: Path, hf_config: SimpleNamespace) -> None:
    """Reject impossible sizes and numbers of heads and layers, whichever of them the config has.

    Raises ConfigurationError.
    """
    for name, value in vars(hf_config).items():
        least = 1 if _DIVISOR.match(name) else 0
        if _SIZE.search(name) and isinstance(value, int) and value < least:
            raise ConfigurationError(
                f"{folder}/config.json: expected {name} to be {least} or more, got {value}"
            )


def declared_dtype(folder: Path, hf_config: SimpleNamespace) -> str:
    """The dtype of the checkpoint by its config.json. Raises ConfigurationError: it is not a supported one.

    Without one it is float32, transformers' default; for MXFP4 bfloat16, to which its weights are widened.
    """
    declared = getattr(hf_config, "dtype", None)
    if declared is None and _is_mxfp4(hf_config):
        return "bfloat16"
    name = str(declared if declared is not None else "float32")
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigurationError(
            f"{folder}/config.json: expected dtype float32, bfloat16 or float16, got {name}; "
            "pass --dtype to convert to one of them"
        )
    return name


def quantization(
    folder: Path, hf_config: SimpleNamespace, wanted: str | None
) -> tuple[str | None, tuple[str, ...]]:
    """The quantization of the weights, as `--quantization` names it, and the modules that are excluded.

    None: weights keep their dtype. MXFP4 counts as not quantised, since it is widened when read.

    `wanted`: the argument; it applies to checkpoints that are not quantised.

    Raises ConfigurationError: the checkpoint is quantised in another way than to e4m3 with a scale for each
    block of 128 × 128 or each row, and dynamic activations; or in another way than `wanted`.
    """
    stored = _stored_quantization(folder, hf_config)
    if stored is None:
        return wanted, ()
    if wanted not in (None, stored[0]):
        raise ConfigurationError(
            f"quantization={wanted}: the weights in {folder} are {stored[0]} already: expected that, or "
            "nothing"
        )
    return stored


def _stored_quantization(folder: Path, hf_config: SimpleNamespace) -> tuple[str, tuple[str, ...]] | None:
    given = getattr(hf_config, "quantization_config", None)
    if given is None or _is_mxfp4(hf_config):
        return None
    if given.get("quant_method") == "compressed-tensors":
        return _compressed_tensors(folder, given)
    found = {
        "quant_method": given.get("quant_method"),
        "fmt": given.get("fmt", "e4m3"),
        "weight_block_size": given.get("weight_block_size"),
        "activation_scheme": given.get("activation_scheme", "dynamic"),
    }
    expected = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    if found != expected:
        raise ConfigurationError(
            f"{folder}/config.json: quantization_config: expected {expected}, or compressed-tensors with a "
            f"scale for each row, or none, got {found}"
        )
    names = given.get("modules_to_not_convert") or given.get("ignored_layers") or []
    return "fp8", _names(folder, "modules_to_not_convert", names)


def _is_mxfp4(hf_config: SimpleNamespace) -> bool:
    given = getattr(hf_config, "quantization_config", None)
    return given is not None and given.get("quant_method") == "mxfp4"


def _compressed_tensors(folder: Path, fields: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Read compressed-tensors' config: one group of all `Linear`, with a scale per row and per token."""
    expected = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    }
    groups = fields.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    found = [_fields_of(group, expected) for group in groups]
    if found != [expected]:
        raise ConfigurationError(
            f"{folder}/config.json: quantization_config: expected one group of compressed-tensors, "
            f"{expected}, got {found}"
        )
    return "w8a8_fp8", _names(folder, "ignore", fields.get("ignore") or [])


def _fields_of(given: Any, expected: Any) -> Any:
    """Reduce given fields to the keys that are expected, at every level."""
    if not isinstance(given, dict) or not isinstance(expected, dict):
        return given
    return {key: _fields_of(given.get(key), value) for key, value in expected.items()}


def eos_token_ids(folder: Path, hf_config: SimpleNamespace) -> frozenset[int]:
    """The ids that end a text, from config.json and generation_config.json. Raises ConfigurationError."""
    in_config = _ids(folder / "config.json", getattr(hf_config, "eos_token_id", None))
    path = folder / "generation_config.json"
    if not path.is_file():
        return in_config
    return in_config | _ids(path, _read_object(path).get("eos_token_id"))


def _ids(path: Path, given: Any) -> frozenset[int]:
    ids = [] if given is None else given if isinstance(given, list) else [given]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise ConfigurationError(
            f"{path}: expected eos_token_id to be a token id or a list of them, got {given!r}"
        )
    return frozenset(ids)


def _parse_overrides(text: str) -> dict[str, Any]:
    try:
        overrides = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"json_model_override_args: not JSON: {error}") from error
    if not isinstance(overrides, dict):
        raise ConfigurationError(f"json_model_override_args: expected a JSON object, got {text!r}")
    return overrides


def _first_line(error: Exception) -> str:
    """The first line of an error's message. Lines after one that ends with a colon belong to it."""
    said = ""
    for line in str(error).splitlines():
        said = f"{said} {line.strip()}".strip()
        if said and not said.endswith(":"):
            break
    return said or type(error).__name__


# PEFT's default.
DEFAULT_ALPHA = 8
MAX_ALPHA = 1e6
MAX_TEXT, MAX_PATTERNS = 200, 1024
_NAME = re.compile(r"[\w.]+")
# With so few repetitions, matching takes a bounded time. PEFT itself writes patterns like .*\.gate_up_proj.
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
    """PEFT's adapter_config.json.

    Attributes:
        rank: r, for modules that match no pattern.
        alpha, is_rank_stabilized: lora_alpha, and whether it is divided by √r instead of r.
        ranks, alphas: rank_pattern and alpha_pattern: regular expressions for the end of a module's name,
            with the rank or alpha of modules that match.
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
    """Read the fields of an adapter_config.json, except its target modules, which its tensors show.

    Raises RequestRejected: 400, with the field and what was expected.
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
    """Whether a pattern matches whole parts at the end of a module's name, as in PEFT."""
    if _NAME.fullmatch(pattern):
        return f".{module}".endswith(f".{pattern}")
    return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
