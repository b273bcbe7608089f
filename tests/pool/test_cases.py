"""Problems of other servers (rows S and P of the case list), each as a test."""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import loraplex as lp
from loraplex import AdapterError, AdapterExistsError, PoolFullError


def slot_bits(kit: Any, pool: Any, name: str) -> dict[Any, tuple[Any, ...]]:
    """Everything the kernels would read for a name, as comparable values."""
    with pool.acquire([name]) as lease:
        return {
            key: (view.a.tolist(), view.b.tolist(), view.scaling)
            for key, view in kit.read(pool, lease.indices[0]).items()
        }


def fresh_bits(kit: Any, adapter: Any) -> dict[Any, tuple[Any, ...]]:
    """The same from a pool that never held anything else."""
    pool = kit.pool(max_adapters=1)
    pool.add("x", adapter)
    return slot_bits(kit, pool, "x")


def test_s06_other_weights_under_an_old_name(kit: Any) -> None:
    pool = kit.pool(max_adapters=2)
    pool.add("a", kit.adapter(1))
    slot_bits(kit, pool, "a")
    pool.remove("a")
    pool.add("a", kit.adapter(2))
    assert slot_bits(kit, pool, "a") == fresh_bits(kit, kit.adapter(2))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rank": 8}, {"rank": 8, "modules": ("q",)}),
        ({"rank": 64}, {"rank": 8}),
        ({"rank": 64, "modules": ("k", "down")}, {"rank": 3, "modules": ("q", "v")}),
    ],
)
def test_s07_nothing_of_the_last_adapter_in_a_slot_is_left(
    kit: Any, old: dict[str, Any], new: dict[str, Any]
) -> None:
    pool = kit.pool(max_adapters=1)
    pool.add("x", kit.adapter(1, **old))
    pool.add("y", kit.adapter(2, **new))
    slot_bits(kit, pool, "x")
    assert slot_bits(kit, pool, "y") == fresh_bits(kit, kit.adapter(2, **new))


def test_s08_unloading_frees_the_slot_at_once(kit: Any) -> None:
    pool = kit.pool(max_adapters=2)
    for seed, name in enumerate("abc"):
        pool.add(name, kit.adapter(seed))
    pool.acquire(["b", "c"]).release()
    pool.remove("b")
    stats = pool.stats()
    assert (stats.slots_used, stats.registered, stats.host.adapters) == (1, 2, 2)
    pool.add("b", kit.adapter(7))
    pool.acquire(["b", "c"]).release()
    stats = pool.stats()
    assert (stats.slots_used, stats.registered, stats.host.adapters) == (2, 3, 3)
    assert stats.evictions == 0
    assert stats.device.used == 2 * pool.info("b").num_bytes


def test_s09_running_requests_end_on_their_own_weights(kit: Any) -> None:
    pool = kit.pool(max_adapters=2)
    first, second, other = (kit.adapter(seed) for seed in range(3))
    pool.add("a", first)
    pool.add("b", other)
    request = pool.acquire(["a"])
    (slot,) = request.indices
    pool.remove("a")
    pool.add("a", second)
    with pytest.raises(PoolFullError):  # two slots: the running request's and one more
        pool.acquire(["a", "b"])
    kit.assert_serves(pool, "b", other)
    kit.assert_serves(pool, "a", second)
    pool.add("a", kit.adapter(3), replace=True)
    kit.assert_slot(pool, slot, first)
    assert pool.stats().retired == 1
    request.release()
    assert pool.stats().retired == 0
    pool.acquire(["a", "b"]).release()


def test_s16_more_adapters_than_slots_take_turns(kit: Any) -> None:
    pool = kit.pool(max_adapters=1)
    adapters = {str(seed): kit.adapter(seed) for seed in range(4)}
    for name, adapter in adapters.items():
        pool.add(name, adapter)
    for _ in range(3):
        for name, adapter in adapters.items():
            kit.assert_serves(pool, name, adapter)
    assert pool.stats().evictions == 11


def test_s17_later_adapters_may_be_larger_or_elsewhere(kit: Any) -> None:
    pool = kit.pool(max_adapters=3, max_rank=64, device_bytes=1 << 20)
    first = kit.adapter(0, rank=8, modules=("q", "v"))
    pool.add("first", first)
    with pool.acquire(["first"]) as lease:
        pool.add("large", kit.adapter(1, rank=64))
        pool.add("mlp", kit.adapter(2, modules=("down",)))
        kit.assert_serves(pool, "large", kit.adapter(1, rank=64))
        kit.assert_serves(pool, "mlp", kit.adapter(2, modules=("down",)))
        kit.assert_slot(pool, lease.indices[0], first)
    with pytest.raises(AdapterError, match="rank 65 > 64"):
        pool.add("too large", kit.adapter(3, rank=65))


def test_s20_scaling_is_never_folded_into_the_weights(kit: Any) -> None:
    pool = kit.pool(max_adapters=1)
    pool.add("a", kit.adapter(0, scaling=4.0))
    pool.add("b", kit.adapter(1))
    uses = [slot_bits(kit, pool, name) for name in "ababa"]
    assert uses[0] == uses[2] == uses[4]
    assert {scaling for _, _, scaling in uses[0].values()} == {4.0}


def write_adapter(folder: Path, adapter: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tensors = {}
    for name, module in adapter.modules.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = module.a
        tensors[f"base_model.model.{name}.lora_B.weight"] = module.b
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in adapter.modules})
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 8, "lora_alpha": 4, "base_model_name_or_path": "tiny", '
        f'"target_modules": {targets!r}'.replace("'", '"')
        + "}"
    )
    return folder


def test_s24_files_may_change_after_loading(kit: Any, tmp_path: Path) -> None:
    pool = kit.pool(max_adapters=1)
    adapter = kit.adapter(0)
    folder = write_adapter(tmp_path / "a", adapter)
    pool.add("a", lp.load_adapter(folder))
    pool.add("b", kit.adapter(5))
    kit.assert_serves(pool, "a", adapter)
    write_adapter(folder, kit.adapter(1))
    kit.assert_serves(pool, "b", kit.adapter(5))  # so that "a" has to be loaded again
    kit.assert_serves(pool, "a", adapter)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    kit.assert_serves(pool, "b", kit.adapter(5))
    kit.assert_serves(pool, "a", adapter)


def test_s25_parallel_loads_and_unloads_of_one_name(kit: Any) -> None:
    pool = kit.pool(max_adapters=1)
    broken = kit.adapter(99)
    broken.modules["layers.0.q"].a[0, 0] = float("nan")
    outcomes: list[str] = []

    def load(seed: int) -> None:
        try:
            pool.add("a", broken if seed % 2 else kit.adapter(seed))
            outcomes.append("added")
        except AdapterExistsError:
            outcomes.append("exists")
        except AdapterError:
            outcomes.append("broken")

    def unload() -> None:
        try:
            pool.remove("a")
            outcomes.append("removed")
        except lp.UnknownAdapterError:
            outcomes.append("unknown")

    threads = [threading.Thread(target=load, args=(seed,)) for seed in range(20)]
    threads += [threading.Thread(target=unload) for _ in range(20)]
    for thread in threads[::3] + threads[1::3] + threads[2::3]:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(outcomes) == 40
    assert outcomes.count("removed") + outcomes.count("unknown") == 20
    copies = outcomes.count("added") - outcomes.count("removed")
    assert copies in (0, 1)
    stats = pool.stats()
    assert (stats.registered, stats.host.adapters, stats.retired) == (copies, copies, 0)
    assert len(pool.names()) == copies
    if copies:
        pool.remove("a")
    assert pool.stats().host.used == 0


def test_s27_unloaded_adapters_do_not_come_back(kit: Any) -> None:
    pool = kit.pool(max_adapters=2)
    for seed, name in enumerate("ab"):
        pool.add(name, kit.adapter(seed))
    pool.acquire(["a", "b"]).release()
    for name in "ab":
        pool.remove(name)
    pool.add("c", kit.adapter(2, modules=("v",)))
    assert pool.names() == ["c"]
    assert slot_bits(kit, pool, "c") == fresh_bits(kit, kit.adapter(2, modules=("v",)))
    with pytest.raises(lp.UnknownAdapterError):
        pool.acquire(["a"])
    with pool.acquire(["c"]) as lease:
        assert kit.read(pool, 1 - lease.indices[0]) == {}


def test_s30_one_folder_under_two_names(kit: Any) -> None:
    pool = kit.pool(max_adapters=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.add("a", kit.adapter(0, path="folder/p"))
    with pytest.warns(UserWarning, match="'b' comes from the same folder as 'a'") as caught:
        pool.add("b", kit.adapter(0, path="folder/p"))
    assert "folder/p" not in str(caught[0].message)
    assert caught[0].filename == __file__
    for path in ("folder/p", "folder/q"):
        with pytest.raises(AdapterExistsError):
            pool.add("a", kit.adapter(1, path=path))
    pool.add("a", kit.adapter(1, path="folder/q"), replace=True)
    kit.assert_serves(pool, "a", kit.adapter(1))


def test_a_warning_that_is_an_error_changes_nothing(kit: Any) -> None:
    pool = kit.pool(max_adapters=2)
    pool.add("a", kit.adapter(0, path="folder/p"))
    pool.add("b", kit.adapter(1))
    used = pool.stats().host.used
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in "bc":
            with pytest.raises(UserWarning, match="same folder as 'a'"):
                pool.add(name, kit.adapter(0, path="folder/p"), replace=True)
    assert pool.names() == ["a", "b"]
    assert pool.stats().host.used == used
    kit.assert_serves(pool, "b", kit.adapter(1))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_p13_memory_is_flat_over_many_loads(kit: Any) -> None:
    pool = kit.pool(max_adapters=4)
    for seed in range(8):
        pool.add(str(seed), kit.adapter(seed, rank=64))
    kept = kit.adapter(100, rank=64)
    settled, before = pool.stats().host.reserved, 0
    for turn in range(200):
        name = str(turn % 8)
        pool.remove(name)
        pool.add(name, kept)
        pool.acquire([name]).release()
        kit.synchronize()  # host pages that still feed a copy are not free for the next turn
        if turn == 50:
            before = resident_bytes()
            if pool.device.type == "cuda":
                before_device = torch.cuda.memory_allocated()
    assert pool.stats().host.reserved == settled
    # 150 adapters of about 240 kB; the margin is far below one leaked copy of each
    assert resident_bytes() - before < 8 << 20
    if pool.device.type == "cuda":
        assert torch.cuda.memory_allocated() == before_device
    assert pool.stats().host.adapters == 8
