"""Repeating a launch: what stays, what is exchanged, and what is not repeated at all."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loraplex.kernels import launch as module
from loraplex.kernels.launch import Launch, NotRepeatableError, launch, taking_notes


class Descriptor:
    """Like Triton's: a frozen thing with a tensor in it."""

    def __init__(self, base: torch.Tensor) -> None:
        self.base = base
        self.shape, self.strides = list(base.shape), list(base.stride())
        self.block_shape = [2, 2]

    def __setattr__(self, name: str, value: Any) -> None:
        assert name not in self.__dict__, "frozen"
        super().__setattr__(name, value)


class Launcher:
    """As Triton's: finds the descriptors among the arguments, then launches."""

    def __init__(self, given: list[tuple[Any, ...]]) -> None:
        def launcher(*arguments: Any) -> None:
            given.append(arguments)

        def search(*arguments: Any) -> None:
            assert not any(hasattr(value, "block_shape") for value in arguments)
            launcher(*arguments)

        self.launch = search

    def __call__(self, *arguments: Any) -> None:
        self.launch(*arguments)


class Kernel:
    """A jit function that is compiled already."""

    arg_names = ("x_ptr", "x_tiles", "size", "y_ptr", "BLOCK")

    def __init__(self, backend: str = "cuda") -> None:
        self.pre_run_hooks: list[Any] = []
        self.launched: list[tuple[Any, ...]] = []
        target = SimpleNamespace(backend=backend)
        self.compiled: Any = SimpleNamespace(
            metadata=SimpleNamespace(target=target, tensordesc_meta=["meta"]),
            run=Launcher(self.launched), function=7, packed_metadata=(4, 1, 0),
        )  # fmt: skip

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constants: self.compiled


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses for which Triton made a descriptor."""
    addresses: list[int] = []

    def make(descriptor: Any, metadata: object) -> list[Any]:
        assert metadata == "meta"
        addresses.append(descriptor.base.data_ptr())
        return [f"map {descriptor.base.data_ptr()}", *descriptor.shape, *descriptor.strides]

    stand_in = types.ModuleType("driver")
    stand_in.make_tensordesc_arg = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", stand_in)
    return addresses


def launch_of(kernel: Kernel) -> Launch:
    x, y = torch.zeros(4, 8), torch.zeros(4)
    with taking_notes() as notes:
        launch(kernel, (3,), x, Descriptor(x), 5, y, BLOCK=(16, 2), num_warps=4)
    (note,) = notes
    return Launch(note, lambda tensor: 0 if tensor is x else 1)


def test_addresses_alone_are_exchanged(made: list[int]) -> None:
    kernel = Kernel()
    kept = launch_of(kernel)
    kept.repeat(9, [160, 320])
    kept.repeat(9, [480, 640])
    first = (3, 1, 1, 9, 7, (4, 1, 0), None, None, None)
    assert kernel.launched == [
        (*first, 160, "map 160", 4, 8, 8, 1, 5, 320, (16, 2)),
        (*first, 480, "map 480", 4, 8, 8, 1, 5, 640, (16, 2)),
    ]


def test_descriptors_are_made_once_for_an_address(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_DESCRIPTORS", 2)
    kept = launch_of(Kernel())
    for address in (16, 32, 16, 32, 48, 48):
        kept.repeat(0, [address, 0])
    assert made == [16, 32, 48]
    kept.repeat(0, [16, 0])
    assert made == [16, 32, 48, 16], "no more than so many are kept"


def test_tensors_are_not_kept(made: list[int]) -> None:
    x, y = torch.zeros(4, 8), torch.zeros(4)
    with taking_notes() as notes:
        launch(Kernel(), (3,), x, Descriptor(x), 5, y, BLOCK=16)
    kept = Launch(notes.pop(), lambda tensor: 0)
    last = weakref.ref(x)
    del x
    gc.collect()
    assert last() is None
    kept.repeat(0, [16])
    assert made == [16]


def test_notes_are_taken_where_somebody_takes_them(made: list[int]) -> None:
    launch(Kernel(), (3,), torch.zeros(1))
    with taking_notes() as outer:
        launch(Kernel(), (1,))
        with taking_notes() as inner:
            launch(Kernel(), (2,))
        launch(Kernel(), (3,))
    assert [note.grid for note in outer] == [(1,), (3,)]
    assert [note.grid for note in inner] == [(2,)]


class TestNotRepeatable:
    """What only Triton can launch again."""

    def test_interpreted(self) -> None:
        kernel = Kernel()
        kernel.compiled = None
        with pytest.raises(NotRepeatableError):
            launch_of(kernel)

    def test_another_backend(self) -> None:
        with pytest.raises(NotRepeatableError, match="NVIDIA"):
            launch_of(Kernel("hip"))

    @pytest.mark.parametrize("meta", [None, [], [None]])
    def test_descriptors_without_the_copy_engine(self, meta: object) -> None:
        kernel = Kernel()
        kernel.compiled.metadata.tensordesc_meta = meta
        with pytest.raises(NotRepeatableError, match="copy engine"):
            launch_of(kernel)

    @pytest.mark.parametrize("unknown", [print, None, lambda *arguments: None])
    def test_another_launcher(self, unknown: Any, made: list[int]) -> None:
        kernel = Kernel()
        kernel.compiled.run.launch = unknown
        with pytest.raises(NotRepeatableError, match="launcher"):
            launch_of(kernel)


@pytest.mark.parametrize(
    ("room", "name", "value"),
    [
        ("runtime", "launch_enter_hook", print),
        ("runtime", "launch_exit_hook", SimpleNamespace(calls=[print])),
        ("runtime", "debug", True),
        ("runtime", "add_stages_inspection_hook", print),
        ("compilation", "instrumentation_mode", "iket"),
    ],
)
def test_who_watches_is_seen(
    room: str, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = pytest.importorskip("triton.knobs")
    assert not module.is_watched()
    monkeypatch.setattr(getattr(knobs, room), name, value)
    assert module.is_watched()
