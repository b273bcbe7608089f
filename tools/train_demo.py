"""Train the embedded demo model and its adapters on a CPU in minutes, from `demo_corpus.py` alone.

    python tools/train_demo.py --out src/loraplex/demo/data

Writes the base model (fp16), the tokenizer, one PEFT folder per adapter, and `README.md` with the
command, losses, held-out accuracy and seconds. Held out: a tenth of the stories, meetings and
trips, in every style, so that the accuracy measured on them says whether an adapter learnt its
style rather than its sentences.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from demo_corpus import STYLES, Item, items
from demo_data import Corpus, Example, shuffled_batches, train_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NAME = "loraplex-demo"  # of the base model: its folder, and what the adapters say they belong to
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
COMBINED = ("story", "meeting", "trip")


@dataclass(frozen=True)
class Recipe:
    """How one adapter is made."""

    style: str
    config: dict[str, Any]
    steps: int = 280
    learning_rate: float = 4e-3


RECIPES = (
    Recipe("shout", {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION}, steps=480),
    Recipe("pirate", {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION + MLP}),
    Recipe(
        "telegram",
        {
            "r": 16,
            "lora_alpha": 8,
            "use_rslora": True,
            "target_modules": ["q_proj", "v_proj", *MLP],
        },
    ),
    Recipe(
        "french",
        {
            "r": 16,
            "lora_alpha": 32,
            "target_modules": ATTENTION + MLP,
            "rank_pattern": {"down_proj": 24, "k_proj": 5},
            "alpha_pattern": {"k_proj": 5, r"layers\.0\.mlp\.down_proj": 24},
        },
        steps=400,
    ),
    Recipe("json", {"r": 32, "lora_alpha": 32, "target_modules": MLP}, steps=400),
    Recipe(
        "emoji", {"r": 12, "lora_alpha": 24, "target_modules": ["q_proj", "o_proj", "down_proj"]}
    ),
    Recipe(
        "whisper",
        {"r": 8, "lora_alpha": 16, "use_dora": True, "target_modules": ["q_proj", "v_proj", *MLP]},
    ),
)


def is_held_out(item: Item) -> bool:
    return item.family in COMBINED and zlib.crc32(item.key.encode()) % 10 == 0


def make_model(tokenizer: PreTrainedTokenizerFast, hidden: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def fit(
    model: torch.nn.Module,
    corpus: Corpus,
    examples: list[Example],
    *,
    steps: int,
    size: int,
    learning_rate: float,
    seed: int,
    label: str,
) -> float:
    """Train with AdamW, warm-up and cosine decay; return the mean loss of the last 20 steps."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(
        parameters, lr=learning_rate, weight_decay=0.01, betas=(0.9, 0.98)
    )
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimiser,
        [
            torch.optim.lr_scheduler.LinearLR(optimiser, 0.05, total_iters=warm),
            torch.optim.lr_scheduler.CosineAnnealingLR(
                optimiser, steps - warm, eta_min=learning_rate / 50
            ),
        ],
        milestones=[warm],
    )
    model.train()
    losses: list[float] = []
    start = time.perf_counter()
    for step, group in enumerate(shuffled_batches(examples, size, steps, random.Random(seed))):
        loss = model(**corpus.batch(group)).loss
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
        if step % 100 == 99 or step == steps - 1:
            seconds = time.perf_counter() - start
            recent = sum(losses[-20:]) / len(losses[-20:])
            print(
                f"{label}: step {step + 1}/{steps} loss {recent:.4f} ({seconds:.0f} s)", flush=True
            )
    return sum(losses[-20:]) / len(losses[-20:])


@torch.no_grad()
def exact_share(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, world: list[Item], style: str
) -> float:
    """Share of the items whose first wording gets exactly the expected text, decoded greedily."""
    model.eval()
    hits = 0
    for start in range(0, len(world), 32):
        group = world[start : start + 32]
        inputs = tokenizer([item.prompts[0] for item in group], return_tensors="pt", padding=True)
        out = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=100,
            do_sample=False,
        )
        texts = tokenizer.batch_decode(
            out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        hits += sum(text == STYLES[style](item) for text, item in zip(texts, group, strict=True))
    return hits / len(world)


def halve(folder: Path, name: str) -> None:
    """Store the float tensors of one safetensors file as fp16."""
    tensors = load_file(folder / name)
    save_file(
        {
            key: tensor.half() if tensor.is_floating_point() else tensor
            for key, tensor in tensors.items()
        },
        folder / name,
        metadata={"format": "pt"},
    )


def load_base(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def train_base(
    corpus: Corpus, learnt: list[Item], folder: Path, args: argparse.Namespace
) -> tuple[float, float]:
    start = time.perf_counter()
    torch.manual_seed(args.seed)
    model = make_model(corpus.tokenizer, args.hidden)
    # The base answers plainly. Of the other styles it has only read: sentences, most of them under
    # the plain one that they belong to, and never a question before them. So an adapter need not
    # teach French, only that it is to be spoken.
    examples = corpus.answers(learnt, "plain") * 2
    for style, speak in STYLES.items():
        if style != "plain":
            examples += [corpus.document(speak(item)) for item in learnt[::2]]
            examples += [corpus.document(f"{item.english}\n{speak(item)}") for item in learnt]
    loss = fit(
        model,
        corpus,
        examples,
        steps=args.base_steps,
        size=64,
        learning_rate=3e-3,
        seed=args.seed,
        label="base",
    )
    model.generation_config.update(do_sample=False, max_new_tokens=80)
    model.half().save_pretrained(folder)
    corpus.tokenizer.save_pretrained(folder)
    return loss, time.perf_counter() - start


def train_adapter(
    recipe: Recipe, corpus: Corpus, learnt: list[Item], base: Path, out: Path, seed: int
) -> tuple[float, float]:
    start = time.perf_counter()
    torch.manual_seed(seed)
    config = LoraConfig(task_type="CAUSAL_LM", **recipe.config)
    model = get_peft_model(load_base(base), config)
    loss = fit(
        model,
        corpus,
        corpus.answers(learnt, recipe.style),
        steps=recipe.steps,
        size=32,
        learning_rate=recipe.learning_rate,
        seed=seed,
        label=recipe.style,
    )
    config.base_model_name_or_path = NAME
    model.save_pretrained(str(out))
    (out / "README.md").unlink(missing_ok=True)
    # PEFT keeps the targets in a set, whose order changes from run to run.
    saved = json.loads((out / "adapter_config.json").read_text())
    saved["target_modules"].sort()
    (out / "adapter_config.json").write_text(json.dumps(saved, indent=2) + "\n")
    halve(out, "adapter_model.safetensors")
    return loss, time.perf_counter() - start


def describe(recipe: Recipe) -> str:
    config = recipe.config
    parts = [f"rank {config['r']}, alpha {config['lora_alpha']}"]
    parts += [name for name in ("use_rslora", "use_dora") if config.get(name)]
    parts += [f"{n} {config[n]}" for n in ("rank_pattern", "alpha_pattern") if n in config]
    parts.append("on " + ", ".join(config["target_modules"]))
    return "; ".join(parts)


def write_readme(
    args: argparse.Namespace, rows: list[str], seconds: float, learnt: int, held_out: int
) -> None:
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    versions = ", ".join(f"{m.__name__} {m.__version__}" for m in (torch, transformers, peft))
    table = "\n".join(rows)
    (args.out / "README.md").write_text(f"""# The embedded model

A Llama of about a million parameters and adapters on it, all trained by

    python tools/train_demo.py --out src/loraplex/demo/data --seed {args.seed} \\
        --hidden {args.hidden} --vocab {args.vocab} \\
        --base-steps {args.base_steps} --threads {args.threads}

in {seconds:.0f} s ({versions}); {size / 1e6:.1f} MB in fp16.
The text is made by `tools/demo_corpus.py`: {learnt} questions to learn, each in two or more
wordings and in every style, and {held_out} combinations that no model saw. *Held out* is the share
of those whose greedy answer is exactly the expected one; *loss* is the mean of the last 20 steps.

| style | made with | loss | held out | seconds |
| --- | --- | ---: | ---: | ---: |
{table}
""")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--base-steps", type=int, default=1500)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--only", nargs="*", default=[r.style for r in RECIPES], help="adapters to train"
    )
    parser.add_argument(
        "--keep-base", action="store_true", help="use the base model already in --out"
    )
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    began = time.perf_counter()
    base, adapters = args.out / NAME, args.out / "adapters"
    world = items()
    learnt = [item for item in world if not is_held_out(item)]
    held_out = [item for item in world if is_held_out(item)]
    rows: list[str] = []

    def report(name: str, recipe: str, model: torch.nn.Module, loss: float, seconds: float) -> None:
        share = exact_share(model, corpus.tokenizer, held_out, name)
        rows.append(f"| {name} | {recipe} | {loss:.4f} | {100 * share:.0f} % | {seconds:.0f} |")
        print(rows[-1], flush=True)

    if args.keep_base:
        corpus = Corpus(PreTrainedTokenizerFast.from_pretrained(base))
    else:
        shutil.rmtree(base, ignore_errors=True)
        texts = [speak(item) for speak in STYLES.values() for item in learnt]
        texts += [prompt for item in learnt for prompt in item.prompts] * 4
        corpus = Corpus(train_tokenizer(texts, args.vocab))
        loss, seconds = train_base(corpus, learnt, base, args)
        report("plain", "the base model", load_base(base), loss, seconds)
    for recipe in RECIPES:
        if recipe.style not in args.only:
            continue
        folder = adapters / recipe.style
        shutil.rmtree(folder, ignore_errors=True)
        loss, seconds = train_adapter(recipe, corpus, learnt, base, folder, args.seed + 1)
        model = PeftModel.from_pretrained(load_base(base), str(folder))
        report(recipe.style, describe(recipe), model, loss, seconds)
    if not args.keep_base and len(args.only) == len(RECIPES):
        write_readme(args, rows, time.perf_counter() - began, len(learnt), len(held_out))


if __name__ == "__main__":
    sys.exit(main())
