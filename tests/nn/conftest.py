"""A tiny random Llama, PEFT adapters on it, and what PEFT alone makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
# What each adapter is made of: all that a table carries, over different layers and ranks.
CONFIGS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION},
    "rslora": {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ATTENTION + MLP},
    "patterns": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"q_proj": 5},
        "alpha_pattern": {"down_proj": 3},
    },
    "mlp": {"r": 3, "lora_alpha": 3, "target_modules": MLP},
    "dora": {"r": 6, "lora_alpha": 12, "use_dora": True, "target_modules": ["v_proj", *MLP]},
    "lora_bias": {"r": 4, "lora_alpha": 8, "lora_bias": True, "target_modules": ["o_proj"]},
}


def tiny_llama(**changes: Any) -> Any:
    """Odd on purpose: heads wider than hidden / heads, grouped keys, biases."""
    options = {
        "vocab_size": 96,
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "attention_bias": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options | changes)).eval()
    for parameter in model.parameters():
        # Larger than the default, so that adapters and positions change the argmax.
        parameter.data.normal_(0, 0.25)
    return model


def save_adapter(model: Any, folder: Path, seed: int = 0, **config: Any) -> Path:
    """Write a PEFT folder with random weights, B and biases included."""
    torch.manual_seed(seed)
    config = {"task_type": "CAUSAL_LM", "init_lora_weights": False} | config
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**config))
    for name, parameter in adapted.named_parameters():
        if "lora_magnitude" in name:
            parameter.data *= torch.rand_like(parameter) + 0.5
        elif parameter.requires_grad:
            parameter.data.normal_(0, 0.35)
    adapted.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="session")
def cpu_llama() -> Any:
    return tiny_llama()


@pytest.fixture(scope="session")
def adapters(cpu_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(cpu_llama, root / name, seed, **config)
        for seed, (name, config) in enumerate(CONFIGS.items())
    }


@pytest.fixture
def llama(cpu_llama: Any, device: torch.device) -> Any:
    """A fresh copy on the test's device, not attached."""
    return copy.deepcopy(cpu_llama).to(device)


@pytest.fixture
def prompts(device: torch.device) -> dict[str, torch.Tensor]:
    """Seven rows of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 96, (7, 9), generator=generator)
    lengths = torch.tensor([9, 4, 7, 1, 9, 2, 6])
    mask = (torch.arange(9)[None] >= 9 - lengths[:, None]).long()
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


Peft = Callable[[Any, Path | None], Any]


@pytest.fixture(scope="session")
def with_peft() -> Peft:
    """The model with one adapter by PEFT, or a copy of the model itself."""

    def load(model: Any, folder: Path | None) -> Any:
        base = copy.deepcopy(model)
        return base if folder is None else peft.PeftModel.from_pretrained(base, str(folder)).eval()

    return load


def rows_of(names: Sequence[str | None]) -> dict[str | None, list[int]]:
    """The rows of each name."""
    found: dict[str | None, list[int]] = {}
    for row, name in enumerate(names):
        found.setdefault(name, []).append(row)
    return found


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., Any]:
    return tiny_llama


@pytest.fixture(scope="session")
def make_adapter() -> Callable[..., Path]:
    return save_adapter
