"""What an attached model can do beyond what it could before."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from loraplex.adapters import Adapter
from loraplex.errors import LoraplexError
from loraplex.pool import AdapterInfo, PoolStats

AdapterNames = Sequence[str | None]
# transformers' own integration of PEFT would put its layers where ours stand.
PEFT_METHODS = (
    "load_adapter",
    "set_adapter",
    "enable_adapters",
    "disable_adapters",
    "active_adapters",
    "delete_adapter",
    "get_adapter_state_dict",
    "enable_peft_hotswap",
)


class AttachedModel(nn.Module):
    """A model after :func:`loraplex.attach`: its own class with these methods in front.

    Example:
        >>> import loraplex as lp
        >>> from loraplex.demo import load_demo_model
        >>> model, tokenizer, adapters = load_demo_model()
        >>> model = lp.attach(model)
        >>> model.add_adapter("shout", adapters["shout"])
        >>> model.adapter_names()
        ['shout']
        >>> model = lp.detach(model)
    """

    # transformers evaluates the annotations of its subclasses, so no name of ours may stand here.
    _loraplex: Any

    def add_adapter(
        self, name: str, adapter: str | os.PathLike[str] | Adapter, *, strict: bool = True
    ) -> None:
        """Register an adapter under a name; takes the place of transformers' method.

        Args:
            name: what ``adapter_names`` will call it.
            adapter: a PEFT folder, or what :func:`loraplex.load_adapter` made of one.
            strict: refuse tensors with unknown names, and parts that match nothing in the model;
                False leaves them out and warns about those parts.

        Raises:
            AdapterError: the folder cannot be loaded or does not fit the model.
            UnsupportedAdapterError: it uses a feature that an attached model does not carry.
            AdapterExistsError: the name is taken. In each case nothing has changed.
        """
        self._loraplex.add(name, adapter, strict)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            UnknownAdapterError: there is none of that name.
        """
        self._loraplex.remove(name)

    def adapter_names(self) -> list[str]:
        """The names of the registered adapters, in the order of their arrival."""
        names: list[str] = self._loraplex.names()
        return names

    def adapter_info(self, name: str) -> AdapterInfo:
        """What is known of a registered adapter: its rank, bytes and base model, where it is.

        Raises:
            UnknownAdapterError: there is none of that name.
        """
        info: AdapterInfo = self._loraplex.pool.info(name)
        return info

    def adapter_stats(self) -> PoolStats:
        """Bytes and counts of the pool, and the bytes of what adapters have beside it.

        ``PoolCollector(model.adapter_stats)`` shows them to Prometheus.
        """
        stats: PoolStats = self._loraplex.stats()
        return stats

    def list_adapters(self) -> list[str]:
        """The same as :meth:`adapter_names`."""
        return self.adapter_names()

    def generate(self, *args: Any, adapter_names: AdapterNames | None = None, **kwargs: Any) -> Any:
        """Generate as the model always does, each row of the batch with its own adapter.

        Args:
            adapter_names: one name per row of the batch, None (or PEFT's ``"__base__"``) for the
                base model alone. Beams and ``num_return_sequences`` use the adapter of the row
                that they come from. Without it, every row is a base row.

        Raises:
            ValueError: not one name per row, or the model is in training mode.
            UnknownAdapterError: a name that is not registered.
        """
        if adapter_names is None:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        batch = _batch_size(args, kwargs, ("inputs", "input_ids", "inputs_embeds"))
        # The rows change from step to step: compiled code would be made again for each set.
        kwargs.setdefault("disable_compile", True)
        with self._loraplex.serving(adapter_names, 1 if batch is None else batch, may_expand=True):
            return super().generate(*args, **kwargs)  # type: ignore[misc]

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Base model only: transformers' continuous batching packs rows in ways of its own.

        Raises:
            LoraplexError: ``adapter_names`` was given, which would be passed over in silence.
        """
        if "adapter_names" in kwargs:
            raise LoraplexError("generate_batch cannot have adapter_names; use generate")
        return super().generate_batch(*args, **kwargs)  # type: ignore[misc]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Refused while attached, except as transformers' way to ask for the embedding.

        Raises:
            LoraplexError: a size was given.
        """
        if args or kwargs.get("new_num_tokens") is not None:
            raise LoraplexError(
                "an attached model cannot change its vocabulary: adapters were matched to it; "
                "call loraplex.detach first and attach again after"
            )
        return super().resize_token_embeddings(*args, **kwargs)  # type: ignore[misc]

    def _apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise LoraplexError(
            "an attached model cannot change its device or dtype: its adapters would stay behind; "
            "call loraplex.detach first and attach again after"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise LoraplexError("an attached model cannot be copied; call loraplex.detach first")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise LoraplexError("an attached model cannot be pickled; call loraplex.detach first")


def _refuse(method: str) -> Callable[..., NoReturn]:
    def refuse(self: AttachedModel, *args: Any, **kwargs: Any) -> NoReturn:
        raise LoraplexError(
            f"{method} belongs to transformers' integration of PEFT, which an attached model does "
            "not use; use add_adapter, remove_adapter and adapter_names, or loraplex.detach first"
        )

    refuse.__name__ = method
    refuse.__doc__ = "Refused while attached."
    return refuse


for _method in PEFT_METHODS:
    setattr(AttachedModel, _method, _refuse(_method))


@functools.cache
def attached_class(base: type[nn.Module]) -> type[AttachedModel]:
    """The class of attached models of a class; its name and its forward's signature stay."""

    @functools.wraps(base.forward)
    def forward(
        self: AttachedModel, *args: Any, adapter_names: AdapterNames | None = None, **kwargs: Any
    ) -> Any:
        attachment = self._loraplex
        batch, length = _tokens(args, kwargs)
        if adapter_names is None:
            attachment.begin(batch, length)
            return base.forward(self, *args, **kwargs)
        with attachment.serving(adapter_names, batch, may_expand=False):
            attachment.begin(batch, length)
            return base.forward(self, *args, **kwargs)

    signature = inspect.signature(base.forward)
    parameters = list(signature.parameters.values())
    added = inspect.Parameter("adapter_names", inspect.Parameter.KEYWORD_ONLY, default=None)
    place = next(
        (i for i, p in enumerate(parameters) if p.kind is inspect.Parameter.VAR_KEYWORD),
        len(parameters),
    )
    parameters.insert(place, added)
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    body = {"__module__": base.__module__, "__doc__": base.__doc__, "forward": forward}
    return type(base.__name__, (AttachedModel, base), body)


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    for name in ("input_ids", "inputs_embeds"):
        value = kwargs.get(name)
        if isinstance(value, Tensor):
            return value.shape[0], value.shape[1]
    if args and isinstance(args[0], Tensor):
        return args[0].shape[0], args[0].shape[1]
    raise ValueError("forward needs input_ids or inputs_embeds")


def _batch_size(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]
) -> int | None:
    given = [*args[:1], *(kwargs.get(name) for name in names)]
    return next((value.shape[0] for value in given if isinstance(value, Tensor)), None)
