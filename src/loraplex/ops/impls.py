"""Which implementation runs: named ones must be able to, ``auto`` picks what the tables say."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from loraplex import env
from loraplex.errors import UnsupportedImplError
from loraplex.tuning import Choice, Problem, choose

TRITON_IMPLS = {
    "lora_linear": ("fused", "gemm_add"),
    "add_lora": ("shrink_expand",),
    "multi_lora": ("shrink_expand", "one_launch"),
    "matmul": ("tiles",),
}
TORCH = Choice("torch", {}, "the torch reference")


def names(op: str) -> tuple[str, ...]:
    """Every value that ``impl`` may have for one op."""
    return ("auto", "torch", "triton", *TRITON_IMPLS[op])


def check_impl(op: str, impl: object) -> None:
    """Require a name; :func:`resolve` says whether it is a known one."""
    if not isinstance(impl, str):
        raise TypeError(f"impl must be one of {', '.join(names(op))}, got {impl!r}")


def arch_of(device: torch.device) -> str:
    """Architecture name for the tuning tables; host tensors have ``cpu``."""
    return env.gpu_arch(device.index or 0) if device.type == "cuda" else "cpu"


def why_no_triton(device: torch.device, dtype: str) -> str:
    """Why the Triton path cannot run on such tensors; empty if it can."""
    if not env.has_triton():
        return "triton is not installed"
    if dtype == "float64":
        return "Triton kernels have float32, float16 and bfloat16; float64 is for impl='torch'"
    if env.is_interpreting():
        if dtype == "bfloat16":
            return "Triton's interpreter computes bfloat16 dots wrongly; use float16 or float32"
        return ""
    if device.type != "cuda":
        return "host tensors need Triton's interpreter: set TRITON_INTERPRET=1 before the import"
    return ""


def resolve(problem: Problem, impl: str, device: torch.device) -> Choice:
    """The choice for one call.

    Raises:
        ValueError: unknown ``impl``.
        UnsupportedImplError: an implementation asked for by name that cannot run here.
    """
    known = names(problem.op)
    if impl not in known:
        raise ValueError(f"impl must be one of {', '.join(known)}, got {impl!r}")
    if impl == "torch":
        return TORCH
    if impl == "auto" and device.type != "cuda":
        return Choice("torch", {}, f"the torch reference, since tensors are on {device.type}")
    reason = why_no_triton(device, problem.dtype)
    if not reason:
        return choose(problem, wanted_of(impl))
    if impl == "auto":
        return Choice("torch", {}, f"the torch reference: {reason}")
    raise UnsupportedImplError(f"impl={impl!r} cannot run: {reason}")


def wanted_of(impl: str) -> str:
    """The implementation that rules must be for, as :func:`choose` takes it; any if empty."""
    return "" if impl in ("auto", "triton") else impl


def precision_of(x: Tensor) -> str:
    """Precision of a float32 dot, as torch's own matmul has it."""
    return "tf32" if x.is_cuda and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start before its predecessor ends (programmatic dependent launch)."""
    arch = arch_of(device)
    is_recent = arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 90
    return is_recent and not env.is_interpreting()


def count_early(device: torch.device, num_warps: int) -> int:
    """About how many programs of a kernel may run beside the one it depends on; 0 if none may.

    In the interpreter one, so that it takes both ways.
    """
    if device.type != "cuda":
        return 1
    return count_at_a_time(device, num_warps) if has_dependent_launch(device) else 0


def count_at_a_time(device: torch.device, num_warps: int) -> int:
    """About how many programs a GPU holds: one large one, or two smaller, a multiprocessor.

    Without a GPU three, so that the interpreter comes to a last wave.
    """
    each = 1 if num_warps >= 8 or device.type != "cuda" else 2
    return count_multiprocessors(device) * each


def count_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; three without one."""
    return _multiprocessors(device.index or 0) if device.type == "cuda" else 3


@functools.cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def has_aligned_rows(tensor: Tensor) -> bool:
    """Whether rows are dense, apart and start on 16 bytes.

    Then kernels may load whole vectors, and tensor descriptors may describe them: those want rows
    that do not overlap.
    """
    size = tensor.element_size()
    return (
        tensor.stride(1) == 1
        and tensor.stride(0) >= tensor.shape[1]
        and tensor.data_ptr() % 16 == 0
        and tensor.stride(0) * size % 16 == 0
        and tensor.shape[1] * size % 16 == 0
    )
