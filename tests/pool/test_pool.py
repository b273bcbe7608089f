"""What the pool promises: slots, leases, eviction order, sizes, errors that change nothing."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import loraplex as lp
from loraplex import AdapterExistsError, PoolError, PoolFullError, UnknownAdapterError
from loraplex.adapters import Adapter, AdapterSpec, LayerLora, LayerShape


def test_acquire_gives_a_slot_per_name_and_minus_one_for_the_base(kit: Any) -> None:
    pool = kit.pool(max_adapters=3)
    adapters = {name: kit.adapter(seed) for seed, name in enumerate("abc")}
    for name, adapter in adapters.items():
        pool.add(name, adapter)
    with pool.acquire(["b", None, "a", "b", None]) as lease:
        b, none, a, again, last = lease.indices
        assert (none, last, again) == (-1, -1, b)
        assert a != b
        kit.assert_slot(pool, a, adapters["a"])
        kit.assert_slot(pool, b, adapters["b"])
    assert pool.names() == ["a", "b", "c"]
    assert "c" in pool
    assert len(pool) == 3
    assert pool.info("a").tiers == ("device", "host")
    assert pool.info("c").tiers == ("host",)


def test_acquire_of_nothing_and_of_the_base_alone(kit: Any) -> None:
    pool = kit.pool()
    with pool.acquire([]) as nothing, pool.acquire([None]) as base:
        assert nothing.indices == []
        assert base.indices == [-1]


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_the_ops_read_the_arena(kit: Any, impl: str) -> None:
    pool = kit.pool(max_adapters=3)
    adapters = {"a": kit.adapter(0, rank=5), "b": kit.adapter(1, rank=16, modules=("k", "down"))}
    for name, adapter in adapters.items():
        pool.add(name, adapter)
    names = ["b", None, "a", "b"]
    x = torch.randn(4, 20, device=pool.device)
    weight = torch.randn(44, 20, device=pool.device)
    with pool.acquire(names) as lease:
        indices = torch.tensor(lease.indices, device=pool.device)
        routing = lp.Routing.from_indices(indices, num_adapters=3)
        y = lp.lora_linear(x, weight, pool.table("layers.1.qkv"), routing, impl=impl)
    want = x.double() @ weight.double().T
    for row, name in enumerate(names):
        for member, columns in {"q": (0, 20), "k": (20, 32), "v": (32, 44)}.items():
            module = adapters[name].modules.get(f"layers.1.{member}") if name else None
            if module is not None:
                a, b = module.a.double().to(x.device), module.b.double().to(x.device)
                want[row, slice(*columns)] += module.scaling * (x[row].double() @ a.T) @ b.T
    torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_the_ops_apply_dora_and_biases(kit: Any, impl: str) -> None:
    layer, device = "layers.0.down", kit.device
    weights = {
        name: torch.randn(shape.out_features, shape.in_features, device=device)
        for name, shape in kit.layers().items()
    }
    pool = kit.pool(
        max_adapters=3,
        base_weight=weights.__getitem__,
        base_bias=lambda name: torch.ones(kit.layers()[name].out_features),
    )
    trained = torch.arange(20.0)
    pool.add("bias", Adapter(AdapterSpec(r=8), {}, biases={layer: trained}))
    dora = kit.adapter(1, magnitude=lambda width: torch.rand(width) + 0.5, lora_bias=torch.randn)
    pool.add("dora", dora)
    x, weight = torch.randn(3, 48, device=device), weights[layer]
    with pool.acquire(["bias", None, "dora"]) as lease:
        routing = lp.Routing.from_indices(lease.indices, num_adapters=3, device=device)
        table, bias = pool.table(layer), torch.ones(20, device=device)
        y = lp.lora_linear(x, weight, table, routing, bias=bias, impl=impl)
    module = dora.modules[layer]
    a, b, magnitude, lora_bias = (
        t.double().to(device) for t in (module.a, module.b, module.magnitude, module.lora_bias)
    )
    wide, base = weight.double(), x.double() @ weight.double().T
    scale = magnitude / (wide + module.scaling * b @ a).norm(dim=1)
    delta = module.scaling * (x[2].double() @ a.T @ b.T + lora_bias)
    want = torch.stack([base[0] + trained.to(device), base[1] + 1, scale * (base[2] + delta) + 1])
    torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)


def test_least_recently_used_leaves_first(kit: Any) -> None:
    pool = kit.pool(max_adapters=2)
    for seed, name in enumerate("abc"):
        pool.add(name, kit.adapter(seed))
    for name in ("a", "b", "a", "c"):
        pool.acquire([name]).release()
    assert [name for name in "abc" if "device" in pool.info(name).tiers] == ["a", "c"]
    assert (pool.stats().hits, pool.stats().misses, pool.stats().evictions) == (1, 3, 1)


def test_pinned_adapters_stay(kit: Any) -> None:
    pool = kit.pool(max_adapters=2)
    for seed, name in enumerate("abc"):
        pool.add(name, kit.adapter(seed))
    pool.pin("a")
    for name in ("b", "c", "b", "c"):
        pool.acquire([name]).release()
    assert pool.info("a").tiers == ("device", "host")
    with pytest.raises(PoolFullError, match="2 of 2 slots"):
        pool.acquire(["b", "c"])
    pool.add("a", kit.adapter(9), replace=True)
    assert pool.info("a").is_pinned
    pool.unpin("a")
    pool.acquire(["b", "c"]).release()


def test_leased_adapters_stay_and_keep_their_slots(kit: Any) -> None:
    pool = kit.pool(max_adapters=2)
    adapters = [kit.adapter(seed) for seed in range(3)]
    for seed, name in enumerate("abc"):
        pool.add(name, adapters[seed])
    lease = pool.acquire(["a"])
    (slot,) = lease.indices
    for name in ("b", "c", "b"):
        pool.acquire([name]).release()
    kit.assert_slot(pool, slot, adapters[0])
    with pytest.raises(PoolFullError):
        pool.acquire(["b", "c"])
    lease.release()
    lease.release()  # a second time changes nothing
    pool.acquire(["b", "c"]).release()
    with pytest.raises(PoolError, match="released"):
        _ = lease.indices


def test_a_full_pool_refuses_and_changes_nothing(kit: Any) -> None:
    pool = kit.pool(max_adapters=3, max_rank=16, device_bytes=3 * page_bytes_of(kit, 16))
    small, large = kit.adapter(0, rank=8), kit.adapter(1, rank=16)
    for name in "abc":
        pool.add(name, large)
    pool.add("small", small)
    lease = pool.acquire(["a", "b"])
    resident = [pool.info(name).tiers for name in pool.names()]
    with pytest.raises(PoolFullError, match=r"need \d+ bytes"):
        pool.acquire(["c", "small"])
    assert [pool.info(name).tiers for name in pool.names()] == resident
    assert pool.stats().leases == 1
    lease.release()


def page_bytes_of(kit: Any, rank: int) -> int:
    """Bytes of one adapter of that rank, by asking a pool that holds one."""
    probe = kit.pool(max_rank=rank)
    probe.add("probe", kit.adapter(rank=rank))
    return int(probe.info("probe").num_bytes)


def test_adapters_take_the_bytes_of_their_own_rank(kit: Any) -> None:
    layers = {f"layers.{i}.down": LayerShape.plain(48, 20) for i in range(192)}
    pool = kit.pool(max_adapters=8, max_rank=64, layers=layers)
    for rank in (8, 16, 64):
        pool.add(str(rank), kit.adapter(rank, rank=rank, modules=("down",), layers=192))
    for rank in (8, 16, 64):
        exact = 192 * rank * (48 + 20) * 4
        assert exact <= pool.info(str(rank)).num_bytes <= 1.1 * exact


def test_a_long_matrix_gets_consecutive_pages(kit: Any) -> None:
    pool = kit.pool(max_adapters=3, page_bytes=1024, max_rank=40)
    adapters = {str(rank): kit.adapter(rank, rank=rank) for rank in (40, 24, 33)}
    for name, adapter in adapters.items():
        pool.add(name, adapter)
    for _ in range(3):
        for name, adapter in adapters.items():
            kit.assert_serves(pool, name, adapter)


def test_too_large_for_the_arena_is_refused_at_add(kit: Any) -> None:
    pool = kit.pool(max_adapters=1, page_bytes=1024, device_bytes=4096)
    with pytest.raises(PoolFullError, match="more than the whole arena"):
        pool.add("a", kit.adapter())
    assert pool.names() == []


def test_unknown_names_change_nothing(kit: Any) -> None:
    pool = kit.pool()
    pool.add("secret", kit.adapter())
    for call in (pool.remove, pool.info, pool.is_ready, pool.pin, pool.unpin):
        with pytest.raises(UnknownAdapterError, match="'other'") as caught:
            call("other")
        assert "secret" not in str(caught.value)  # S31: no names of other tenants
    with pytest.raises(UnknownAdapterError, match="'other'"):
        pool.acquire(["secret", "other"])
    assert pool.stats().leases == 0
    assert pool.info("secret").leases == 0


def test_names_are_checked(kit: Any) -> None:
    pool = kit.pool()
    with pytest.raises(ValueError, match="name must not be empty"):
        pool.add("", kit.adapter())
    with pytest.raises(TypeError, match="name must be a str, got int"):
        pool.add(3, kit.adapter())
    for character in ("\0", "\n", "\x7f", "\x9b", "\u2028", "\ud800"):
        with pytest.raises(ValueError, match="name must have no control characters") as caught:
            pool.add(f"a{character}b", kit.adapter())
        assert repr(character) in str(caught.value)
        assert str(caught.value).isprintable()
    assert pool.names() == []
    for name in ("ein Name", "名前/v2", "👩‍🚀"):
        pool.add(name, kit.adapter())
        pool.remove(name)
    with pytest.raises(TypeError, match="single str 'abc'"):
        pool.acquire("abc")
    for call in (pool.acquire, pool.prefetch):
        with pytest.raises(TypeError, match="names must be a sequence of names, got None"):
            call(None)
    for call in (pool.remove, pool.pin, pool.unpin, pool.info, pool.is_ready):
        for bad in (None, 3, ["a"]):
            with pytest.raises(TypeError, match=f"name must be a str, got {type(bad).__name__}"):
                call(bad)
    with pytest.raises(TypeError, match="str and None, got int"):
        pool.acquire(["a", 3])
    with pytest.raises(TypeError, match=r"adapter must be an Adapter .*, got str"):
        pool.add("a", "path/to/adapter")
    for name in ("a/b", "ü", "x" * 5000, "..", "a:b"):  # S22: names are names, not paths
        pool.add(name, kit.adapter())
    assert len(pool) == 5


def test_adding_a_taken_name_is_refused(kit: Any) -> None:
    pool = kit.pool()
    first = kit.adapter(0)
    pool.add("a", first)
    with pytest.raises(AdapterExistsError, match="'a' already"):
        pool.add("a", kit.adapter(1))
    kit.assert_serves(pool, "a", first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_adapters": 0}, "max_adapters must be between 1"),
        ({"max_rank": 0}, "max_rank must be between 1"),
        ({"dtype": torch.int8}, "dtype must be float32, float16 or bfloat16, got int8"),
        ({"device_bytes": 0}, "device_bytes must be between 1"),
        ({"device_bytes": 1.5}, "device_bytes as a share must be above 0 and at most 1"),
        ({"device_bytes": 100, "page_bytes": 1024}, "device_bytes must hold a page of 1024"),
        ({"page_bytes": 100}, "page_bytes must be between 128"),
        ({"page_bytes": 200}, "page_bytes must be a multiple of 128"),
        ({"host_bytes": 1}, "host_bytes must be at least the arena's"),  # S16
        ({"disk_bytes": 1}, "disk_bytes needs disk_dir"),
        ({"disk_dir": "."}, "disk_dir needs host_bytes"),
        (
            {"disk_dir": ".", "host_bytes": 1 << 30, "disk_bytes": 1},
            "disk_bytes must be at least host_bytes",
        ),
        ({"disk_dir": "no/such/folder", "host_bytes": 1 << 30}, "disk_dir must be a folder that"),
        ({"device": "nowhere"}, "device 'nowhere' cannot be used here"),
        ({"device": "meta"}, "device must have memory, got 'meta'"),
        ({"layers": {"q": (8, 8)}}, r"layers must map names to LayerShape, got 'q': \(8, 8\)"),
        ({"layers": {3: LayerShape.plain(8, 8)}}, "layers must map names to LayerShape, got 3"),
        ({"layers": 5}, "layers must map names to LayerShape, got 5"),
        ({"layers": {"q": LayerShape.plain(8, 1 << 70)}}, "must have sizes that fit int32"),
        (
            {"layers": dict.fromkeys(("l0", "l1"), LayerShape(32, (32, 16), ("q", "k")))},
            "layers must have one place per name, got 'q' for 'l0' and 'l1'",
        ),
        ({"max_adapters": 1 << 31}, "max_adapters must be between 1 and 2147483647"),
        ({"max_rank": 1 << 31}, "max_rank must be between 1 and"),
        ({"page_bytes": 1 << 70}, "page_bytes must be between 128 and"),
        ({"device_bytes": 1 << 70}, "device_bytes must be between 1 and"),
        ({"device": []}, r"device must be a torch.device or its name, got \[\]"),
        ({"has_bias": "x"}, "has_bias must be True, False or None, got 'x'"),
        ({"base_model": 5}, "base_model must be a str or None, got 5"),
        ({"timeline": 5}, "timeline must be a Timeline, got 5 without adopt"),
        ({"disk_dir": 1.5, "host_bytes": 1 << 30}, r"disk_dir must be a str or PathLike\[str\]"),
        ({"disk_dir": b".", "host_bytes": 1 << 30}, r"disk_dir must be a str or PathLike\[str\]"),
        ({"base_weight": 3}, "base_weight must be a function"),
        ({"base_bias": torch.ones(3)}, "base_bias must be a function"),
    ],
)
def test_bad_sizes_are_refused(kit: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        kit.pool(**options)


def test_an_arena_that_cannot_be_had_is_named(kit: Any) -> None:
    with pytest.raises(PoolError, match=r"no memory for an arena of \d+ bytes \(device_bytes\)"):
        kit.pool(device_bytes=1 << 60)


def test_tables_that_cannot_be_had_are_named(kit: Any) -> None:
    with pytest.raises(PoolError, match=r"tables of 1000000000 slots \(max_adapters\)"):
        kit.pool(max_adapters=10**9, device_bytes=1 << 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strict": "no"}, "strict must be True or False, got 'no'"),
        ({"replace": "no"}, "replace must be True or False, got 'no'"),
        ({"matched": []}, r"matched must map layers to LayerLora, got \[\]"),
        (
            {"matched": {"layers.0.down": LayerLora(("x",))}},  # type: ignore[arg-type]
            "must hold ModuleLora and None, got 'x'",
        ),
    ],
)
def test_arguments_of_add_are_checked(kit: Any, options: dict[str, Any], message: str) -> None:
    pool = kit.pool()
    with pytest.raises(TypeError, match=message):
        pool.add("a", kit.adapter(), **options)
    assert pool.names() == []
    pool.add("a", kit.adapter())
    with pytest.raises(TypeError, match="wait must be True or False, got 'no'"):
        pool.acquire(["a"], wait="no")
    assert pool.stats().leases == 0


def test_a_name_may_be_of_a_subclass_of_str_everywhere(kit: Any) -> None:
    pool = kit.pool()
    name = np.str_("a")
    pool.add(name, kit.adapter())
    assert [type(other) for other in pool.names()] == [str]
    with pool.acquire([name, None, "a"]) as lease:
        assert lease.indices == [0, -1, 0]
    pool.prefetch([name]).result(timeout=30)
    pool.pin(name)
    pool.unpin(name)
    assert pool.info(name).name == "a"
    pool.remove(name)
    assert pool.names() == []


def test_layers_are_required_and_known(kit: Any) -> None:
    with pytest.raises(ValueError, match="layers must name at least one"):
        lp.AdapterPool({}, max_adapters=1, dtype=torch.float32, device="cpu")
    pool = kit.pool()
    with pytest.raises(ValueError, match="one of the pool's 6 layers, got 'x'"):
        pool.table("x")
    assert pool.table("layers.0.qkv") is pool.table("layers.0.qkv")


def test_a_share_of_the_free_memory(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex.pool.sizing.free_bytes", lambda device: 1_000_000)
    pool = kit.pool(device_bytes=0.5, page_bytes=4096)
    assert pool.stats().device.reserved == 500_000 // 4096 * 4096


def test_tables_stay_where_they_are(kit: Any) -> None:
    pool = kit.pool(max_adapters=1)
    tables = [pool.table(layer) for layer in pool.layers]
    addresses = [table.entries.data_ptr() for table in tables]
    for seed in range(3):
        pool.add(str(seed), kit.adapter(seed))
        pool.acquire([str(seed)]).release()
    assert [pool.table(layer).entries.data_ptr() for layer in pool.layers] == addresses
    assert all(table.storages == tables[0].storages for table in tables)


def test_prefetch_makes_resident_without_holding(kit: Any) -> None:
    pool = kit.pool(max_adapters=2)
    for seed, name in enumerate("abc"):
        pool.add(name, kit.adapter(seed))
    pool.prefetch(["a", "b"]).result(timeout=30)
    kit.assert_serves(pool, "a", kit.adapter(0))
    assert pool.is_ready("a")
    assert not pool.is_ready("c")
    assert pool.stats().leases == 0
    pool.prefetch(["c"]).result(timeout=30)
    with pytest.raises(UnknownAdapterError):
        pool.prefetch(["nobody"]).result(timeout=30)


def test_a_closed_pool_refuses_work(kit: Any) -> None:
    with kit.pool() as pool:
        pool.add("a", kit.adapter())
        lease = pool.acquire(["a"])
    for call in (
        lambda: pool.add("b", kit.adapter()),
        lambda: pool.acquire(["a"]),
        lambda: pool.remove("a"),
        lambda: pool.prefetch(["a"]),
    ):
        with pytest.raises(PoolError, match="closed"):
            call()
    kit.assert_slot(pool, lease.indices[0], kit.adapter())
    lease.release()


def drop_a_lease(pool: lp.AdapterPool) -> None:
    pool.acquire(["a"])
    gc.collect()


def test_a_released_lease_gives_nothing_out(kit: Any) -> None:
    pool = kit.pool()
    pool.add("a", kit.adapter())
    lease = pool.acquire(["a", None], wait=False)
    assert not lease.is_released
    assert "indices=[0, -1]" in repr(lease)
    lease.release()
    assert lease.is_released
    assert "released" in repr(lease)
    for use in (lease.wait, lambda: lease.wait("layers.0.down"), lambda: lease.indices):
        with pytest.raises(PoolError, match="lease was released"):
            use()


def test_a_dropped_lease_is_reported(kit: Any) -> None:
    pool = kit.pool()
    pool.add("a", kit.adapter())
    with pytest.warns(ResourceWarning, match="dropped without release"):
        drop_a_lease(pool)
    assert pool.stats().leases == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pool.acquire(["a"]):
            pass
        gc.collect()


def test_trim_returns_empty_host_memory(kit: Any) -> None:
    pool = kit.pool()
    for seed in range(8):
        pool.add(str(seed), kit.adapter(seed, rank=64))
    reserved = pool.stats().host.reserved
    assert pool.trim() == 0
    for seed in range(8):
        pool.remove(str(seed))
    assert pool.stats().host.used == 0
    assert pool.trim() == reserved
    assert pool.stats().host.reserved == 0
    kept = kit.adapter(9)
    pool.add("again", kept)
    kit.assert_serves(pool, "again", kept)
