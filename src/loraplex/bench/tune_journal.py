"""What was measured so far, a line each, so that a stopped run goes on where it stopped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from loraplex.errors import LoraplexError


@dataclass(frozen=True)
class Result:
    """One candidate on one batch.

    Attributes:
        ms: median milliseconds, None if there is no time.
        why: why there is none: ``failed: ...`` (does not compile or fit) or ``wrong: ...``.
    """

    batch: str
    candidate: str
    ms: float | None
    why: str = ""


class Journal:
    """Results in a file of JSON lines; the first line says on what they were measured."""

    def __init__(self, path: Path | None, identity: Mapping[str, str], *, resume: bool) -> None:
        """Open a new journal, or go on with the one that is there; without a path in memory only.

        Raises:
            LoraplexError: ``resume``, but the file is of another machine or version.
        """
        self.path = path
        self._results: dict[tuple[str, str], Result] = {}
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume and path.exists():
            self._read(path, identity)
        else:
            path.write_text(json.dumps(dict(identity)) + "\n")

    def get(self, batch: str, candidate: str) -> Result | None:
        """The result, or None if it has not been measured."""
        return self._results.get((batch, candidate))

    def put(self, result: Result) -> None:
        """Keep a result, on disk before the next one begins."""
        self._results[result.batch, result.candidate] = result
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")

    def results(self, batch: str) -> list[Result]:
        """Everything about one batch, the fastest first, what has no time last."""
        own = [result for (name, _), result in self._results.items() if name == batch]
        return sorted(own, key=lambda r: float("inf") if r.ms is None else r.ms)

    def reasons(self) -> list[tuple[str, int]]:
        """Why candidates have no time, and how many for each reason, the most frequent first."""
        return Counter(r.why for r in self._results.values() if r.why).most_common()

    def _read(self, path: Path, identity: Mapping[str, str]) -> None:
        text = path.read_text()
        # a run that was killed may have left half a line, which is dropped from the file too
        lines = text[: text.rfind("\n") + 1].splitlines()
        try:
            found = json.loads(lines[0]) if lines else {}
            results = [Result(**json.loads(line)) for line in lines[1:]]
        except (ValueError, TypeError) as error:
            raise LoraplexError(f"{path} is no journal of loraplex tune: {error}") from error
        for key, value in identity.items():
            if found.get(key) != value:
                raise LoraplexError(
                    f"{path} cannot be resumed: {key} was {found.get(key)}, is {value} now"
                )
        path.write_text("".join(line + "\n" for line in lines))
        self._results = {(result.batch, result.candidate): result for result in results}
