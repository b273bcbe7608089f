"""Log-probabilities of each backend against float32 with merged weights, token by token."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sglang_parts import OWN, Part, vocabulary

PROMPT, NEW, ROUNDS = 40, 24, 3


def requests_of(part: Part) -> list[tuple[list[int], str | None]]:
    """Prompts, each with an adapter or none, in an order that mixes them."""
    generator = random.Random(11)
    names = [None, *part.adapters()]
    return [
        ([generator.randrange(4, vocabulary(part)) for _ in range(PROMPT)], name)
        for _ in range(ROUNDS)
        for name in names
    ]


def ask(engine: Any, part: Part) -> list[dict[str, Any]]:
    """What the engine says: tokens and log-probabilities, of prefill and of decode steps."""
    asked = requests_of(part)
    outputs = engine.generate(
        input_ids=[tokens for tokens, _ in asked],
        sampling_params={"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=0,
        lora_path=[name for _, name in asked],
    )
    answers = []
    for (tokens, name), output in zip(asked, outputs, strict=True):
        info = output["meta_info"]
        told = [entry[0] for entry in info["input_token_logprobs"][1:]]
        made = [entry[0] for entry in info["output_token_logprobs"]]
        new = list(output["output_ids"])
        answers.append({"adapter": name, "tokens": tokens + new, "logprobs": told + made})
    return answers


def judge(part: Part, answers: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row per backend: its distance from float32, and whether ours is within its own rules.

    Ours passes if its error is at most a quarter above the largest of SGLang's own backends (root
    mean square) and its largest at most twice theirs.
    """
    truth = Truth(part)
    rows = []
    for backend, given in answers.items():
        errors, effects = [], []
        for answer in given:
            right = truth.logprobs(answer["adapter"], answer["tokens"])
            errors.append(torch.tensor(answer["logprobs"]) - right)
            if answer["adapter"]:
                effects.append(right - truth.logprobs(None, answer["tokens"]))
        error, effect = torch.cat(errors), torch.cat(effects)
        rows.append({
            "part": part.name, "backend": backend, "values": error.numel(),
            "error_rms": float(error.square().mean().sqrt()),
            "error_max": float(error.abs().max()),
            "effect_of_adapters_rms": float(effect.square().mean().sqrt()),
        })  # fmt: skip
    own = [row for row in rows if row["backend"] in OWN or row["backend"] == "torch_native"]
    for row in rows:
        if row["backend"] == "loraplex" and own:
            row["is_right"] = bool(
                row["error_rms"] <= 1.25 * max(other["error_rms"] for other in own)
                and row["error_max"] <= 2 * max(other["error_max"] for other in own)
                and row["error_rms"] < 0.1 * row["effect_of_adapters_rms"]
            )
    return rows


class Truth:
    """The model in float32, with one adapter at a time merged into its weights."""

    def __init__(self, part: Part) -> None:
        from transformers import AutoModelForCausalLM

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(part.model, dtype=torch.float32)
        self.model = model.to(self.device).eval()
        # the engine rounds the weights to bfloat16, so these must be the rounded ones
        self.weights = {
            name: parameter.data.bfloat16().float()
            for name, parameter in self.model.named_parameters()
        }
        self.folders = part.adapters()
        self.merged: str | None = "nothing yet"

    @torch.no_grad()
    def logprobs(self, adapter: str | None, tokens: list[int]) -> torch.Tensor:
        """Log-probability of every token but the first."""
        self._merge(adapter)
        ids = torch.tensor([tokens], device=self.device)
        scores = self.model(ids).logits[0, :-1].double().log_softmax(-1)
        return scores.gather(1, ids[0, 1:, None])[:, 0].cpu()

    def _merge(self, adapter: str | None) -> None:
        if adapter == self.merged:
            return
        deltas = {} if adapter is None else dict(_deltas(Path(self.folders[adapter])))
        for name, parameter in self.model.named_parameters():
            weight = self.weights[name]
            if name in deltas:
                weight = weight + deltas.pop(name).to(weight)
            parameter.data.copy_(weight)
        assert not deltas, f"adapter weights that fit nothing: {sorted(deltas)[:3]}"
        self.merged = adapter


def _deltas(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." not in name:
            continue
        # the pools hold bfloat16 too
        a, b = (t.bfloat16().float() for t in (a, tensors[name.replace(".lora_A.", ".lora_B.")]))
        target = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        yield target, config["lora_alpha"] / config["r"] * (b @ a)
