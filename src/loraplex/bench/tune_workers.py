"""Work in other processes that may fail, die or hang: kernels are compiled so, many at a time.

A standard process pool is lost when one worker dies, and a kernel that reads past its tensors takes
its process with it. Here each task that fails is told apart, and its worker is replaced.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

# Of a message that says that this process can use its GPU no more.
BROKEN_DEVICE = ("CUDA error", "HIP error", "illegal memory access")
POLL_SECONDS = 0.5


def run_all(
    function: Callable[[Any], None],
    tasks: Sequence[Any],
    *,
    workers: int,
    timeout: float,
    on_done: Callable[[int, str], None] = lambda number, why: None,
) -> list[str]:
    """Call ``function`` with every task in fresh processes.

    Args:
        function: of a module that a fresh process can import; its result is dropped.
        timeout: seconds for one task, the start of its process included.
        on_done: told the number of each task as it ends, and why it failed (empty if it did not).

    Returns:
        For every task why it failed, empty if it did not.
    """
    reasons = [""] * len(tasks)
    waiting = deque(enumerate(tasks))
    crew: dict[Connection, _Worker] = {}

    def finish(worker: _Worker, why: str) -> None:
        number = worker.number
        worker.number = -1
        reasons[number] = why
        on_done(number, why)

    try:
        while waiting or crew:
            while waiting and len(crew) < max(1, workers):
                worker = _Worker(function)
                crew[worker.pipe] = worker
                worker.give(*waiting.popleft(), timeout)
            ready = wait(list(crew), POLL_SECONDS)
            for pipe, worker in list(crew.items()):
                is_over = pipe in ready
                if not is_over and time.monotonic() < worker.deadline:
                    continue
                why = worker.take() if is_over else f"took more than {timeout:.0f} s"
                finish(worker, "its process died" if why is None else why)
                is_usable = is_over and why is not None and not _is_broken(why)
                if is_usable and waiting:
                    worker.give(*waiting.popleft(), timeout)
                else:
                    worker.end()
                    del crew[pipe]
    finally:
        for worker in crew.values():
            worker.end()
    return reasons


class _Worker:
    """One process and the task that it has."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        # spawn: a forked process cannot use a GPU that its parent has used
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, function), daemon=True)
        self.process.start()
        theirs.close()
        self.number, self.deadline = -1, 0.0

    def give(self, number: int, task: Any, timeout: float) -> None:
        self.number, self.deadline = number, time.monotonic() + timeout
        # a process that is dead already is seen when its answer is read
        with contextlib.suppress(OSError):
            self.pipe.send(task)

    def take(self) -> str | None:
        """Why the task failed, or None if the process died."""
        try:
            return str(self.pipe.recv())
        except (EOFError, OSError):
            return None

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _work(pipe: Connection, function: Callable[[Any], None]) -> None:
    # an interrupt is for the parent, which ends its workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            function(task)
            why = ""
        except Exception as error:
            why = describe(error)
        pipe.send(why)


def describe(error: Exception) -> str:
    """An error in one line, its end cut off where a compiler prints its input."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _is_broken(why: str) -> bool:
    return any(mark in why for mark in BROKEN_DEVICE)
