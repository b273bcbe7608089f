"""The transformers package, which only those need who attach."""

from __future__ import annotations

from types import ModuleType


def import_transformers() -> ModuleType:
    """Return the package.

    Raises:
        ImportError: it is not installed; names the extra that brings it.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("this needs transformers: pip install 'loraplex[hf]'") from error
    package: ModuleType = transformers
    return package
