"""Put adapters onto a transformers model in place, and take them off again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch.utils.hooks import RemovableHandle

from loraplex.errors import LoraplexError
from loraplex.nn.attachment import Attachment, replace_module
from loraplex.nn.layers import find_layers, oriented_weight, shape_of
from loraplex.nn.library import import_transformers
from loraplex.nn.linear import LoraLinear
from loraplex.nn.model import AttachedModel, attached_class
from loraplex.ops.impls import names
from loraplex.pool import AdapterPool

# Arguments of AdapterPool that follow from the model.
FROM_MODEL = frozenset(("base_bias", "base_model", "base_weight", "device", "dtype", "layers"))


def attach(
    model: Any,
    *,
    max_adapters: int = 8,
    max_rank: int = 64,
    exclude: Sequence[str] = (),
    impl: str = "auto",
    **pool_options: Any,
) -> AttachedModel:
    """Give a transformers causal LM adapters, in place: ``model`` itself is changed and returned.

    Its linear layers are replaced by :class:`LoraLinear`, which share their parameters; embeddings
    and norms follow when an adapter has weights for them. The model gets
    :meth:`~AttachedModel.add_adapter`, :meth:`~AttachedModel.remove_adapter`,
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
            have adapters (quantised, PEFT's own, an expert); names it. Or an argument of the pool
            that follows from the model.
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
    if impl not in names("lora_linear"):
        known = ", ".join(names("lora_linear"))
        raise ValueError(f"impl must be one of {known}, got {impl!r}")
    _check_exclude(exclude)
    taken = sorted(FROM_MODEL.intersection(pool_options))
    if taken:
        raise TypeError(f"attach takes no argument {taken[0]!r}: the model says what it is")
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
        replace_module(model, name, layer)
    attachment.guard = _guard_body(model)
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
    attachment.restore_modules()
    if attachment.guard is not None:
        attachment.guard.remove()
    del model._loraplex
    model.__class__ = attachment.base_class
    attachment.pool.close()
    return model


def _guard_body(model: Any) -> RemovableHandle | None:
    """Make the body refuse ``adapter_names``, which it would pass over: only the model has them."""
    body = model.base_model
    if body is model:
        return None

    def refuse(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if "adapter_names" in kwargs:
            raise TypeError(
                f"adapter_names must be given to the attached {type(model).__name__}, "
                f"got it in a call of its {type(module).__name__}"
            )

    handle: RemovableHandle = body.register_forward_pre_hook(refuse, with_kwargs=True)
    return handle


def _check_exclude(exclude: object) -> None:
    if not isinstance(exclude, Sequence) or isinstance(exclude, str):
        kind = type(exclude).__name__
        raise TypeError(f"exclude must be a sequence of names, got the {kind} {exclude!r:.80}")
    for word in exclude:
        if not isinstance(word, str) or not word:
            raise TypeError(f"exclude must hold names of layers or parts, got {word!r:.80}")


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
