"""Tiny models, adapters that peft really wrote, and the semantics of an Adapter in plain torch."""

from __future__ import annotations

import copy
import functools
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loraplex.adapters import Adapter, EmbeddingLora, LayerLora, LayerShape, Matching, ModuleLora

IDS = torch.tensor([[5, 17, 3, 90, 41, 8, 1, 33], [7, 7, 60, 2, 95, 0, 11, 12]])


@functools.cache
def base_model(kind: str) -> Any:
    """A randomly initialised model in float64, built once per kind; never changed."""
    import transformers as hf

    sizes: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    gpt2 = hf.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    builders: dict[str, Callable[[], Any]] = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)),
        "llama-bare": lambda: hf.LlamaModel(hf.LlamaConfig(**sizes)),
        "llama-tied": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(**sizes, tie_word_embeddings=True)
        ),
        # 8 query heads and 2 groups of width 8 on hidden 40: no width follows from hidden_size.
        "llama-odd": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(**{**sizes, "hidden_size": 40, "num_attention_heads": 8, "head_dim": 8})
        ),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes)),  # has biases on q, k, v
        "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**sizes)),
        "gpt2": lambda: hf.GPT2LMHeadModel(gpt2),
        "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, num_local_experts=4)),
    }
    torch.manual_seed(0)
    if kind.endswith("-fp32"):  # some of peft's initialisations refuse float64
        return builders[kind.removesuffix("-fp32")]().eval()
    model = builders[kind]().double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts them at zero, which would hide errors
                parameter.normal_(std=0.1)
    return model


def layers_of(model: Any) -> dict[str, LayerShape]:
    """Every linear layer of a model, as an engine would describe it."""
    layers: dict[str, LayerShape] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            layers[name] = LayerShape.plain(layer.in_features, layer.out_features)
        elif type(layer).__name__ == "Conv1D":
            layers[name] = LayerShape.plain(*layer.weight.shape)
    return layers


def parameters_of(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@dataclass(frozen=True)
class Trained:
    """One adapter that peft wrote: where, of what model, and what peft computes with it."""

    path: Path
    base: Any
    peft_model: Any
    logits: torch.Tensor

    def edit_config(self, **changes: Any) -> None:
        """Set fields of adapter_config.json; ``...`` drops one."""
        file = self.path / "adapter_config.json"
        config = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))

    def edit_tensors(
        self, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    ) -> None:
        """Rewrite the tensors."""
        from safetensors.torch import load_file, save_file

        file = self.path / "adapter_model.safetensors"
        tensors = change({name: t.clone() for name, t in load_file(file).items()})
        save_file({name: t.contiguous() for name, t in tensors.items()}, file)

    def rename(self, old: str, new: str) -> None:
        """Replace a part of every tensor name."""
        self.edit_tensors(lambda tensors: {n.replace(old, new): t for n, t in tensors.items()})


class Tiny:
    """What the tests need of tiny models; adapters go to one temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    model = staticmethod(base_model)
    layers = staticmethod(layers_of)
    parameters = staticmethod(parameters_of)

    def train(self, kind: str = "llama", *, with_logits: bool = True, **config: Any) -> Trained:
        """Build an adapter with peft, give it random weights, save it."""
        import peft

        self.count += 1
        base = base_model(kind)
        defaults: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(
                copy.deepcopy(base), peft.LoraConfig(**{**defaults, **config})
            )
            torch.manual_seed(self.count)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "magnitude" in name:
                        parameter.mul_(0.5 + torch.rand_like(parameter))
                    elif parameter.requires_grad:
                        parameter.normal_(std=0.3)
            path = self.folder / f"adapter{self.count}"
            model.eval().save_pretrained(path)
            logits = torch.empty(0)
            if with_logits:
                # As peft reads the folder: it writes the patterns sorted, and their order counts.
                model = peft.PeftModel.from_pretrained(copy.deepcopy(base), path).eval()
                logits = self.output(model)
        return Trained(path, base, model, logits)

    @staticmethod
    @torch.no_grad()
    def output(model: Any) -> torch.Tensor:
        """Logits, or the last hidden state of a model without a head."""
        result: torch.Tensor = model(input_ids=IDS)[0]
        return result

    def serve(self, base: Any, matching: Matching) -> torch.Tensor:
        """Logits of the base with an adapter, from the docstrings of the adapter's parts."""
        model = copy.deepcopy(base)
        with torch.no_grad():
            for name, tensor in matching.saved_modules.items():
                module, _, parameter = name.rpartition(".")
                # A new Parameter, so that a tied partner keeps the old one.
                setattr(model.get_submodule(module), parameter, nn.Parameter(tensor.double()))
            for name, rows in matching.token_rows.items():
                model.get_submodule(name).weight[list(rows.indices)] = rows.rows.double()
        for name, lora in matching.items():
            model.get_submodule(name).register_forward_hook(_linear_hook(lora))
        for name, embedding in matching.embeddings.items():
            model.get_submodule(name).register_forward_hook(_embedding_hook(embedding))
        return self.output(model)


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return Tiny(tmp_path)


def _linear_hook(lora: LayerLora) -> Callable[..., torch.Tensor]:
    def hook(layer: Any, inputs: tuple[torch.Tensor], _: torch.Tensor) -> torch.Tensor:
        weight = layer.weight.T if type(layer).__name__ == "Conv1D" else layer.weight
        (part,) = lora.slices  # these models have no packed layers
        assert part is not None
        return linear(inputs[0], weight, layer.bias, part)

    return hook


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, part: ModuleLora
) -> torch.Tensor:
    """ModuleLora's semantics in float64."""
    a, b, s = part.a.double(), part.b.double(), part.scaling
    v = x @ a.T @ b.T
    if part.lora_bias is not None:
        v = v + part.lora_bias.double()
    y = x @ weight.T + s * v
    if part.magnitude is not None:
        y = y * part.magnitude.double() / (weight + s * b @ a).norm(dim=1)
    bias = bias if part.bias is None else part.bias.double()
    return y if bias is None else y + bias


def _embedding_hook(part: EmbeddingLora) -> Callable[..., torch.Tensor]:
    def hook(layer: Any, inputs: tuple[torch.Tensor], _: torch.Tensor) -> torch.Tensor:
        a, b, s = part.a.double(), part.b.double(), part.scaling
        e = layer.weight[inputs[0]] + s * a.T[inputs[0]] @ b.T
        if part.magnitude is not None:
            e = e * part.magnitude.double() / (layer.weight.T + s * b @ a).norm(dim=1)
        return e

    return hook


def random_module(name: str, k: int, n: int, rank: int = 4) -> ModuleLora:
    return ModuleLora(name, torch.randn(rank, k), torch.randn(n, rank), 2.0)


@pytest.fixture
def make_adapter() -> Callable[..., Adapter]:
    """An Adapter from ``name=(in_features, out_features)`` without any files."""
    from loraplex.adapters import AdapterSpec

    def build(modules: dict[str, tuple[int, int]], rank: int = 4, **parts: Any) -> Adapter:
        loras = {name: random_module(name, *sizes, rank) for name, sizes in modules.items()}
        return Adapter(AdapterSpec(r=rank), loras, path="test", **parts)

    return build
