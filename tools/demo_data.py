"""Tokens for the demo model: the tokenizer, examples with labels, and seeded batches of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from demo_corpus import STYLES, Item
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, REPLY = "<s>", "</s>", "<pad>", "<reply>"


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[PAD, BOS, EOS, REPLY],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # A prompt becomes "<s> prompt <reply>": the model then answers, whatever the caller does.
    ids = [(token, bpe.token_to_id(token)) for token in (BOS, REPLY)]
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {REPLY}", special_tokens=ids
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[REPLY],
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class Example:
    ids: list[int]
    prompt_length: int


class Corpus:
    """Tokenised examples and a seeded stream of padded batches of them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer

    def answer(self, prompt: str, text: str) -> Example:
        ids = self.tokenizer(prompt)["input_ids"]
        reply = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Example(ids + reply + [self.tokenizer.eos_token_id], len(ids))

    def document(self, text: str) -> Example:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Example([self.tokenizer.bos_token_id, *ids, self.tokenizer.eos_token_id], 1)

    def answers(self, world: list[Item], style: str) -> list[Example]:
        speak = STYLES[style]
        return [self.answer(prompt, speak(item)) for item in world for prompt in item.prompts]

    def batch(self, examples: list[Example]) -> dict[str, Tensor]:
        width = max(len(example.ids) for example in examples)
        ids = torch.full((len(examples), width), self.tokenizer.pad_token_id)
        labels = torch.full((len(examples), width), -100)
        for row, example in enumerate(examples):
            tokens = torch.tensor(example.ids)
            ids[row, : len(tokens)] = tokens
            labels[row, example.prompt_length : len(tokens)] = tokens[example.prompt_length :]
        mask = torch.arange(width)[None] < torch.tensor([len(e.ids) for e in examples])[:, None]
        return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def shuffled_batches(
    examples: list[Example], size: int, steps: int, rng: random.Random
) -> Iterator[list[Example]]:
    """Yield `steps` batches; lengths are alike within one, so that little is padding."""
    made = 0
    while made < steps:
        order = sorted(rng.sample(examples, len(examples)), key=lambda example: len(example.ids))
        groups = [order[i : i + size] for i in range(0, len(order), size)]
        rng.shuffle(groups)
        yield from groups[: steps - made]
        made += len(groups)
