"""``load_adapter``: a PEFT LoRA folder → Adapter."""

from __future__ import annotations

import dataclasses
import os
from typing import cast

from loraplex.adapters.adapter import Adapter
from loraplex.adapters.assemble import Assembler
from loraplex.adapters.folder import open_folder
from loraplex.adapters.spec import parse_spec
from loraplex.errors import UnsupportedAdapterError


def load_adapter(
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    root: str | os.PathLike[str] | None = None,
    allow_modified_base: bool = False,
) -> Adapter:
    """Read a PEFT LoRA folder into host memory: all of it, checked, or an error and nothing.

    Semantics::

        scaling = alpha / rank  (alpha / sqrt(rank) with use_rslora), alpha and rank per module
        delta of a module = scaling * b @ a     # as in the file: fp32, fp16, bf16 bit for bit

    Args:
        path: a folder with adapter_config.json and adapter_model.safetensors (or .bin, which is
            read by weights-only loading: no code of the file runs). Nothing is downloaded.
        strict: refuse tensors with unknown names, and files of further weights beside PEFT's; False
            lists them in ``Adapter.ignored``.
        root: the only folder that may be read from; `path` is then relative to it, and links or
            ``..`` that lead outside are refused with a message that names no path.
        allow_modified_base: load PiSSA, OLoRA, CorDA, LoRA-GA and LoftQ adapters, for a base
            model that holds the changed weights.

    Raises:
        TypeError: an argument of another type.
        ValueError: a root that is empty, has a NUL, or characters that no file name can have.
        AdapterError: a folder or file that cannot be loaded; says which, expected and found.
        UnsupportedAdapterError: a PEFT feature that loraplex does not carry; names it.

    Example:
        >>> adapter = load_adapter("path/to/peft_folder")  # doctest: +SKIP
        >>> adapter.modules["model.layers.0.self_attn.q_proj"].scaling  # doctest: +SKIP
        2.0
    """
    _check_arguments(path, root, strict=strict, allow_modified_base=allow_modified_base)
    folder = open_folder(path, root)
    spec = parse_spec(folder.read_config(), folder.label, allow_modified_base=allow_modified_base)
    further = folder.further_weights()
    if further and strict:
        raise UnsupportedAdapterError(
            f"{folder.label}: {', '.join(further)} has weights that were trained with the adapter "
            "(of added tokens, or whole modules), and no place in PEFT's format; merge them into "
            "the base model (strict=False leaves them out)"
        )
    adapter = Assembler(spec, folder.label).assemble(folder.read_tensors(), strict=strict)
    return dataclasses.replace(adapter, ignored=(*adapter.ignored, *further))


def _check_arguments(path: object, root: object, **switches: object) -> None:
    for name, value in (("path", path), ("root", root)):
        if name == "root" and value is None:
            continue
        if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
            raise TypeError(f"{name} must be a str or PathLike[str], got {value!r:.80}")
    if root is not None and "\0" in os.fspath(cast(str, root)):
        raise ValueError(f"root must be a path without NUL, got {root!r:.80}")
    if root is not None:
        try:
            os.fsencode(cast(str, root))
        except UnicodeEncodeError:
            raise ValueError(
                f"root must be a path of characters that file names can have, got {root!r:.80}"
            ) from None
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r:.80}")
