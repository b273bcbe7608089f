"""adapter_config.json → AdapterSpec, with PEFT's defaults and PEFT's arithmetic."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loraplex.adapters.name_regex import UnsupportedPatternError
from loraplex.adapters.patterns import PatternTable
from loraplex.errors import AdapterError, UnsupportedAdapterError

# Keys that do not change what the tensors of the file mean.
NEUTRAL_KEYS = frozenset(
    (
        "auto_mapping",
        "corda_config",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "merge_weights",
        "qalora_group_size",
        "runtime_config",
        "unsloth_fixed",
        "velora_config",
    )
)

# Features of PEFT that change the forward pass or the base in a way loraplex does not carry.
REFUSED_KEYS = {
    "arrow_config": "Arrow routes between adapters at run time",
    "enable_lora": "the merged linear layers of old PEFT versions",
    "kasa_config": "KaSA truncates the weights of the base model",
    "layer_replication": "the base model's layers are repeated",
    "megatron_config": "the tensors belong to Megatron's parallel layers",
    "monteclora_config": "MonteCLoRA samples its weights",
    "use_bdlora": "BD-LoRA stores block-diagonal factors",
    "use_qalora": "QA-LoRA pools the inputs of each layer",
}

UNCHANGED_BASE_INITS = ("gaussian", "eva", "orthogonal", "mica", "true", "false")
BIAS_MODES = ("none", "all", "lora_only")
FLOAT32_MAX = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True)
class AdapterSpec:
    """The parsed adapter_config.json of a LoRA adapter.

    `r` and `lora_alpha` are the defaults; `rank_of`, `alpha_of` and `scaling_of` apply the
    patterns to one module. Which modules are adapted is decided by the tensors of the file, not by
    `target_modules` (which may be names, a regular expression or absent).
    """

    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)
    target_modules: tuple[str, ...] | str | None = None
    exclude_modules: tuple[str, ...] | str | None = None
    layers_to_transform: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] | None = None
    target_parameters: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None = None
    alora_invocation_tokens: tuple[int, ...] | None = None
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    fan_in_fan_out: bool = False
    ensure_weight_tying: bool = False
    init_lora_weights: bool | str = True
    base_model: str | None = None
    revision: str | None = None
    task_type: str | None = None
    peft_version: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ranks", PatternTable(self.rank_pattern))
        object.__setattr__(self, "_alphas", PatternTable(self.alpha_pattern))

    def rank_of(self, module: str) -> int:
        """Rank of one module: the first matching rank_pattern, else r."""
        ranks: PatternTable[int] = self._ranks  # type: ignore[attr-defined]
        return ranks.find(module, self.r)

    def alpha_of(self, module: str) -> float:
        """Alpha of one module: the first matching alpha_pattern, else lora_alpha."""
        alphas: PatternTable[float] = self._alphas  # type: ignore[attr-defined]
        return alphas.find(module, self.lora_alpha)

    def scaling_of(self, module: str) -> float:
        """alpha / rank, or alpha / sqrt(rank) with rsLoRA, of one module.

        Example:
            >>> spec = AdapterSpec(r=8, lora_alpha=16, use_rslora=True, rank_pattern={"q_proj": 64})
            >>> spec.scaling_of("model.layers.0.self_attn.q_proj")
            2.0
        """
        rank, alpha = self.rank_of(module), self.alpha_of(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def parse_spec(
    config: Mapping[str, Any], label: str, *, allow_modified_base: bool = False
) -> AdapterSpec:
    """Check an adapter_config.json and turn it into an AdapterSpec.

    Unknown keys with a value that is not null, false or empty are warned about; keys of features
    that would change the result are refused.

    Raises:
        AdapterError: no LoRA config, or a field of the wrong type or out of range.
        UnsupportedAdapterError: a PEFT method or feature that loraplex does not carry.
    """
    reader = _ConfigReader(config, label)
    reader.check_method()
    fields = {
        "r": reader.get("r", 8, _positive_int, "a positive integer"),
        "lora_alpha": reader.get("lora_alpha", 8, _finite, "a finite number"),
        "rank_pattern": reader.patterns("rank_pattern", _positive_int, "a positive integer"),
        "alpha_pattern": reader.patterns("alpha_pattern", _finite, "a finite number"),
        "target_modules": reader.get("target_modules", None, _names, "a string or list of strings"),
        "exclude_modules": reader.get("exclude_modules", None, _names, "a string or list of them"),
        "layers_to_transform": reader.get("layers_to_transform", None, _ints, "integers"),
        "layers_pattern": reader.get("layers_pattern", None, _name_list, "a list of strings"),
        "target_parameters": reader.get("target_parameters", (), _name_list, "a list of strings"),
        "modules_to_save": reader.get("modules_to_save", (), _name_list, "a list of strings"),
        "trainable_token_indices": reader.get(
            "trainable_token_indices", None, _token_indices, "token ids from 0, or a dict of them"
        ),
        "alora_invocation_tokens": reader.get("alora_invocation_tokens", None, _ints, "token ids"),
        "bias": reader.get("bias", "none", _bias_mode, f"one of {BIAS_MODES}"),
        "init_lora_weights": reader.get(
            "init_lora_weights",
            True,
            _flag_or_text,
            "true, false, or the name of an initialisation",
        ),
        "base_model": reader.get("base_model_name_or_path", None, _text, "a string") or None,
        **{name: reader.get(name, None, _text, "a string") for name in _TEXT_FIELDS},
        **{name: reader.get(name, False, _flag, "true or false") for name in _FLAG_FIELDS},
    }
    spec = AdapterSpec(**fields)
    reader.check_features()
    if not allow_modified_base:
        _check_init(spec, label)
    return spec


_TEXT_FIELDS = ("revision", "task_type", "peft_version")
_FLAG_FIELDS = ("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "ensure_weight_tying")
_KNOWN_KEYS = (
    frozenset(field.name for field in dataclasses.fields(AdapterSpec) if field.name != "base_model")
    | frozenset(("peft_type", "base_model_name_or_path"))
    | NEUTRAL_KEYS
    | frozenset(REFUSED_KEYS)
)


def _check_init(spec: AdapterSpec, label: str) -> None:
    init = str(spec.init_lora_weights).lower()
    if init in UNCHANGED_BASE_INITS:
        return
    raise UnsupportedAdapterError(
        f"{label}: init_lora_weights={spec.init_lora_weights!r} changes (or may change) the base "
        "model's weights, so the adapter does not fit the original base. Convert it with peft's "
        "save_pretrained(..., path_initial_model_for_weight_conversion=...), or, if the base you "
        "serve is the changed one, load with allow_modified_base=True"
    )


class _ConfigReader:
    """Reads fields of one config; every error names the folder, the field, the rule, the value."""

    def __init__(self, config: Mapping[str, Any], label: str) -> None:
        self.config = config
        self.label = label

    def get(self, name: str, default: Any, parse: Callable[[Any], Any], rule: str) -> Any:
        """The parsed field; null and absent are the default."""
        value = self.config.get(name)
        if value is None:
            return default
        return self.parse(value, parse, name, rule)

    def parse(self, value: Any, parse: Callable[[Any], Any], name: str, rule: str) -> Any:
        """`value`, parsed, or an error that names the field."""
        try:
            return parse(value)
        except (TypeError, ValueError, OverflowError):
            raise AdapterError(
                f"{self.label}: adapter_config.json: {name} must be {rule}, got {value!r:.200}"
            ) from None

    def patterns(self, name: str, parse: Callable[[Any], Any], rule: str) -> dict[str, Any]:
        """A pattern dict, each value parsed and each key a regular expression."""
        value = self.config.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise AdapterError(
                f"{self.label}: adapter_config.json: {name} must be a dict, got {value!r:.200}"
            )
        table = {
            key: self.parse(item, parse, f"{name}[{key!r}]", rule) for key, item in value.items()
        }
        try:
            PatternTable(table)
        except UnsupportedPatternError as error:
            raise UnsupportedAdapterError(
                f"{self.label}: adapter_config.json: {name}: {error}"
            ) from None
        except ValueError as error:
            raise AdapterError(f"{self.label}: adapter_config.json: {name}: {error}") from None
        return table

    def check_method(self) -> None:
        """Only ``peft_type: LORA``."""
        method = self.config.get("peft_type")
        if isinstance(method, str) and method.upper() == "LORA":
            return
        if method is None:
            kind = " (it looks like an MLX adapter)" if "lora_parameters" in self.config else ""
            raise AdapterError(
                f"{self.label}: not a PEFT LoRA folder: adapter_config.json has no peft_type{kind}"
            )
        raise UnsupportedAdapterError(
            f"{self.label}: peft_type must be 'LORA', got {method!r:.80}; "
            "other PEFT methods are not supported"
        )

    def check_features(self) -> None:
        """Refuse the features that change the result, warn about keys nobody knows."""
        for name, reason in REFUSED_KEYS.items():
            if self.config.get(name):
                raise UnsupportedAdapterError(
                    f"{self.label}: {name}={self.config[name]!r:.120} is not supported: {reason}"
                )
        unknown = [key for key in self.config if key not in _KNOWN_KEYS and self.config[key]]
        if unknown:
            warnings.warn(
                f"{self.label}: adapter_config.json has keys loraplex does not know and ignores: "
                + ", ".join(
                    f"{repr(key)[1:-1]:.80}={self.config[key]!r:.80}" for key in sorted(unknown)
                ),
                UserWarning,
                stacklevel=4,
            )


def _positive_int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError
    return value


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    # a scaling is a float32 later
    if not abs(value) <= FLOAT32_MAX:
        raise ValueError
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _flag_or_text(value: Any) -> bool | str:
    return value if isinstance(value, bool) else _text(value)


def _bias_mode(value: Any) -> str:
    if value not in BIAS_MODES:
        raise ValueError
    return _text(value)


def _name_list(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise TypeError
    return tuple(_text(item) for item in value)


def _names(value: Any) -> tuple[str, ...] | str:
    return value if isinstance(value, str) else _name_list(value)


def _ints(value: Any) -> tuple[int, ...]:
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
        raise TypeError
    return tuple(items)


def _token_indices(value: Any) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
    found = {name: _ints(items) for name, items in value.items()} if isinstance(value, dict) else {}
    single = () if isinstance(value, dict) else _ints(value)
    if any(index < 0 for items in (single, *found.values()) for index in items):
        raise ValueError
    return found or single
