"""What is measured in SGLang: models, adapters, loads, and the engine's arguments for each."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16", "rope_theta": 500000.0,
}  # fmt: skip
TINY = LLAMA | {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1024,
}  # fmt: skip
# Weights of a sensible size, so that log-probabilities depend on every layer; head_dim as above.
WIDE = LLAMA | {
    "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 2816, "vocab_size": 4096,
    "max_position_embeddings": 1024,
}  # fmt: skip
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The demo's adapters that SGLang reads, of ranks 32, 8 and 4. The others have rsLoRA, DoRA, a rank
# of their own per module, or q_proj without v_proj.
DEMO_ADAPTERS = ("json", "pirate", "shout")
OWN = ("csgmv", "triton", "triton_v2")
BACKENDS = ("none", *OWN, "loraplex")


@dataclass(frozen=True)
class Load:
    """So many requests at once, of so many prompt tokens and new tokens each."""

    batch: int
    prompt: int
    new: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.prompt}+{self.new}"


@dataclass(frozen=True)
class Part:
    """Engines that start together, one per backend, and are measured one after the other.

    Attributes:
        slots: SGLang's ``max_loras_per_batch``; base requests need one.
        folders: adapter folders; names beyond them use the same folders again, in own slots.
        is_check: log-probabilities instead of times.
    """

    name: str
    model: str
    rank: int
    slots: int
    folders: tuple[str, ...]
    num_adapters: int
    loads: tuple[Load, ...] = ()
    backends: tuple[str, ...] = BACKENDS
    tensor_parallel: int = 1
    is_check: bool = False

    def adapters(self) -> dict[str, str]:
        """Folder of each adapter by name."""
        return {f"a{i}": self.folders[i % len(self.folders)] for i in range(self.num_adapters)}


def make_parts(folder: Path, demo: Path, slots: int) -> dict[str, Part]:
    """Every part by name; ``folder`` is where ``prepare`` wrote models and adapters."""
    count = slots - 1

    def of_rank(rank: int) -> tuple[str, ...]:
        return tuple(str(folder / f"r{rank}_{i}") for i in range(count))

    decode = Load(64, 128, 128)
    loads = (decode, Load(16, 128, 128), Load(1, 128, 128), Load(64, 1024, 1))
    llama = str(folder / "llama")
    main = Part("main", llama, 16, slots, of_rank(16), count, loads)
    demo_adapters = tuple(str(demo / "adapters" / name) for name in DEMO_ADAPTERS)
    wide_adapters = tuple(str(folder / f"wide_{i}") for i in range(4))
    demo_model, wide_model = str(demo / "loraplex-demo"), str(folder / "wide")
    parts = [
        main,
        Part("rank64", llama, 64, slots, of_rank(64), count, (decode,)),
        Part("many", llama, 16, 65, of_rank(16), 64, (decode,)),
        replace(main, name="tp2", tensor_parallel=2),
        Part("demo", demo_model, 32, 4, demo_adapters, 3, backends=BACKENDS[1:], is_check=True),
        Part("wide", wide_model, 64, 5, wide_adapters, 4, backends=BACKENDS[1:], is_check=True),
    ]
    wide_tp2 = replace(parts[5], name="wide_tp2", tensor_parallel=2)
    return {part.name: part for part in (*parts, wide_tp2)}


def captured_sizes(part: Part) -> tuple[list[int], list[int]]:
    """Numbers of tokens that decode graphs and prefill graphs are captured for."""
    if part.is_check:
        # a check has fewer requests than its graph has rows, so the padding is checked too
        return [24], [64, 1024]
    decode = sorted({load.batch for load in part.loads if load.new > 1} or {1})
    return decode, [128, 2048, 8192]


def linear_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Out- and in-features of each linear layer of a block."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        "self_attn.q_proj": (query, hidden), "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden), "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip


def packed_layers(config: dict[str, Any], ranks: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """Slices and in-features of the layers as SGLang packs them, on one of so many GPUs."""
    shapes = {name.rpartition(".")[2]: shape for name, shape in linear_shapes(config).items()}

    def by_columns(*names: str) -> tuple[tuple[int, ...], int]:
        return tuple(shapes[name][0] // ranks for name in names), shapes[names[0]][1]

    def by_rows(name: str) -> tuple[tuple[int, ...], int]:
        return (shapes[name][0],), shapes[name][1] // ranks

    return {
        "qkv": by_columns("q_proj", "k_proj", "v_proj"), "o": by_rows("o_proj"),
        "gate_up": by_columns("gate_proj", "up_proj"), "down": by_rows("down_proj"),
    }  # fmt: skip


def engine_arguments(part: Part, backend: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ``sglang.Engine``."""
    decode, prefill = captured_sizes(part)
    tokens = max([load.batch * (load.prompt + load.new) for load in part.loads] or [4096])
    arguments: dict[str, Any] = {
        "model_path": part.model,
        "load_format": "auto" if part.is_check else "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "context_length": 256 if part.is_check else 2048,
        # neither flashinfer nor fa3 is needed for these
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        # repeated prompts would skip their prefill
        "disable_radix_cache": True,
        "mem_fraction_static": 0.97,
        "max_total_tokens": tokens + 4096,
        "max_running_requests": 64,
        "random_seed": 1,
        "log_level": "info",
        "cuda_graph_config": {"decode": {"bs": decode}, "prefill": {"bs": prefill}},
    }
    if part.tensor_parallel > 1:
        arguments |= {"tp_size": part.tensor_parallel, "disable_custom_all_reduce": True}
    if backend != "none":
        arguments |= {
            "enable_lora": True,
            "lora_backend": backend,
            "max_loras_per_batch": part.slots,
            "max_lora_rank": part.rank,
            "lora_target_modules": list(MODULES),
            "lora_paths": part.adapters(),
        }
    return arguments | extra


def vocabulary(part: Part) -> int:
    """Number of tokens of the part's model."""
    return int(json.loads(Path(part.model, "config.json").read_text())["vocab_size"])
