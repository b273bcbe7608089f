"""The adapters of one attached model, and how its rows come to use them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from loraplex.adapters import Adapter, check_base_copies, load_adapter, match
from loraplex.errors import UnknownAdapterError
from loraplex.nn.find_parts import PartFinder, unwrapped
from loraplex.nn.model import AdapterNames
from loraplex.nn.parts import Part
from loraplex.nn.residents import Residents, Served
from loraplex.nn.rowwise import LoraEmbedding, Rowwise
from loraplex.nn.step import Step, StepHolder
from loraplex.pool import AdapterPool, Lease, PoolStats
from loraplex.pool.arguments import check_flag

# PEFT's spelling of a row without adapter.
BASE = "__base__"
MOST_NAMES = 8  # in a message
# Of `Adapter.features`, what an attached model carries.
FEATURES = ("dora", "lora_bias", "bias", "embeddings", "modules_to_save", "trainable_tokens")


class Attachment:
    """The adapters of one attached model: pool, layers, and the step that runs."""

    def __init__(self, model: Any, layers: Mapping[str, nn.Linear], pool: AdapterPool) -> None:
        self.pool = pool
        self.base_class: type[nn.Module] = type(model)
        self.layers = dict(layers)
        self.steps = StepHolder()
        self.guard: RemovableHandle | None = None
        self._model = model
        self._device = next(iter(layers.values())).weight.device
        self._finder = PartFinder(model, self.layers, pool.max_rank)
        self._residents = Residents(pool.max_adapters, self._device)
        self._served: dict[str, Served] = {}
        self._lock = threading.Lock()  # whoever replaces modules or publishes adapters

    def add(self, name: str, adapter: str | os.PathLike[str] | Adapter, strict: bool) -> None:
        """See :meth:`AttachedModel.add_adapter`."""
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, got {type(name).__name__}")
        if not name or name == BASE:
            raise ValueError(f"name must not be empty or {BASE!r} (a base row), got {name!r}")
        check_flag("strict", strict)
        loaded = adapter if isinstance(adapter, Adapter) else load_adapter(adapter, strict=strict)
        loaded.require(FEATURES)
        loaded = check_base_copies(loaded, self._parameters().get)
        matched = match(
            loaded,
            self.pool.layers,
            parameters={name: value.shape for name, value in self._parameters().items()},
            base_model=self._model.name_or_path or None,
            strict=strict,
        )
        parts = self._finder.find(matched, loaded.path)
        self.pool.add(name, loaded, matched=matched)
        try:
            with self._lock:
                for module in parts:
                    self._make_rowwise(module)
                self._served[name] = Served(frozenset(matched), parts)
        except BaseException:  # an interrupt, or a class of modules that cannot be replaced
            self._served.pop(name, None)  # both sides, or the name would be stuck
            self.pool.remove(name)
            raise

    def remove(self, name: str) -> None:
        """See :meth:`AttachedModel.remove_adapter`."""
        self._known("name", name)
        with self._lock:
            # Unpublished before the pool frees the name for others: a step that looked it up
            # sees the change, and whoever gives the name again publishes after this.
            served = self._find("name", name)
            names = list(self._served)
            del self._served[name]
            try:
                self.pool.remove(name)
            except BaseException:
                self._served[name] = served
                self._served = {other: self._served[other] for other in names}
                raise
        self._residents.drop(served)

    def stats(self) -> PoolStats:
        """See :meth:`AttachedModel.adapter_stats`."""
        host = sum(served.num_bytes for served in list(self._served.values()))
        return dataclasses.replace(
            self.pool.stats(), outside_host=host, outside_device=self._residents.num_bytes
        )

    def restore_modules(self) -> None:
        """Put every module of the model back in its place."""
        for name, module in list(self._model.named_modules(remove_duplicate=False)):
            own = unwrapped(module)
            if own is not module:
                own.train(module.training)
                replace_module(self._model, name, own)

    def names(self) -> list[str]:
        """Registered adapters by arrival."""
        return list(self._served)

    @contextlib.contextmanager
    def serving(
        self, adapter_names: AdapterNames, rows: int, *, may_expand: bool
    ) -> Iterator[None]:
        """Route the forward passes of the body: row i of the batch uses ``adapter_names[i]``."""
        names = self._check_names(adapter_names, rows)
        # The lease keeps the adapters in their slots, whatever is added and removed meanwhile.
        lease, served = self._acquire(names)
        with lease:
            step = Step(
                lease.indices,
                frozenset[str]().union(*(one.layers for one in served.values())),
                self._parts_of(served, names),
                num_adapters=self.pool.max_adapters,
                device=self._device,
                may_expand=may_expand,
            )
            with self.steps.use(step):
                yield

    def _acquire(self, names: Sequence[str | None]) -> tuple[Lease, dict[str, Served]]:
        """A lease on adapters and what else belongs to the same versions of them."""
        while True:
            served = {name: self._find("adapter_names", name) for name in names if name is not None}
            lease = self.pool.acquire(names)
            if all(self._served.get(name) is one for name, one in served.items()):
                return lease, served
            lease.release()  # one was replaced in between; its name stands for another version now

    def _parts_of(
        self, served: Mapping[str, Served], names: Sequence[str | None]
    ) -> dict[str, list[tuple[Part, tuple[int, ...]]]]:
        found: dict[str, list[tuple[Part, tuple[int, ...]]]] = {}
        resident = self._residents.fetch(served.values())
        for name, one in served.items():
            if self._served.get(name) is not one:  # removed in between: only this step needs it
                self._residents.drop(one)
            rows = tuple(row for row, other in enumerate(names) if other == name)
            for module, part in resident.get(one, {}).items():
                found.setdefault(module, []).append((part, rows))
        return found

    def begin(self, batch: int, length: int) -> None:
        """Tell the running step, if there is one, that a forward pass starts."""
        step = self.steps.current
        if step is not None:
            step.begin(batch, length)

    def _check_names(self, adapter_names: AdapterNames, rows: int) -> list[str | None]:
        if self._model.training:
            raise ValueError("adapter_names needs a model in eval mode; call model.eval() first")
        if isinstance(adapter_names, str) or not isinstance(adapter_names, Sequence):
            kind = type(adapter_names).__name__
            raise TypeError(f"adapter_names must be a list of names and None, got {kind}")
        if len(adapter_names) != rows:
            raise ValueError(
                f"adapter_names must have one name or None per row of the batch ({rows}), "
                f"got {len(adapter_names)}"
            )
        names: list[str | None] = [None if name == BASE else name for name in adapter_names]
        for row, name in enumerate(names):
            if name is not None:
                self._known(f"adapter_names[{row}]", name)
        return names

    def _parameters(self) -> dict[str, Tensor]:
        return dict(self._model.named_parameters(remove_duplicate=False))

    def _make_rowwise(self, name: str) -> None:
        module = self._model.get_submodule(name)
        if not isinstance(module, Rowwise):
            kind = LoraEmbedding if isinstance(module, nn.Embedding) else Rowwise
            replace_module(self._model, name, kind(module, name=name, steps=self.steps))

    def _known(self, argument: str, name: object) -> None:
        if not isinstance(name, str):
            raise TypeError(f"{argument} must be a str or None, got {type(name).__name__}")
        self._find(argument, name)

    def _find(self, argument: str, name: str) -> Served:
        served = self._served.get(name)
        if served is None:
            names = list(self._served)
            known = ", ".join(f"{other!r:.80}" for other in names[:MOST_NAMES]) or "none yet"
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            raise UnknownAdapterError(
                f"{argument} is {name!r:.200}, the adapters are: {known}{more}"
            )
        return served


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of another."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)
