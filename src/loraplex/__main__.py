"""``python -m loraplex``, the same as the ``loraplex`` command."""

from __future__ import annotations

import sys

from loraplex.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
