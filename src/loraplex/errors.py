"""Exceptions of loraplex; wrong arguments are plain ``ValueError`` and ``TypeError``."""

from __future__ import annotations


class LoraplexError(Exception):
    """Base of every error that is about the state of the world rather than about one argument."""


class UnsupportedImplError(LoraplexError):
    """An implementation that was asked for by name cannot run here; says which and why."""


class AdapterError(LoraplexError):
    """An adapter folder or file cannot be loaded; says where, what was expected and found."""


class UnsupportedAdapterError(AdapterError):
    """A valid adapter that uses a feature loraplex does not carry; names the feature."""


class PoolError(LoraplexError):
    """An operation on an adapter pool cannot be done; the pool is unchanged."""


class PoolFullError(PoolError):
    """No room for an adapter, and nothing that may be evicted."""


class UnknownAdapterError(PoolError):
    """No adapter of that name is registered."""


class AdapterExistsError(PoolError):
    """An adapter of that name is registered already."""
