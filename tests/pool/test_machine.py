"""The pool against a simple model, in any order of calls: weights are read back at every step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from loraplex import AdapterExistsError, PoolFullError, UnknownAdapterError
from loraplex.pool.disk import HEADER

NAMES = ("a", "b", "c", "d")
VARIANTS: tuple[dict[str, Any], ...] = (
    {"rank": 8},
    {"rank": 3, "modules": ("q", "v")},
    {"rank": 16, "modules": ("down",)},
    {"rank": 24},
    {"rank": 8, "modules": ("k",), "scaling": 4.0},
    {"rank": 17, "modules": ("q", "k", "v")},
)
SLOTS, ARENA = 3, 96 << 10


@dataclass(frozen=True, eq=False)
class Version:
    """One thing that a name stood for."""

    adapter: Any
    num_bytes: int


@dataclass
class Held:
    """A lease, and the version that each of its names stood for when it was acquired."""

    lease: Any
    versions: dict[str, Version]

    def slots(self) -> list[tuple[int, Version]]:
        places = dict(zip(self.lease.names, self.lease.indices, strict=True))
        return [(places[name], version) for name, version in self.versions.items()]


class PoolMachine(RuleBasedStateMachine):
    """``model`` maps each name to the version that the pool must serve under it."""

    kit: Any
    make_timeline: Callable[[], Any]

    @initialize(with_disk=st.booleans(), page_bytes=st.sampled_from([None, 1024]))
    def start(self, with_disk: bool, page_bytes: int | None) -> None:
        self.folder = tempfile.TemporaryDirectory() if with_disk else None
        self.streams = self.make_timeline()
        self.adapters = [self.kit.adapter(i, **v) for i, v in enumerate(VARIANTS)]
        self.has_spans = page_bytes is not None
        self.pool = self.kit.pool(
            max_adapters=SLOTS,
            device_bytes=ARENA,
            host_bytes=ARENA if with_disk else None,
            disk_dir=self.folder.name if self.folder else None,
            page_bytes=page_bytes,
            timeline=self.streams,
        )
        self.model: dict[str, Version] = {}
        self.pinned: dict[str, Version] = {}
        self.held: list[Held] = []
        self.findings: list[str] = []
        for variant, name in enumerate(NAMES):
            self.add(name, variant)

    @rule(name=st.sampled_from(NAMES), variant=st.integers(0, len(VARIANTS) - 1))
    def add_one(self, name: str, variant: int) -> None:
        self.add(name, variant)

    def add(self, name: str, variant: int) -> None:
        if name in self.model:
            with pytest.raises(AdapterExistsError):
                self.pool.add(name, self.adapters[variant])
        else:
            self.pool.add(name, self.adapters[variant])
            self.note(name, variant)

    @rule(name=st.sampled_from(NAMES), variant=st.integers(0, len(VARIANTS) - 1))
    def reload(self, name: str, variant: int) -> None:
        self.pool.add(name, self.adapters[variant], replace=True)
        self.note(name, variant)
        self.pinned.pop(name, None)  # the pin goes on, but nothing of the new one is resident

    def note(self, name: str, variant: int) -> None:
        self.model[name] = Version(self.adapters[variant], self.pool.info(name).num_bytes)

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        if name in self.model:
            self.pool.remove(name)
            del self.model[name]
            self.pinned.pop(name, None)
        else:
            with pytest.raises(UnknownAdapterError):
                self.pool.remove(name)

    @rule(name=st.sampled_from(NAMES))
    def acquire_unknown(self, name: str) -> None:
        if name not in self.model:
            with pytest.raises(UnknownAdapterError):
                self.pool.acquire([*self.model, name])

    @precondition(lambda self: self.model and len(self.held) < 2)
    @rule(data=st.data(), wait=st.booleans())
    def acquire(self, data: st.DataObject, wait: bool) -> None:
        """Take a lease and keep it."""
        held = self.lease(data, wait)
        if held is not None:
            self.held.append(held)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), wait=st.booleans())
    def use(self, data: st.DataObject, wait: bool) -> None:
        """One step: acquire, launch, release."""
        held = self.lease(data, wait)
        if held is not None:
            self.launch_reads(held)
            held.lease.release()

    def lease(self, data: st.DataObject, wait: bool) -> Held | None:
        choices = st.sampled_from([*sorted(self.model), None])
        names = data.draw(st.lists(choices, min_size=1, max_size=3))
        wanted = {name for name in names if name is not None}
        try:
            lease = self.pool.acquire(names, wait=wait)
        except PoolFullError:
            assert not self.fits(wanted)
            return None
        assert [index == -1 for index in lease.indices] == [name is None for name in names]
        if not wait:
            lease.wait()
        for name in wanted:
            if self.pool.info(name).is_pinned:
                self.pinned[name] = self.model[name]
        return Held(lease, {name: self.model[name] for name in wanted})

    def fits(self, wanted: set[str]) -> bool:
        """Whether slots and bytes suffice beside what is in use; runs of pages may need more."""
        versions = {self.model[name] for name in wanted} | set(self.pinned.values())
        versions |= {version for held in self.held for version in held.versions.values()}
        used = sum(version.num_bytes for version in versions)
        return len(versions) <= SLOTS and used <= ARENA and not self.has_spans

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """What the compute stream reads, whenever it executes, is what was acquired."""
        self.launch_reads(data.draw(st.sampled_from(self.held)))

    @precondition(lambda self: self.held)
    @rule(keep=st.integers(0, 1))
    def release(self, keep: int) -> None:
        """End all leases but the last few."""
        while len(self.held) > keep:
            self.held.pop(0).lease.release()

    @rule(name=st.sampled_from(NAMES))
    def pin_or_unpin(self, name: str) -> None:
        if name not in self.model:
            return
        for other in self.model:
            if self.pool.info(other).is_pinned:
                self.pool.unpin(other)
                self.pinned.pop(other, None)
                return  # one at a time, or little else fits
        try:
            self.pool.pin(name)
            self.pinned[name] = self.model[name]
        except PoolFullError:
            assert not self.fits({name})

    @rule()
    def trim(self) -> None:
        self.pool.trim()

    @precondition(lambda self: self.streams is not None)
    @rule(stream=st.sampled_from(["copy", "compute"]), count=st.integers(1, 20))
    def progress(self, stream: str, count: int) -> None:
        self.streams.run(stream, count)

    def launch_reads(self, held: Held) -> None:
        for slot, version in held.slots():
            if self.streams is None:
                self.check(slot, version)
            else:
                self.streams.launch(lambda slot=slot, version=version: self.check(slot, version))

    def check(self, slot: int, version: Version) -> None:
        finding = self.kit.mismatch(self.pool, slot, version.adapter)
        if finding:
            self.findings.append(finding)

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert sorted(self.pool.names()) == sorted(self.model)
        stats = self.pool.stats()
        assert stats.leases == len(self.held)
        for name in self.model:
            tiers = self.pool.info(name).tiers
            assert "host" in tiers or "disk" in tiers, f"{name} has no copy"
        if stats.disk is not None:
            sizes = [self.pool.info(name).num_bytes + HEADER.size for name in self.model]
            assert stats.disk.reserved == sum(sizes)
        for name in self.pinned:
            assert "device" in self.pool.info(name).tiers, f"{name} is pinned and was evicted"
        if self.streams is None:
            for held in self.held:
                for slot, version in held.slots():
                    self.check(slot, version)
        assert self.findings == []

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for held in self.held:
            held.lease.release()
        for name in list(self.model):
            self.pool.remove(name)
        if self.streams is not None:
            self.streams.drain()
        elif self.kit.device.type == "cuda":
            torch.cuda.synchronize()  # host pages come back once the copies out of them are done
        assert self.findings == []
        stats = self.pool.stats()
        assert (stats.registered, stats.resident, stats.retired, stats.leases) == (0, 0, 0, 0)
        assert stats.device.used == 0
        self.pool.trim()
        assert self.pool.stats().host.reserved == 0
        assert stats.disk is None or stats.disk.used == stats.disk.reserved == 0
        for slot in range(SLOTS):
            assert self.kit.read(self.pool, slot) == {}
        self.pool.close()
        if self.folder:
            self.folder.cleanup()


@pytest.mark.parametrize("has_streams", [False, True], ids=["at once", "two streams"])
def test_any_order_of_calls(kit: Any, has_streams: bool) -> None:
    if has_streams:
        kit.device = torch.device("cpu")

    class Machine(PoolMachine):
        pass

    Machine.kit = kit
    Machine.make_timeline = staticmethod(kit.streams if has_streams else lambda: None)
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=100, stateful_step_count=50, deadline=None)
    )
