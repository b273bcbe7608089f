"""The one place that registers torch ops."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

_library = torch.library.Library("loraplex", "DEF")

ROUTED = "Tensor entries, Tensor[] storages, Tensor indices, Tensor places, Tensor plan"
LAYOUT = "int[] slices, int[] layout, str impl"

# looked up once: a call asks all of them
_num_function_modes = torch._C._len_torch_function_stack
_is_profiled = torch._C._autograd._profiler_enabled
_included = torch._C._dispatch_tls_local_include_set
_excluded = torch._C._dispatch_tls_local_exclude_set
_keys_of = torch._C._dispatch_keys


def register(schema: str, function: Callable[..., object], fake: Callable[..., object]) -> None:
    """Define one op of the ``loraplex`` namespace for every device."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"loraplex::{name}", fake, lib=_library)
    for device_type in ("cpu", "cuda"):
        _library.impl(name, _in_own_dtype(name, device_type), f"Autocast{device_type.upper()}")


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether torch's dispatcher would do nothing but call the op: then it need not be asked.

    So it is for plain tensors of one CPU or CUDA GPU, the first of them given, with no tracing,
    transform, mode, autocast or profiler around. All but the last show in the dispatch keys of a
    tensor or of the thread.
    """
    # first, for torch.compile's tracer knows the answer and looks no further
    if torch.compiler.is_compiling() or _num_function_modes() or _is_profiled():
        return False
    first = tensors[0]
    if _keys_of_thread() not in _keys_of_plain_threads() or first is None:
        return False
    plain = _keys_of_plain_tensors(first.device) if first.is_cuda or first.is_cpu else ()
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) not in (Tensor, Parameter) or _keys_of(tensor).raw_repr() not in plain
        ):
            return False
    return True


def _keys_of_thread() -> tuple[int, int]:
    return _included().raw_repr(), _excluded().raw_repr()


@functools.cache
def _keys_of_plain_threads() -> set[tuple[int, int]]:
    found = set()

    def look() -> None:
        for is_inference in (False, True):
            with torch.inference_mode(is_inference):
                found.add(_keys_of_thread())

    # a new thread begins with nothing around it
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found


@functools.cache
def _keys_of_plain_tensors(device: torch.device) -> set[int]:
    found = set()
    for is_inference in (False, True):
        with torch.inference_mode(is_inference):
            found.add(_keys_of(torch.empty(0, device=device)).raw_repr())
    return found


def _in_own_dtype(name: str, device_type: str) -> Callable[..., object]:
    """The op under autocast: results keep the dtype of x, whatever torch would do inside."""

    def run(*arguments: object) -> object:
        with torch.autocast(device_type, enabled=False):
            return getattr(torch.ops.loraplex, name)(*arguments)

    return run
