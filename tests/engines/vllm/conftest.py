"""vLLM's LoRA layers on the CPU: the sources of releases with stand-ins around them, and fakes.

The sources come from the source distribution through pip, once; where pip cannot reach an index,
tests on them are skipped with a warning, and the fakes below still run.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import operator
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from loraplex.engines.vllm.adopt import LINEAR, adopt, make_plan

CACHE = Path.home() / ".cache" / "loraplex-tests" / "vllm"
FIRST = "0.26.0"
NEWEST = "newest"
FAKE = "fake"


# Sources of a release


def package_of(version: str) -> Path:
    """The folder ``vllm`` of one release; skips a test that cannot have it, loudly."""
    found = find_package(version)
    if isinstance(found, str):
        warnings.warn(f"vLLM's sources are not tested: {found}", stacklevel=2)
        pytest.skip(found)
    return found


@functools.cache
def find_package(version: str) -> Path | str:
    """That folder, installed or of the source distribution, which is kept; or why there is none."""
    if version == NEWEST:
        done = pip("install", "vllm", "--no-deps", "--dry-run", "--ignore-installed",
                   "--no-build-isolation", "--only-binary=:all:", "--report", "-")  # fmt: skip
        if done.returncode:
            return f"pip finds no release: {_last_error(done.stderr)}"
        return find_package(json.loads(done.stdout)["install"][0]["metadata"]["version"])
    installed = importlib.util.find_spec("vllm")
    if installed and installed.origin and metadata.version("vllm").partition("+")[0] == version:
        return Path(installed.origin).parent
    folder = CACHE / version
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as room:
        # pip unpacks it, then asks it for metadata, which needs much that is not here and may
        # fail: what it has unpacked is all that is wanted
        done = pip("download", f"vllm=={version}", "--no-deps", "--no-binary=:all:", "--no-clean",
                   "--no-build-isolation", "-d", room, TMPDIR=room)  # fmt: skip
        packages = sorted(Path(room).glob("*/vllm*/vllm/lora"))
        if not packages:
            return f"pip cannot download vllm {version}: {_last_error(done.stderr)}"
        try:
            packages[0].parent.rename(folder)
        except OSError:
            assert folder.is_dir()  # another process was quicker
    return folder


def pip(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", *arguments, "-q", "--disable-pip-version-check"]
    env = {"PIP_RETRIES": "1", **os.environ, **environment}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=env
    )


def _last_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line.lower()]
    return (lines or ["no reason given"])[-1][:200]


@pytest.fixture(scope="session")
def vllm_package() -> Callable[[str], Path]:
    """The folder ``vllm`` of a release."""
    return package_of


# Base layers, named like vLLM's, since the plugin goes by the name


class UnquantizedLinearMethod:
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.weight, bias)


class Fp8LinearMethod(UnquantizedLinearMethod):
    """A base layer that is not x @ weight.T, as quantised ones are not."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return 2 * super().apply(layer, x, bias)


class LinearBase(torch.nn.Module):
    """One rank's part of a linear layer; ``output_sizes`` are those of all ranks together."""

    def __init__(
        self, in_features: int, output_sizes: Sequence[int], *, bias: bool = False,
        tp: tuple[int, int] = (1, 0), method: type = UnquantizedLinearMethod,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        super().__init__()
        self.tp_size, self.tp_rank = tp
        splits_rows = isinstance(self, RowParallelLinear)
        replicated = isinstance(self, ReplicatedLinear)
        out_parts = 1 if splits_rows or replicated else self.tp_size
        self.input_size = in_features
        self.input_size_per_partition = in_features // (self.tp_size if splits_rows else 1)
        self.output_sizes = list(output_sizes)
        self.output_size = sum(output_sizes)
        self.output_size_per_partition = self.output_size // out_parts
        shape = (self.output_size_per_partition, self.input_size_per_partition)
        weight = torch.randn(shape, dtype=dtype, device=device) / in_features**0.5
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = torch.randn(shape[0], dtype=dtype, device=device) if bias else None
        self.quant_method = method()
        self.skip_bias_add = self.gather_output = self.reduce_results = False
        self.return_bias = self.input_is_parallel = True
        self.prefix = "layer"

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.quant_method.apply(self, x, self.bias), None


ReplicatedLinear: Any = type("ReplicatedLinear", (LinearBase,), {})
ColumnParallelLinear: Any = type("ColumnParallelLinear", (LinearBase,), {})
MergedColumnParallelLinear: Any = type("MergedColumnParallelLinear", (ColumnParallelLinear,), {})
RowParallelLinear: Any = type("RowParallelLinear", (LinearBase,), {})


class QKVParallelLinear(ColumnParallelLinear):
    """q, k and v of whole heads; ``output_sizes`` are q, k, v of all ranks."""

    head_size = 8

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        q, k, _ = self.output_sizes
        self.total_num_heads, self.total_num_kv_heads = q // 8, k // 8
        self.num_heads, self.num_kv_heads = q // 8 // self.tp_size, k // 8 // self.tp_size
        self.num_kv_head_replicas = 1


class GateLinear(ReplicatedLinear):
    """A subclass with a forward of its own."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x)[0].float(), None


BASES = SimpleNamespace(
    ReplicatedLinear=ReplicatedLinear, ColumnParallelLinear=ColumnParallelLinear,
    MergedColumnParallelLinear=MergedColumnParallelLinear, QKVParallelLinear=QKVParallelLinear,
    RowParallelLinear=RowParallelLinear, GateLinear=GateLinear,
    Fp8LinearMethod=Fp8LinearMethod, UnquantizedLinearMethod=UnquantizedLinearMethod,
)  # fmt: skip


# vLLM's LoRA layers from a release, with stand-ins for what they import


def _stand_ins() -> dict[str, dict[str, Any]]:
    """What the layers' files import, and from where."""
    unused: Any = Any
    return {
        "transformers": {"PretrainedConfig": unused, "PreTrainedConfig": unused},
        "vllm": {"envs": SimpleNamespace(VLLM_LORA_ENABLE_DUAL_STREAM=False)},
        "vllm.config": {"get_current_vllm_config": unused},
        "vllm.config.lora": {"LoRAConfig": unused},
        "vllm.distributed": {
            "split_tensor_along_last_dim": unused,
            # a test joins the ranks' parts itself
            "tensor_model_parallel_all_gather": lambda x: x,
            "tensor_model_parallel_all_reduce": lambda x: x,
        },
        "vllm.distributed.utils": {"divide": operator.floordiv},
        "vllm.forward_context": {
            "ForwardContext": unused, "get_forward_context": unused,
            "is_forward_context_available": unused,
        },
        "vllm.model_executor.custom_op": {"maybe_get_oot_by_class": lambda one: one},
        "vllm.model_executor.layers.linear": {
            **vars(BASES), "LinearBase": LinearBase, "QuantizeMethodBase": UnquantizedLinearMethod
        },
        "vllm.platforms": {"current_platform": SimpleNamespace(can_update_inplace=lambda: True)},
        "vllm.utils.multi_stream_utils": {"maybe_execute_in_parallel": unused},
        "vllm.utils.torch_utils": {"direct_register_custom_op": lambda **_: None},
        "vllm.lora.layers.utils": {
            "_get_lora_aux_cuda_stream": unused,
            "_get_lora_device": lambda base: base.weight.device,
            "_fully_sharded_can_replace": lambda function: function,
            "_not_fully_sharded_can_replace": lambda function: function,
        },
    }  # fmt: skip


LAYER_FILES = (
    "base", "base_linear", "column_parallel_linear", "row_parallel_linear", "replicated_linear",
)  # fmt: skip


@functools.cache
def load_layers(version: str) -> SimpleNamespace:
    """Every class of a release's layers for linear modules.

    The files are loaded under a name of their own in place of ``vllm``, so that an installed vLLM,
    or its absence, is left alone.
    """
    package = package_of(version)
    home = f"vllm_{version.replace('.', '_')}_on_stand_ins"

    def rename(text: str) -> str:
        renamed = re.sub(r"^from vllm\b", f"from {home}", text, flags=re.MULTILINE)
        return renamed.replace("from transformers import", f"from {home}.transformers import")

    for name, content in _stand_ins().items():
        module = ModuleType(f"{home}.{name}".replace(f"{home}.vllm", home))
        vars(module).update(content, __path__=[])
        sys.modules[module.__name__] = module
    classes: dict[str, Any] = {}
    for stem in LAYER_FILES:
        path = package / "lora" / "layers" / f"{stem}.py"
        module = ModuleType(f"{home}.lora.layers.{stem}")
        module.__package__, module.__file__ = f"{home}.lora.layers", str(path)
        sys.modules[module.__name__] = module
        exec(compile(rename(path.read_text("utf-8")), str(path), "exec"), vars(module))
        classes |= {k: v for k, v in vars(module).items() if k.endswith("LoRA")}
    return SimpleNamespace(**classes)


# The same in short, for where no sources are to be had


class FakeWithLoRA(torch.nn.Module):
    """A LoRA layer with vLLM's memory layout, on one rank, its slices those of ``output_sizes``."""

    has_parts = False

    def __init__(self, base: LinearBase) -> None:
        super().__init__()
        self.base_layer = base
        self.output_slices = tuple(base.output_sizes) if self.has_parts else (base.output_size,)
        self.n_slices = len(self.output_slices)
        self._enable_aux_cuda_stream = True

    def create_lora_weights(self, slots: int, config: Any) -> None:
        weight, rank = self.base_layer.weight, config.max_lora_rank
        self.lora_a_stacked = tuple(
            weight.new_empty(slots, 1, rank, weight.shape[1]) for _ in self.output_slices
        )
        self.lora_b_stacked = tuple(
            weight.new_empty(slots, 1, width, rank) for width in self.output_slices
        )

    def reset_lora(self, index: int) -> None:
        for tensor in (*self.lora_a_stacked, *self.lora_b_stacked):
            tensor[index] = 0

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        self.reset_lora(index)
        pairs = zip(lora_a, lora_b, strict=True) if self.has_parts else [(lora_a, lora_b)]
        for s, (a, b) in enumerate(pairs):
            if a is not None:
                self.lora_a_stacked[s][index, 0, : a.shape[0]] = a
                self.lora_b_stacked[s][index, 0, :, : b.shape[1]] = b

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        assert not self._enable_aux_cuda_stream
        output = self.base_layer.quant_method.apply(self.base_layer, x, bias)
        return self._apply_lora_to_output(x, output)

    def _apply_lora_to_output(self, x: Tensor, output: Tensor) -> Tensor:
        raise AssertionError("a layer ran on vLLM's own path")

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.apply(x, self.base_layer.bias), None


FAKES = SimpleNamespace(
    **{
        kind: type(kind, (FakeWithLoRA,), {"has_parts": kind.startswith("Merged")})
        for kind in LINEAR
    }
)


# A manager and its Punica wrapper, as far as the plugin goes


class Meta:
    """``LoRAKernelMeta``: says what it was told last."""

    def __init__(self) -> None:
        self.no_lora_flag_cpu = torch.tensor([False])
        self.told: list[int] | None = None

    def _reset(self) -> None:
        self.no_lora_flag_cpu.fill_(False)
        self.told = None


class PunicaWrapperGPU:
    """Named like vLLM's; notes the mappings that reach vLLM's own path."""

    def __init__(self, max_tokens: int, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._token_lora_indices = torch.full((max_tokens,), 77)
        self._sampler_indices = torch.full((max_tokens,), 77)
        self._sampler_indices_padded = torch.full((max_tokens,), 77)
        self._embeddings_indices = torch.full((2, max_tokens), 77)
        self.indices_len: list[int | None] = [None] * 4
        self.is_prefill = False
        self.token_mapping_meta, self.prompt_mapping_meta = Meta(), Meta()
        self.own_calls: list[Any] = []

    def update_metadata(
        self, mapping: Any, lora_index_to_id: Any, max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        self.own_calls.append(mapping)
        self.token_mapping_meta.told = list(mapping.index_mapping)

    def add_lora_linear(self, *args: Any, **options: Any) -> None:
        raise AssertionError("a layer ran on vLLM's own path")


class Manager:
    """``LoRAModelManager`` with given layers: slots, and the mapping of a step."""

    def __init__(self, modules: dict[str, Any], slots: int, dtype: torch.dtype,
                 max_tokens: int = 200, device: torch.device | str = "cpu",
                 mapping_class: Any = None) -> None:  # fmt: skip
        self.modules, self.lora_slots = modules, slots
        self.lora_config = SimpleNamespace(lora_dtype=dtype, max_loras=slots)
        wrapper: Any = PunicaWrapperGPU(max_tokens, device)
        self.punica_wrapper_mapping = {"language_model": wrapper}
        self._last_mapping: Any = None
        for module in modules.values():
            module.punica_wrapper = wrapper

    @property
    def wrapper(self) -> Any:
        return self.punica_wrapper_mapping["language_model"]


def config_of(dtype: torch.dtype) -> SimpleNamespace:
    """``VllmConfig``, as far as the plugin reads it."""
    return SimpleNamespace(model_config=SimpleNamespace(dtype=dtype), additional_config={})


def make_layer(version: str, kind: str, base: LinearBase, slots: int, max_rank: int) -> Any:
    """A LoRA layer over a base layer; its stacked tensors are NaN to begin with."""
    layers = FAKES if version == FAKE else load_layers(version)
    layer = getattr(layers, kind)(base)
    config = SimpleNamespace(
        max_lora_rank=max_rank, lora_dtype=base.weight.dtype, fully_sharded_loras=False
    )
    layer.create_lora_weights(slots, config)
    for tensor in (*layer.lora_a_stacked, *layer.lora_b_stacked):
        tensor.fill_(float("nan"))  # a slot is cleared by vLLM before anything is copied into it
    return layer


@pytest.fixture
def vllm() -> SimpleNamespace:
    """Stand-ins and makers for tests."""

    def adopted(manager: Manager, impl: str = "auto") -> Any:
        config = config_of(manager.lora_config.lora_dtype)
        adopt(manager, config, make_plan(manager), impl=impl)
        return config

    return SimpleNamespace(
        bases=BASES, Manager=Manager, make_layer=make_layer, config_of=config_of, adopted=adopted,
    )  # fmt: skip
