"""Put adapters onto a transformers model in place, and take them off again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from loraplex.adapters import Adapter, check_base_copies, load_adapter, match
from loraplex.errors import LoraplexError, UnknownAdapterError
from loraplex.nn.layers import find_layers, oriented_weight, shape_of
from loraplex.nn.library import import_transformers
from loraplex.nn.linear import LoraLinear
from loraplex.nn.model import AdapterNames, AttachedModel, attached_class
from loraplex.nn.step import Step, StepHolder
from loraplex.pool import AdapterPool

# PEFT's spelling of a row without adapter.
BASE = "__base__"
# What the tables carry beyond A and B.
FEATURES = ("dora", "lora_bias", "bias")


class Attachment:
    """The adapters of one attached model: pool, layers, and the step that runs."""

    def __init__(self, model: Any, layers: Mapping[str, nn.Linear], pool: AdapterPool) -> None:
        self.pool = pool
        self.base_class: type[nn.Module] = type(model)
        self.layers = dict(layers)
        self.shapes = pool.layers
        self.steps = StepHolder()
        self._model = model
        self._device = next(iter(layers.values())).weight.device
        self._changed: dict[str, frozenset[str]] = {}

    def add(self, name: str, adapter: str | os.PathLike[str] | Adapter) -> None:
        """See :meth:`AttachedModel.add_adapter`."""
        if not isinstance(name, str):
            raise TypeError(f"name must be a str, got {type(name).__name__}")
        if not name or name == BASE:
            raise ValueError(f"name must not be empty or {BASE!r} (a base row), got {name!r}")
        loaded = adapter if isinstance(adapter, Adapter) else load_adapter(adapter)
        loaded.require(FEATURES)
        loaded = check_base_copies(loaded, self._parameter)
        landed = match(loaded, self.shapes, base_model=self._model.name_or_path or None)
        self.pool.add(name, loaded, matched=landed)
        self._changed[name] = frozenset(landed)

    def remove(self, name: str) -> None:
        """See :meth:`AttachedModel.remove_adapter`."""
        self._known("name", name)
        self.pool.remove(name)
        self._changed.pop(name, None)

    def names(self) -> list[str]:
        """Registered adapters by arrival."""
        return list(self._changed)

    @contextlib.contextmanager
    def serving(
        self, adapter_names: AdapterNames, rows: int, *, may_expand: bool
    ) -> Iterator[None]:
        """Route the forward passes of the body: row i of the batch uses ``adapter_names[i]``."""
        names = self._check_names(adapter_names, rows)
        layers = frozenset[str]().union(
            *(self._changed[name] for name in names if name is not None)
        )
        # The lease keeps the adapters in their slots, whatever is added and removed meanwhile.
        with self.pool.acquire(names) as lease:
            step = Step(
                lease.indices,
                layers,
                num_adapters=self.pool.max_adapters,
                device=self._device,
                may_expand=may_expand,
            )
            with self.steps.use(step):
                yield

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

    def _parameter(self, name: str) -> Tensor | None:
        return dict(self._model.named_parameters(remove_duplicate=False)).get(name)

    def _known(self, argument: str, name: object) -> None:
        if not isinstance(name, str):
            raise TypeError(f"{argument} must be a str or None, got {type(name).__name__}")
        if name not in self._changed:
            known = ", ".join(map(repr, self._changed)) or "none yet"
            raise UnknownAdapterError(f"{argument} is {name!r}, the adapters are: {known}")


def attach(
    model: Any,
    *,
    max_adapters: int = 8,
    max_rank: int = 64,
    exclude: Sequence[str] = ("lm_head",),
    impl: str = "auto",
    **pool_options: Any,
) -> AttachedModel:
    """Give a transformers causal LM adapters, in place: ``model`` itself is changed and returned.

    Its linear layers are replaced by :class:`LoraLinear`, which share their parameters, and it
    gets :meth:`~AttachedModel.add_adapter`, :meth:`~AttachedModel.remove_adapter`,
    :meth:`~AttachedModel.adapter_names` and an ``adapter_names`` argument for ``generate`` and
    ``forward``. :func:`detach` takes all of it back.

    Args:
        model: a decoder of transformers in one dtype (float32, float16, bfloat16) on one device.
        max_adapters: slots on the device, the most different adapters of one batch.
        max_rank: largest rank that is accepted; kernels are chosen for it.
        exclude: names of layers, or of parts of the model, to leave without adapters.
        impl: implementation of :func:`loraplex.lora_linear`.
        **pool_options: further arguments of :class:`loraplex.AdapterPool`.

    Raises:
        TypeError: not a transformers model, an encoder-decoder, or a layer of a kind that cannot
            have adapters (quantised, PEFT's own, an expert); names it.
        ValueError: attached already, or layers of several dtypes or devices. In each case the
            model has not changed.

    Example:
        >>> import loraplex as lp
        >>> from loraplex.demo import load_demo_model
        >>> model, tokenizer, adapters = load_demo_model()
        >>> model = lp.attach(model)
        >>> model.add_adapter("shout", adapters["shout"])
        >>> inputs = tokenizer(["Where does the owl live?"] * 2, return_tensors="pt", padding=True)
        >>> out = model.generate(**inputs, adapter_names=["shout", None], max_new_tokens=24)
        >>> for text in tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :], True):
        ...     print(text)
        THE OWL LIVES IN A HOLLOW TREE!!!
        The owl lives in a hollow tree.
    """
    _check_model(model)
    layers = find_layers(model, exclude)
    first = next(iter(layers.values())).weight
    text_config = model.config.get_text_config()
    pool = AdapterPool(
        {name: shape_of(name, layer, text_config) for name, layer in layers.items()},
        max_adapters=max_adapters,
        max_rank=max_rank,
        dtype=first.dtype,
        device=first.device,
        base_weight=lambda name: oriented_weight(layers[name]),
        base_bias=lambda name: layers[name].bias,
        **pool_options,
    )
    attachment = Attachment(model, layers, pool)
    wrapped = {
        name: LoraLinear(
            layer, name=name, table=pool.table(name), steps=attachment.steps, impl=impl
        )
        for name, layer in layers.items()
    }
    kind = attached_class(attachment.base_class)  # type: ignore[arg-type]  # classes have hashes
    # From here on nothing can fail.
    for name, layer in wrapped.items():
        _replace(model, name, layer)
    model.__class__ = kind
    model._loraplex = attachment
    return cast(AttachedModel, model)


def detach(model: AttachedModel) -> Any:
    """Undo :func:`attach`: the model's own layers, class and methods are back, the pool is freed.

    Raises:
        TypeError: the model is not attached.
        LoraplexError: it is generating in this thread.

    Example:
        >>> import loraplex as lp
        >>> from loraplex.demo import load_demo_model
        >>> model = lp.attach(load_demo_model()[0])
        >>> type(lp.detach(model)).__name__
        'LlamaForCausalLM'
    """
    if not isinstance(model, AttachedModel):
        raise TypeError(f"model must be attached, got a plain {type(model).__name__}")
    attachment = model._loraplex
    if attachment.steps.current is not None:
        raise LoraplexError("the model is generating; detach it after")
    for name, layer in attachment.layers.items():
        layer.train(model.get_submodule(name).training)
        _replace(model, name, layer)
    del model._loraplex
    model.__class__ = attachment.base_class
    attachment.pool.close()
    return model


def _check_model(model: Any) -> None:
    if isinstance(model, AttachedModel):
        raise ValueError("model is attached already; call loraplex.detach first")
    if not isinstance(model, import_transformers().PreTrainedModel):
        hint = "; pass the model inside it" if type(model).__module__.startswith("peft.") else ""
        raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model)}{hint}")
    if model.config.is_encoder_decoder:
        raise TypeError(f"model must be a decoder, {type(model).__name__} is an encoder-decoder")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise TypeError("model has adapters of transformers' PEFT integration; delete them first")


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, layer)
