"""``loraplex env``: versions, the GPU, what is available and why not."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from loraplex import env
from loraplex.bench.header import make_header, package_version
from loraplex.cli.render import Column, print_table
from loraplex.engines.status import PluginStatus

PACKAGES = ("numpy", "safetensors", "transformers", "peft", "rich", "matplotlib")
ENGINES = ("vllm", "sglang")


@dataclass(frozen=True)
class Ability:
    """One thing this machine can or cannot do."""

    name: str
    is_available: bool
    why: str


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``env``."""
    parser = subparsers.add_parser("env", help="versions, GPU, what is available and why not")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print what this machine is."""
    header = make_header()
    versions = {name: package_version(name) or "not installed" for name in PACKAGES}
    found = list(abilities())
    if args.json:
        content = {
            "header": header,
            "packages": versions,
            "gpus": list(gpus()),
            "abilities": [asdict(ability) for ability in found],
        }
        print(json.dumps(content, indent=1))
        return 0
    del header["command"]
    print_table([Column("this machine"), Column("")], list({**header, **versions}.items()))
    print()
    for gpu in gpus():
        print_table([Column(f"gpu {gpu['index']}"), Column("")], list(gpu.items())[1:])
        print()
    rows = [[a.name, "yes" if a.is_available else "no", a.why] for a in found]
    print_table([Column("what"), Column("here"), Column("why")], rows)
    return 0


def gpus() -> Iterator[dict[str, str]]:
    """Name and size of every GPU that torch sees."""
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield {
            "index": str(index),
            "name": properties.name,
            "architecture": env.gpu_arch(index),
            "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "multiprocessors": str(properties.multi_processor_count),
            "L2 cache": f"{getattr(properties, 'L2_cache_size', 0) / 2**20:.0f} MiB",
        }


def abilities() -> Iterator[Ability]:
    """Every optional thing, with the reason why it is there or not."""
    yield Ability("torch implementations", True, "the reference: any device, any dtype")
    yield _triton_on_gpu()
    yield _interpreter()
    yield from _gpu_features()
    yield _package("adapter folders (PEFT)", ("safetensors",), "")
    yield _package("attach, generate", ("transformers",), "hf")
    yield _package("demo with proof against PEFT", ("transformers", "peft"), "hf")
    yield _package("progress bars and colours", ("rich",), "bench")
    yield _package("pictures (--plot)", ("matplotlib",), "bench")
    yield _package("pool metrics", ("prometheus_client",), "metrics")
    for name in ENGINES:
        version = package_version(name)
        yield Ability(f"peer {name}", version is not None, version or "not installed")
        yield _plugin(name)


def _triton_on_gpu() -> Ability:
    name = "Triton kernels on the GPU"
    if not env.has_triton():
        return Ability(name, False, "triton cannot be imported")
    if not torch.cuda.is_available():
        build = f"torch {torch.__version__} sees no GPU"
        return Ability(name, False, f"{build} (nvidia-smi {_found('nvidia-smi')})")
    if env.is_interpreting():
        return Ability(name, False, "TRITON_INTERPRET is set: kernels run in the interpreter")
    arch = env.gpu_arch(0)
    if arch.startswith("sm_") and torch.cuda.get_device_capability() < (8, 0):
        return Ability(name, False, f"{arch} is older than sm_80")
    return Ability(name, True, f"{arch}, triton {package_version('triton')}")


def _interpreter() -> Ability:
    name = "Triton's interpreter (CPU tests)"
    if not env.has_triton():
        return Ability(name, False, "triton cannot be imported")
    if env.is_interpreting():
        return Ability(name, True, "TRITON_INTERPRET is set; fp32 and fp16 (bf16 dots are wrong)")
    return Ability(name, False, "off: TRITON_INTERPRET=1 turns it on; fp32 and fp16 only")


def _gpu_features() -> Iterator[Ability]:
    names = ("bf16 kernels", "CUDA-graph replay", "tensor descriptors, dependent launch")
    if not torch.cuda.is_available():
        for name in names:
            yield Ability(name, False, "no GPU")
        return
    arch, capability = env.gpu_arch(0), torch.cuda.get_device_capability()
    is_nvidia = torch.version.hip is None
    yield Ability(names[0], not is_nvidia or capability >= (8, 0), arch)
    yield Ability(names[1], True, f"torch {torch.__version__}")
    yield Ability(names[2], is_nvidia and capability >= (9, 0), f"{arch}; needs sm_90 or newer")


def _package(name: str, modules: tuple[str, ...], extra: str) -> Ability:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        hint = f": pip install 'loraplex[{extra}]'" if extra else ""
        return Ability(name, False, f"{', '.join(missing)} not installed{hint}")
    installed = ", ".join(f"{m} {package_version(m.replace('_', '-'))}" for m in modules)
    return Ability(name, True, installed)


def _plugin(engine: str) -> Ability:
    """Whether an engine that starts here would run our kernels, and what is missing if not."""
    status: PluginStatus = importlib.import_module(f"loraplex.engines.{engine}").plugin_status()
    return Ability(f"plugin for {engine}", status.active, status.reason)


def _found(tool: str) -> str:
    return "found" if shutil.which(tool) else "not found"
