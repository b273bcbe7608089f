#!/usr/bin/env python3
"""One vLLM engine in a process of its own, for vllm_e2e.py: starts, then answers over a socket."""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import random
import time
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIZES = [1, 2, 4, 8, 16, 32, 64]  # decode batches that get a CUDA graph
HIDDEN, FFN, KV, LAYERS, VOCAB = 4096, 14336, 1024, 32, 128256
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
    "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCAB, "hidden_act": "silu",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "bos_token_id": 128000, "eos_token_id": 128001,
    "torch_dtype": "bfloat16", "rope_theta": 500000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
MODULES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV), "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, FFN), "mlp.up_proj": (HIDDEN, FFN), "mlp.down_proj": (FFN, HIDDEN),
}  # fmt: skip
FOLDERS = 8  # adapters on disk; more than that share files, not memory
DEMO_ADAPTERS = ["emoji", "french", "json", "pirate", "shout", "telegram"]  # vLLM has no DoRA


def demo_folder() -> Path:
    return ROOT / "src" / "loraplex" / "demo" / "data"


# What lies on disk


def write_model(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(LLAMA_8B))


def write_adapters(path: Path, rank: int) -> None:
    """Random PEFT folders, made on the CPU; B is small but not zero, so that outputs change."""
    import torch
    from safetensors.torch import save_file

    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
        "target_modules": [name.split(".")[1] for name in MODULES], "lora_dropout": 0.0,
        "bias": "none", "base_model_name_or_path": "", "fan_in_fan_out": False,
    }  # fmt: skip
    for number in range(FOLDERS):
        folder = path / f"r{rank}_{number}"
        if (folder / "adapter_config.json").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(1000 * rank + number)
        tensors = {}
        for name, (k, n) in MODULES.items():
            a = torch.randn(LAYERS, rank, k, generator=generator) * k**-0.5
            b = torch.randn(LAYERS, n, rank, generator=generator) * 0.02
            for layer in range(LAYERS):
                key = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{key}.lora_A.weight"] = a[layer].bfloat16()
                tensors[f"{key}.lora_B.weight"] = b[layer].bfloat16()
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config))


class Engine:
    """Serves the parent's requests on one vLLM engine."""

    def __init__(self, args: argparse.Namespace) -> None:
        import vllm

        self.args, self.version, self.vllm = args, vllm.__version__, vllm
        self.trace = f"{args.work}/trace_{args.engine}"
        self.rng = random.Random(0)
        is_demo = args.engine.endswith("demo")
        model = demo_folder() / "loraplex-demo" if is_demo else f"{args.work}/model"
        options: dict[str, Any] = {"load_format": "auto" if is_demo else "dummy"}
        if args.rank:
            options |= {"enable_lora": True, "max_loras": args.slots, "max_lora_rank": args.rank}
        if is_demo and args.demo_backend:
            options["attention_config"] = {"backend": args.demo_backend}
        start = time.time()
        self.llm = vllm.LLM(
            model=str(model), skip_tokenizer_init=True, dtype="bfloat16", seed=0,
            max_model_len=256 if is_demo else 2048, enable_prefix_caching=False,
            gpu_memory_utilization=0.05 if is_demo else 0.2, max_num_seqs=args.max_seqs,
            kv_cache_memory_bytes=int((0.5 if is_demo else args.kv_gib) * 2**30),
            tensor_parallel_size=args.tp, compilation_config={"cudagraph_capture_sizes": SIZES},
            profiler_config={"profiler": "torch", "torch_profiler_dir": self.trace,
                             "torch_profiler_with_stack": False},
            **options,
        )  # fmt: skip
        self.ready_s = time.time() - start

    def lora(self, adapter: int | str | None) -> Any:
        from vllm.lora.request import LoRARequest

        if adapter is None:
            return None
        if isinstance(adapter, str):
            number = DEMO_ADAPTERS.index(adapter)
            return LoRARequest(adapter, number + 1, str(demo_folder() / "adapters" / adapter))
        folder = f"{self.args.work}/adapters/r{self.args.rank}_{adapter % FOLDERS}"
        return LoRARequest(f"a{adapter}", adapter + 1, folder)

    def run(self, case: str, batch: int, prompt: int, new: int) -> float:
        """Seconds of one batch of random prompts."""
        prompts = [
            {"prompt_token_ids": [self.rng.randrange(1000, 127000) for _ in range(prompt)]}
            for _ in range(batch)
        ]
        params = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        adapters = [None if case == "none" else 0 if case == "one" else i for i in range(batch)]
        chosen = [self.lora(a if a is None else a % self.args.slots) for a in adapters]
        start = time.perf_counter()
        outputs = self.llm.generate(
            prompts, params, lora_request=chosen if self.args.rank else None, use_tqdm=False
        )
        seconds = time.perf_counter() - start
        assert [len(o.outputs[0].token_ids) for o in outputs] == [new] * batch
        return seconds

    def score(self, rows: list[tuple[list[int], str | None]], new: int) -> list[dict[str, Any]]:
        """Greedy tokens, and log-probabilities of them and of the prompt's tokens, per row."""
        params = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=0,
            prompt_logprobs=0,
        )  # fmt: skip
        outputs = self.llm.generate(
            [{"prompt_token_ids": tokens} for tokens, _ in rows], params,
            lora_request=[self.lora(adapter) for _, adapter in rows], use_tqdm=False,
        )  # fmt: skip
        found = []
        for (tokens, _), output in zip(rows, outputs, strict=True):
            prompt = [
                at[t].logprob for t, at in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
            ]
            reply = list(output.outputs[0].token_ids)
            said = [at[t].logprob for t, at in zip(reply, output.outputs[0].logprobs, strict=True)]
            found.append({"prompt": prompt, "tokens": reply, "reply": said})
        return found

    def profile(self, case: str) -> list[tuple[str, float, int]]:
        """Name, milliseconds and launches of the costliest GPU kernels of 8 decode steps."""
        self.llm.start_profile()
        self.run(case, 64, 128, 9)
        self.llm.stop_profile()
        time.sleep(1)
        found: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0])
        traces = sorted(Path(self.trace).glob("*.json*"), key=lambda p: p.stat().st_mtime)
        if traces:
            opener = gzip.open if traces[-1].suffix == ".gz" else open
            with opener(traces[-1], "rt") as file:
                for event in json.load(file)["traceEvents"]:
                    if event.get("cat") == "kernel":
                        found[event["name"]][0] += event["dur"] / 1e3
                        found[event["name"]][1] += 1
        ranked = sorted(found.items(), key=lambda item: -item[1][0])
        return [(name[:100], round(ms, 3), int(count)) for name, (ms, count) in ranked[:16]]


def serve(args: argparse.Namespace) -> None:
    """Answer the parent until it hangs up."""
    with Client(args.address, "AF_UNIX") as parent:
        engine = Engine(args)
        parent.send({"version": engine.version, "ready_s": engine.ready_s})
        while True:
            try:
                name, values = parent.recv()
            except EOFError:
                return
            parent.send(getattr(engine, name)(*values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--engine", "--address", "--work"):
        parser.add_argument(name, required=True)
    for name in ("--rank", "--slots", "--max-seqs", "--tp"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--kv-gib", type=float, required=True)
    parser.add_argument("--demo-backend", default="")
    serve(parser.parse_args())


if __name__ == "__main__":
    main()
