"""What has to be there before SGLang can be measured: models, adapters, kernels, the plugin."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sglang_parts import (
    LLAMA,
    MODULES,
    TINY,
    WIDE,
    Part,
    captured_sizes,
    linear_shapes,
    packed_layers,
)

SOURCE = Path(__file__).resolve().parents[2] / "src"
if str(SOURCE) not in sys.path:
    sys.path.insert(0, str(SOURCE))

GROUP = "sglang.srt.plugins"
# A release patched so that it runs on a machine without the rest of its dependencies.
PATCHES = (
    # adapters are read with the format of the base weights, which are dummies here
    ("srt/lora/lora.py", "ModelLoader(self.load_config)", "ModelLoader(LoadConfig())"),
    # CUTLASS's Python package is imported on every GPU, for a kernel that only Blackwell takes
    ("srt/layers/dual_gemm.py", "import is_cuda\n", "import is_sm100_supported as is_cuda\n"),
)
NOTEBOOK = "class HTML:\n    def __init__(self, *_): ...\n\n\ndef display(*_): ...\n"
# SGLang compiles these when they are first used; here at once, beside each other.
KERNELS = """
import torch
from sglang.kernels.jit.utils import parallel_compile
from sglang.kernels.ops.activation.activation import activation_module
from sglang.kernels.ops.attention import rope
from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module as clamp
from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module as kvcache
from sglang.kernels.ops.moe.moe_align import _jit_moe_align_module as align
kind, flags = torch.bfloat16, ("pad_expert_ids", "map_invalid_experts_to_sentinel")
parallel_compile([
    *(lambda row=row: kvcache(row, row, 0) for row in (2048, 512)),
    lambda: activation_module(kind),
    lambda: rope._jit_fused_rope_module(True, 128, kind, kind),
    *(lambda size=size: clamp(size) for size in (torch.int64, torch.int32)),
    *(lambda chosen=chosen: align(torch.int32, **dict.fromkeys(chosen, True))
      for chosen in ((), flags[:1], flags[1:], flags)),
])
"""
# The demo's small heads have kernels of their own; where they do not compile, the others still do.
DEMO_KERNELS = """
from sglang.kernels.jit.utils import parallel_compile
from sglang.kernels.ops.attention import rope
from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module as kvcache
parallel_compile([rope._jit_rotary_embedding_module, lambda: kvcache(64, 64, 0)])
"""


def prepare(
    folder: Path, ranks: list[int], slots: int, parts: list[Part], *, is_tiny: bool, is_bare: bool
) -> None:
    """Write everything under ``folder``; ``is_bare`` patches an SGLang installed without deps.

    Kernels of these parts, SGLang's and ours, are compiled meanwhile, many at a time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if is_bare:
        patch_sglang()
    config = TINY if is_tiny else LLAMA
    wide = WIDE | ({"hidden_size": 256, "intermediate_size": 512} if is_tiny else {})
    write_config(folder / "llama", config)
    write_config(folder / "wide", wide)
    codes = [] if is_tiny else [KERNELS, DEMO_KERNELS, *codes_of_ours(parts)]
    jobs = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    write_plugin(folder / "plugin")
    for rank in ranks:
        for number in range(slots - 1):
            write_adapter(folder / f"r{rank}_{number}", config, rank, number, 1.0)
    write_model(folder / "wide", wide)
    for number, rank in enumerate((16, 64, 12, 8)):
        write_adapter(folder / f"wide_{number}", wide, rank, number, 0.3)
    print("models and adapters written", flush=True)
    if jobs:
        print("kernels compiled, exits", [job.wait() for job in jobs], flush=True)


def codes_of_ours(parts: list[Part]) -> list[str]:
    """A program for each layer of each part's model that compiles our kernels for it."""
    calls: dict[tuple[Any, ...], set[int]] = {}
    for part in parts:
        config = json.loads(Path(part.model, "config.json").read_text())
        for slices, in_features in packed_layers(config, part.tensor_parallel).values():
            layer = (slices, in_features, part.rank, part.slots)
            calls.setdefault(layer, set()).update(*captured_sizes(part))
    here = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
    return [
        here + f"import sglang_setup as s; s.compile_ours(*{layer!r}, {sorted(sizes)!r})"
        for layer, sizes in calls.items()
    ]


def compile_ours(
    slices: tuple[int, ...], in_features: int, rank: int, slots: int, sizes: list[int]
) -> None:
    """Run one layer at every size that is captured, which fills Triton's cache.

    In a graph too: there a kernel may be another one, since it knows more (loraplex.settled).
    """
    import loraplex as lp

    make: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    weight = torch.zeros(sum(slices), in_features, **make)
    table = lp.AdapterTable.from_pools(
        torch.zeros(slots, len(slices) * rank, in_features, **make),
        torch.zeros(slots, sum(slices), rank, **make),
        slices,
    )
    for tokens in sizes:
        routing = lp.Routing.from_indices(
            torch.arange(tokens, device="cuda") % slots, num_adapters=slots
        )
        x = torch.zeros(tokens, in_features, **make)
        lp.lora_linear(x, weight, table, routing)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            lp.lora_linear(x, weight, table, routing)
    torch.cuda.synchronize()


def patch_sglang() -> None:
    """Edit the unpacked release; doing it twice changes nothing."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("SGLang is not on the path")
    package = Path(spec.submodule_search_locations[0])
    for name, old, new in PATCHES:
        text = (package / name).read_text()
        if new not in text and old not in text:
            raise SystemExit(f"{name} is not as expected: it has no {old!r}")
        (package / name).write_text(text.replace(old, new))
    if importlib.util.find_spec("IPython") is None:
        stub = package.parent / "IPython"
        stub.mkdir()
        (stub / "__init__.py").write_text("")
        (stub / "display.py").write_text(NOTEBOOK)


def write_plugin(folder: Path) -> None:
    """The entry point of a checkout that is on the path but not installed."""
    if "loraplex" in {point.name for point in metadata.entry_points(group=GROUP)}:
        return
    info = folder / "loraplex-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loraplex\nVersion: 0\n")
    target = "loraplex.engines.sglang.plugin:register"
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nloraplex = {target}\n")


def write_config(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Random weights of a size that keeps activations near one."""
    write_config(folder, config)
    generator = torch.Generator().manual_seed(3)

    def draw(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).bfloat16()

    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    weights = {
        "model.embed_tokens.weight": draw(vocabulary, hidden) * hidden**0.5,
        "lm_head.weight": draw(vocabulary, hidden) * 2,
        "model.norm.weight": torch.ones(hidden).bfloat16(),
    }
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{base}.{name}.weight"] = torch.ones(hidden).bfloat16()
        for name, (out_features, in_features) in linear_shapes(config).items():
            weights[f"{base}.{name}.weight"] = draw(out_features, in_features)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_adapter(
    folder: Path, config: dict[str, Any], rank: int, seed: int, size_of_b: float
) -> None:
    """A random adapter on all linear layers, as PEFT saves one.

    Dummy base weights are so small that only a large B makes an adapter change any output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1000 * rank + seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (out_features, in_features) in linear_shapes(config).items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn(rank, in_features, device=device, generator=generator)
            b = torch.randn(out_features, rank, device=device, generator=generator)
            tensors[f"{prefix}.lora_A.weight"] = (a / in_features**0.5).bfloat16().cpu()
            tensors[f"{prefix}.lora_B.weight"] = (b * size_of_b / rank**0.5).bfloat16().cpu()
    save_file(tensors, folder / "adapter_model.safetensors")
    content = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
        "lora_dropout": 0.0, "bias": "none", "target_modules": list(MODULES),
        "base_model_name_or_path": "dummy", "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(content))
