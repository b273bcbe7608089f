"""L46: adapters stored in one dtype on a model in another, beside PEFT in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import loraplex as lp

pytestmark = [
    pytest.mark.hf,
    # what PEFT says while the adapters are made
    pytest.mark.filterwarnings(
        "ignore:.*(tie_word_embeddings|save_embedding_layers|config file).*"
    ),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CONFIGS: dict[str, dict[str, Any]] = {
    "layers": {"target_modules": "all-linear", "use_rslora": True},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "parts": {"target_modules": ["embed_tokens", "v_proj"], "modules_to_save": ["lm_head", "norm"]},
}


@pytest.fixture(scope="module")
def folders(
    cpu_llama: Any, make_adapter: Any, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("dtypes")
    return {
        name: make_adapter(cpu_llama, root / name, seed, r=4, lora_alpha=4, **config)
        for seed, (name, config) in enumerate(CONFIGS.items(), 20)
    }


def stored_as(dtype: torch.dtype, folder: Path, target: Path) -> Path:
    """The same adapter with its tensors in another dtype."""
    target.mkdir()
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({n: t.to(dtype) for n, t in tensors.items()}, target / "adapter_model.safetensors")
    config = (folder / "adapter_config.json").read_text()
    (target / "adapter_config.json").write_text(config)
    return target


def logits(model: Any, prompts: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(**prompts, **options).logits[prompts["attention_mask"].bool()]
    return out.double()


@pytest.mark.parametrize("stored", DTYPES, ids=lambda dtype: f"file-{str(dtype)[6:]}")
@pytest.mark.parametrize("served", DTYPES[1:], ids=lambda dtype: f"model-{str(dtype)[6:]}")
@pytest.mark.parametrize("name", CONFIGS)
def test_L46_the_cast_costs_no_more_than_peft_does(
    name: str, served: torch.dtype, stored: torch.dtype, folders: Any, cpu_llama: Any,
    with_peft: Any, prompts: Any, device: torch.device, tmp_path: Path,
) -> None:  # fmt: skip
    folder = stored_as(stored, folders[name], tmp_path / "a")
    base = copy.deepcopy(cpu_llama).to(device=device, dtype=served)
    exact = with_peft(copy.deepcopy(base).double(), folder)
    truth = logits(exact.double(), prompts)
    eager = logits(with_peft(base, folder), prompts)
    model = lp.attach(base)
    model.add_adapter("a", folder)
    ours = logits(model, prompts, adapter_names=["a"] * 7)
    alone = logits(model, prompts)
    assert (truth - alone).abs().mean() > 10 * (truth - eager).abs().mean(), "a weak adapter"
    # PEFT keeps A and B in float32 whatever the model is in; here they take the model's dtype,
    # one rounding each on top of those of the layers.
    rounding = torch.finfo(served).eps * truth.abs().max()
    assert (truth - ours).abs().mean() <= 2 * (truth - eager).abs().mean() + rounding


@pytest.mark.parametrize("part", ["lora_A", "lora_embedding_B", "lm_head.weight"])
def test_L46_what_overflows_the_model_is_refused(
    part: str, folders: Any, cpu_llama: Any, device: torch.device, tmp_path: Path
) -> None:
    folder = stored_as(torch.bfloat16, folders["parts"], tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    chosen = next(name for name in tensors if part in name)
    tensors[chosen].view(-1)[3] = 1e5  # 99840 in bfloat16
    save_file(tensors, file)
    model = lp.attach(copy.deepcopy(cpu_llama).to(device=device, dtype=torch.float16))
    with pytest.raises(lp.AdapterError, match=r"values up to (9\.98e\+04|99840)"):
        model.add_adapter("a", folder)
    assert model.adapter_names() == []
    model = lp.attach(copy.deepcopy(cpu_llama).to(device=device, dtype=torch.bfloat16))
    model.add_adapter("a", folder)
