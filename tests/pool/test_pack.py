"""From adapters to bytes: casts, padding, DoRA, biases, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from loraplex import AdapterError, UnsupportedAdapterError
from loraplex.adapters import Adapter, AdapterSpec, LayerLora, LayerShape, ModuleLora
from loraplex.pool.fold import column_scale


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("file_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_l46_cast_between_dtypes(
    kit: Any, file_dtype: torch.dtype, pool_dtype: torch.dtype
) -> None:
    pool = kit.pool(dtype=pool_dtype)
    adapter = kit.adapter(dtype=file_dtype)
    pool.add("a", adapter)
    kit.assert_serves(pool, "a", adapter)  # bit for bit what .to(dtype) gives


def test_l46_overflow_is_refused(kit: Any) -> None:
    pool = kit.pool(dtype=torch.float16)
    adapter = kit.adapter(dtype=torch.bfloat16)
    adapter.modules["layers.1.down"].b[3, 2] = 1e5
    with pytest.raises(
        AdapterError, match=r"layers.1.down.lora_B .* 9.9.e\+04.* overflow.*float16"
    ):
        pool.add("a", adapter)
    assert pool.names() == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_l49_values_that_are_not_finite_are_refused(kit: Any, value: float) -> None:
    pool = kit.pool()
    adapter = kit.adapter()
    adapter.modules["layers.0.q"].a[0, 0] = value
    with pytest.raises(AdapterError, match=r"layers.0.q.lora_A has NaN or infinity"):
        pool.add("a", adapter)
    assert pool.stats().host.used == 0


@pytest.mark.parametrize("rank", [1, 5, 8, 12, 33])
def test_ranks_are_padded_with_zeros(kit: Any, rank: int) -> None:
    pool = kit.pool()
    adapter = kit.adapter(rank=rank)
    pool.add("a", adapter)
    with pool.acquire(["a"]) as lease:
        kit.assert_slot(pool, lease.indices[0], adapter)
        for view in kit.read(pool, lease.indices[0]).values():
            assert view.a.shape[0] == view.b.shape[1] == -(-rank // 8) * 8
            assert not view.a[rank:].any()
            assert not view.b[:, rank:].any()


def test_s18_the_largest_rank_of_any_module_counts(kit: Any) -> None:
    pool = kit.pool(max_rank=16)
    adapter = kit.adapter(rank=8)
    wide = ModuleLora("layers.2.v", torch.zeros(64, 20), torch.zeros(12, 64), 1.0)
    mixed = Adapter(AdapterSpec(r=8), {**adapter.modules, wide.name: wide})
    with pytest.raises(AdapterError, match=r"rank 64 > 16.*layers\.2\.v"):
        pool.add("mixed", mixed)
    pool.add("narrow", adapter)
    kit.assert_serves(pool, "narrow", adapter)


def test_scaling_that_is_not_finite_is_refused(kit: Any) -> None:
    with pytest.raises(AdapterError, match="scaling that is not finite"):
        kit.pool().add("a", kit.adapter(scaling=math.inf))


def weights_of(layers: dict[str, LayerShape]) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape.out_features, shape.in_features, generator=draw)
        for name, shape in layers.items()
    }


def test_dora_is_a_column_scale(kit: Any) -> None:
    weights = weights_of(kit.layers())
    pool = kit.pool(base_weight=weights.__getitem__)
    adapter = kit.adapter(magnitude=lambda width: torch.arange(width) + 0.5)
    pool.add("dora", adapter)
    pool.add("plain", kit.adapter(seed=1))
    with pool.acquire(["dora", "plain"]) as lease:
        views = kit.read(pool, lease.indices[0])
        module, rows = adapter.modules["layers.1.k"], weights["layers.1.qkv"][20:32].double()
        merged = rows + module.scaling * module.b.double() @ module.a.double()
        want = module.magnitude.double() / merged.norm(dim=1)
        torch.testing.assert_close(views["layers.1.qkv", 1].column_scale, want.float())
        plain = kit.read(pool, lease.indices[1])
        assert plain["layers.1.qkv", 1].column_scale is None


def test_column_scale_in_blocks_equals_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, a, b = torch.randn(50, 30), torch.randn(4, 30), torch.randn(50, 4)
    magnitude = torch.rand(50)
    whole = column_scale(weight, a, b, 2.0, magnitude)
    monkeypatch.setattr("loraplex.pool.fold.SCRATCH_ELEMENTS", 100)
    torch.testing.assert_close(column_scale(weight, a, b, 2.0, magnitude), whole)


def test_dora_without_base_weight_is_refused(kit: Any) -> None:
    adapter = kit.adapter(magnitude=torch.ones)
    with pytest.raises(UnsupportedAdapterError, match=r"layers.0.q uses DoRA.*base_weight"):
        kit.pool().add("a", adapter)


def test_dora_on_a_zero_row_is_refused(kit: Any) -> None:
    weights = {name: torch.zeros_like(w) for name, w in weights_of(kit.layers()).items()}
    pool = kit.pool(base_weight=weights.__getitem__)
    adapter = kit.adapter(magnitude=torch.ones)
    for module in adapter.modules.values():
        module.b.zero_()
    with pytest.raises(AdapterError, match=r"DoRA scale of layers.0.q"):
        pool.add("a", adapter)


def test_base_weight_of_the_wrong_shape_is_named(kit: Any) -> None:
    pool = kit.pool(base_weight=lambda layer: torch.ones(4, 4))
    with pytest.raises(
        ValueError, match=r"base_weight\('layers.0.qkv'\) must have shape \[44, 20\]"
    ):
        pool.add("a", kit.adapter(magnitude=torch.ones))


@pytest.mark.parametrize("has_layer_bias", [True, False])
def test_biases_become_one_vector(kit: Any, has_layer_bias: bool) -> None:
    def base_bias(layer: str) -> torch.Tensor | None:
        return torch.full((kit.layers()[layer].out_features,), 0.25) if has_layer_bias else None

    pool = kit.pool(base_bias=base_bias)
    both = kit.adapter(
        scaling=4.0, lora_bias=torch.ones, bias=lambda width: torch.full((width,), 2.0)
    )
    pool.add("both", both)
    pool.add("lora", kit.adapter(scaling=4.0, lora_bias=torch.ones))
    pool.add("none", kit.adapter())
    with pool.acquire(["both", "lora"]) as lease:
        both_views, lora_views = (kit.read(pool, slot) for slot in lease.indices)
        trained = 2.0 - (0.25 if has_layer_bias else 0.0)
        torch.testing.assert_close(
            both_views["layers.2.qkv", 2].bias, torch.full((12,), 4.0 + trained)
        )
        torch.testing.assert_close(lora_views["layers.2.down", 0].bias, torch.full((20,), 4.0))
    with pool.acquire(["none"]) as lease:
        assert all(view.bias is None for view in kit.read(pool, lease.indices[0]).values())


def test_a_bias_without_lora_has_rank_zero(kit: Any) -> None:
    pool = kit.pool(base_bias=lambda layer: None)
    adapter = Adapter(
        AdapterSpec(r=8),
        kit.adapter(modules=("q",)).modules,
        biases={"layers.0.down": torch.arange(20.0)},
    )
    pool.add("a", adapter)
    with pool.acquire(["a"]) as lease:
        view = kit.read(pool, lease.indices[0])["layers.0.down", 0]
        assert view.a.shape[0] == 0
        torch.testing.assert_close(view.bias, torch.arange(20.0))


def test_biases_the_pool_was_not_made_for_are_refused(kit: Any) -> None:
    with pytest.raises(UnsupportedAdapterError, match=r"bias of its own.*has_bias"):
        kit.pool().add("a", kit.adapter(lora_bias=torch.ones))
    with pytest.raises(UnsupportedAdapterError, match=r"trained bias.*base_bias"):
        kit.pool(has_bias=True).add("a", kit.adapter(bias=torch.ones))
    pool = kit.pool(has_bias=True)
    pool.add("a", kit.adapter(lora_bias=torch.ones))
    assert pool.table("layers.0.down").has_bias


def test_parts_outside_the_layers_are_refused_by_name(kit: Any) -> None:
    pool = kit.pool()
    whole = Adapter(
        AdapterSpec(r=8), kit.adapter().modules, saved_modules={"lm_head.weight": torch.ones(4, 20)}
    )
    with pytest.raises(UnsupportedAdapterError, match=r"modules_to_save.*lm_head"):
        pool.add("a", whole)
    assert pool.names() == []


def test_an_adapter_that_matches_nothing_is_refused(kit: Any) -> None:
    pool = kit.pool(layers={"head": LayerShape.plain(20, 7)})
    with pytest.raises(AdapterError, match=r"head"):
        pool.add("a", kit.adapter())


@pytest.mark.parametrize(
    ("matched", "error", "said"),
    [
        ({"layers.9.down": LayerLora((None,))}, ValueError, r"6 of them\), got 'layers\.9\.down'"),
        ({"layers.0.qkv": LayerLora((None,))}, ValueError, "must have 3 slices, got 1"),
        ({"layers.0.down": LayerLora((None,) * 2)}, ValueError, "must have 1 slices, got 2"),
        ({"layers.0.down": None}, TypeError, "must be a LayerLora, got NoneType"),
    ],
    ids=["layer", "few", "many", "kind"],
)
def test_nothing_of_what_was_matched_is_left_out(
    kit: Any, matched: Any, error: type[Exception], said: str
) -> None:
    pool = kit.pool()
    with pytest.raises(error, match=said):
        pool.add("a", kit.adapter(), matched=matched)
    assert pool.names() == []
    assert pool.stats().host.used == 0


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"a": torch.ones(8, 20, dtype=torch.complex64)}, AdapterError, "dtype .*, got complex64"),
        ({"b": torch.ones(20, 8, dtype=torch.int32)}, AdapterError, "dtype .*, got int32"),
        ({"a": torch.ones(8, 20).to(torch.float8_e4m3fn)}, AdapterError, "got float8_e4m3fn"),
        ({"a": torch.ones(8, 20, device="meta")}, AdapterError, "on the meta device"),
        ({"a": torch.ones(8, 20).numpy()}, TypeError, "must be a torch.Tensor, got ndarray"),
        ({"bias": torch.ones(20, dtype=torch.bool)}, AdapterError, "dtype .*, got bool"),
        ({"b": torch.ones(20, 7)}, ValueError, r"lora_B must have shape \[20, 8\], got \(20, 7\)"),
        ({"scaling": 1e39}, AdapterError, r"scaling that is not finite in float32, 1e\+39"),
    ],
    ids=["complex", "int", "float8", "meta", "numpy", "bool-bias", "ranks", "scaling"],
)
def test_modules_that_no_folder_could_give_are_refused(
    kit: Any, change: dict[str, Any], error: type[Exception], said: str
) -> None:
    pool = kit.pool(has_bias=True, base_bias=lambda layer: None)
    adapter = kit.adapter(modules=("q",))
    name = "layers.0.q"
    broken = {**adapter.modules, name: dataclasses.replace(adapter.modules[name], **change)}
    with pytest.raises(error, match=said):
        pool.add("a", dataclasses.replace(adapter, modules=broken))
    assert pool.names() == []
    assert pool.stats().host.used == 0
