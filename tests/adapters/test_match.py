"""Laying adapters out on layers: prefixes, packed and fused projections, shapes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters import (
    Adapter,
    AdapterSpec,
    EmbeddingLora,
    LayerShape,
    ModuleLora,
    load_adapter,
    match,
)
from loraplex.adapters.prefixes import find_renamings
from loraplex.errors import AdapterError, UnsupportedAdapterError

Make = Callable[..., Adapter]

ATTENTION = {"q_proj": (64, 64), "k_proj": (64, 16), "v_proj": (64, 16)}
PACKED = LayerShape(64, (64, 16, 16), ("q_proj", "k_proj", "v_proj"))


def llama_layers(prefix: str = "model.", layers: int = 2) -> dict[str, LayerShape]:
    found = {}
    for i in range(layers):
        for name, sizes in ATTENTION.items():
            found[f"{prefix}layers.{i}.self_attn.{name}"] = LayerShape.plain(*sizes)
        found[f"{prefix}layers.{i}.mlp.down_proj"] = LayerShape.plain(128, 64)
    return found


def llama_modules(prefix: str = "model.", *names: str) -> dict[str, tuple[int, int]]:
    return {
        f"{prefix}layers.{i}.self_attn.{name}": ATTENTION[name]
        for i in range(2)
        for name in names or ATTENTION
    }


# --- prefixes: L07, L28, L29 ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours", "renaming"),
    [
        pytest.param("model.", "model.", None, id="equal"),
        pytest.param("language_model.model.", "model.", ("language_model.", ""), id="L28-strip"),
        pytest.param("model.", "language_model.model.", ("", "language_model."), id="L28-add"),
        pytest.param("", "model.", ("", "model."), id="L07-bare-adapter"),
        pytest.param("model.", "", ("model.", ""), id="L07-bare-base"),
        pytest.param("model.language_model.", "language_model.model.",
                     ("model.language_model.", "language_model.model."), id="L28-swap"),
        pytest.param("module.model.", "model.", ("module.", ""), id="data-parallel"),
    ],
)  # fmt: skip
def test_one_prefix_is_exchanged(
    theirs: str, ours: str, renaming: tuple[str, str] | None, make_adapter: Make
) -> None:
    adapter = make_adapter(llama_modules(theirs))
    matching = match(adapter, llama_layers(ours))
    assert matching.renaming == renaming
    assert len(matching) == 6
    for name, lora in matching.items():
        assert lora.slices == (adapter.modules[theirs + name[len(ours) :]],)


def test_names_that_fit_stay_while_others_are_renamed(make_adapter: Make) -> None:
    modules = {**llama_modules("model.language_model."), "lm_head": (64, 96)}
    layers = {**llama_layers(), "lm_head": LayerShape.plain(64, 96)}
    matching = match(make_adapter(modules), layers)
    assert matching.renaming == ("language_model.", "") or matching.renaming == (
        "model.language_model.", "model.",
    )  # fmt: skip
    assert len(matching) == 7


@pytest.mark.parametrize("prefix", ["encoder.", "vision_model.encoder.", "model.decoder.", "foo."])
def test_parts_that_say_which_model_it_is_are_never_exchanged(
    prefix: str, make_adapter: Make
) -> None:
    with pytest.raises(AdapterError, match="6 of 6 parts of the adapter matched nothing"):
        match(make_adapter(llama_modules(prefix)), llama_layers())
    with pytest.raises(AdapterError, match="6 of 6 parts of the adapter matched nothing"):
        match(make_adapter(llama_modules()), llama_layers(prefix))


def test_two_ways_are_refused(make_adapter: Make) -> None:
    layers = {**llama_layers("language_model.model."), **llama_layers("text_model.model.")}
    with pytest.raises(AdapterError, match=r"more than one way .*language_model\..*text_model\."):
        match(make_adapter(llama_modules()), layers)


def test_another_layer_is_not_another_prefix(make_adapter: Make) -> None:
    """layers.5 of the adapter must not land on the only layer of a small model."""
    modules = {"model.layers.5.self_attn.q_proj": ATTENTION["q_proj"]}
    with pytest.raises(AdapterError, match="matched nothing"):
        match(make_adapter(modules), llama_layers("", layers=1))


def test_l28_message_shows_both_sides(make_adapter: Make) -> None:
    with pytest.raises(AdapterError) as caught:
        match(make_adapter(llama_modules("bert.")), llama_layers())
    message = str(caught.value)
    assert "the adapter has bert.layers.0.self_attn.k_proj" in message
    assert "the model has model.layers.0.self_attn.k_proj" in message
    assert "and 2 more" in message


def test_l29_nothing_of_it_in_the_allowed_layers(make_adapter: Make) -> None:
    layers = {n: s for n, s in llama_layers().items() if "down_proj" not in n}
    adapter = make_adapter({"model.layers.0.mlp.down_proj": (128, 64)})
    with pytest.raises(AdapterError, match="1 of 1 parts"):
        match(adapter, layers)
    with pytest.warns(UserWarning, match="match nothing in the model and are ignored: .*down_proj"):
        matching = match(adapter, layers, strict=False)
    assert len(matching) == 0
    assert matching.ignored == ("model.layers.0.mlp.down_proj",)


def test_a_part_that_matches_nothing_is_an_error_too(make_adapter: Make) -> None:
    modules = {**llama_modules(), "model.layers.7.self_attn.q_proj": ATTENTION["q_proj"]}
    adapter = make_adapter(modules)
    with pytest.raises(AdapterError, match=r"1 of 7 parts .*model\.layers\.7\.self_attn\.q_proj"):
        match(adapter, llama_layers())
    with pytest.warns(UserWarning, match=r"layers\.7"):
        assert len(match(adapter, llama_layers(), strict=False)) == 6


WRAPPED = st.lists(
    st.sampled_from(["model", "language_model", "transformer"]), max_size=3
).map(lambda parts: "".join(f"{part}." for part in parts))  # fmt: skip


@given(WRAPPED, WRAPPED)
def test_any_wrapping_is_undone_and_only_once(theirs: str, ours: str) -> None:
    suffixes = [f"layers.{i}.{m}" for i in range(2) for m in ("q_proj", "v_proj")]
    renamings = find_renamings([theirs + s for s in suffixes], [ours + s for s in suffixes])
    if theirs == ours:
        assert renamings == []
        return
    ((old, new),) = renamings
    assert theirs.startswith(old)
    assert new + theirs[len(old) :] == ours


# --- packed and fused: L26, L35 ---------------------------------------------------------------


@pytest.mark.parametrize(
    "present",
    [["q_proj", "k_proj", "v_proj"], ["q_proj", "v_proj"], ["k_proj"], ["v_proj"], ["q_proj"]],
    ids="-".join,
)
def test_l26_l35_members_of_a_packed_layer(present: list[str], make_adapter: Make) -> None:
    adapter = make_adapter(llama_modules("model.", *present))
    layers = {f"model.layers.{i}.self_attn.qkv_proj": PACKED for i in range(2)}
    matching = match(adapter, layers)
    assert set(matching) == set(layers)
    for i in range(2):
        parent = f"model.layers.{i}.self_attn"
        expected = tuple(adapter.modules.get(f"{parent}.{name}") for name in ATTENTION)
        assert matching[f"{parent}.qkv_proj"].slices == expected
        assert matching[f"{parent}.qkv_proj"].max_rank == 4


@pytest.mark.parametrize("present", [["in_qkv"], ["in_z"], ["in_qkv", "in_z"]], ids="-".join)
def test_l26_a_member_that_covers_several_slices(present: list[str], make_adapter: Make) -> None:
    sizes = {"in_qkv": (64, 96), "in_z": (64, 40)}
    adapter = make_adapter({f"mix.{name}": sizes[name] for name in present})
    layers = {"mix.in_proj": LayerShape(64, (64, 16, 16, 40), ("in_qkv",) * 3 + ("in_z",))}
    slices = match(adapter, layers)["mix.in_proj"].slices
    qkv, z = adapter.modules.get("mix.in_qkv"), adapter.modules.get("mix.in_z")
    assert slices[3] is z
    for part, (start, stop) in zip(slices, [(0, 64), (64, 80), (80, 96)], strict=False):
        if qkv is None:
            assert part is None
        else:
            assert part is not None
            assert torch.equal(part.b, qkv.b[start:stop])
            assert part.a is qkv.a


def fused(name: str, widths: tuple[int, ...]) -> ModuleLora:
    n = sum(widths)
    vectors = [torch.randn(n) for _ in range(3)]
    return ModuleLora(name, torch.randn(4, 64), torch.randn(n, 4), 2.0, *vectors)


@pytest.mark.parametrize(
    ("last", "members", "widths"),
    [
        ("qkv_proj", ("q_proj", "k_proj", "v_proj"), (64, 16, 16)),
        ("gate_up_proj", ("gate_proj", "up_proj"), (48, 48)),
        ("W_pack", ("q_proj", "k_proj", "v_proj"), (64, 64, 64)),
    ],
)
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "split"])
def test_fused_adapter(
    last: str, members: tuple[str, ...], widths: tuple[int, ...], is_packed: bool
) -> None:
    """A is shared, all that has one value per output is cut by rows."""
    module = fused(f"model.layers.0.x.{last}", widths)
    adapter = Adapter(AdapterSpec(r=4), {module.name: module})
    layers = (
        {f"model.layers.0.x.{last}": LayerShape(64, widths, members)}
        if is_packed
        else {
            f"layers.0.x.{m}": LayerShape.plain(64, w) for m, w in zip(members, widths, strict=True)
        }
    )
    matching = match(adapter, layers)
    parts = [part for name in layers for part in matching[name].slices]  # in the fused order
    assert len(parts) == len(widths)
    assert all(part is not None and part.a is module.a for part in parts)
    assert all(part is not None and part.scaling == 2.0 for part in parts)
    for attribute in ("b", "magnitude", "lora_bias", "bias"):
        joined = torch.cat([getattr(part, attribute) for part in parts])
        assert torch.equal(joined, getattr(module, attribute)), attribute


def test_fused_adapter_of_another_width() -> None:
    module = fused("layers.0.qkv_proj", (64, 16, 17))
    layers = {f"layers.0.{m}": LayerShape.plain(64, w[1]) for m, w in ATTENTION.items()}
    with pytest.raises(AdapterError, match=r"lora_B has shape \(97, 4\).*expected \(96, 4\)"):
        match(Adapter(AdapterSpec(r=4), {module.name: module}), layers)


def test_fused_needs_all_of_its_parts(make_adapter: Make) -> None:
    layers = {"layers.0.q_proj": LayerShape.plain(64, 64)}
    with pytest.raises(AdapterError, match="matched nothing"):
        match(make_adapter({"layers.0.qkv_proj": (64, 96)}), layers)


def test_split_adapter_on_a_fused_layer_without_members(make_adapter: Make) -> None:
    layers = {"layers.0.qkv_proj": LayerShape.plain(64, 96)}
    with pytest.raises(AdapterError, match=r"layers\.0\.qkv_proj is fused: its LayerShape has to"):
        match(make_adapter({"layers.0.q_proj": (64, 64)}), layers)


def test_two_parts_on_one_slice(make_adapter: Make) -> None:
    adapter = make_adapter({"a.qkv_proj": (64, 96), "a.k_proj": (64, 16)})
    with pytest.raises(AdapterError, match=r"both land on a\.qkv_proj"):
        match(adapter, {"a.qkv_proj": PACKED})


def test_model_with_one_name_twice(make_adapter: Make) -> None:
    layers = {"a.qkv_proj": PACKED, "a.q_proj": LayerShape.plain(64, 64)}
    with pytest.raises(ValueError, match=r"one place per name, got 'a\.q_proj'"):
        match(make_adapter({"a.q_proj": (64, 64)}), layers)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, (8,)), "in_features must be positive, got 0"),
        ((8, ()), "slices must be positive widths"),
        ((8, (8, 0), ("a", "b")), "slices must be positive widths"),
        ((8, (8, 8)), "members must name each of the 2 slices"),
        ((8, (8, 8), ("a", "")), "must not be empty"),
        ((8, (8, 8, 8), ("a", "b", "a")), "next to each other"),
    ],
)
def test_layer_shapes_are_checked(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LayerShape(*arguments)


# --- shapes: L20, L33, L48 --------------------------------------------------------------------


def test_l33_another_base_model(make_adapter: Make) -> None:
    adapter = make_adapter({"layers.0.q_proj": (40, 64)})
    with pytest.raises(AdapterError) as caught:
        match(adapter, {"layers.0.q_proj": LayerShape.plain(32, 64)})
    assert "layers.0.q_proj: lora_A has shape (4, 40)" in str(caught.value)
    assert "expected (4, 32)" in str(caught.value)


def test_l33_shapes_are_errors_also_when_not_strict(make_adapter: Make) -> None:
    layers = {"layers.0.q_proj": LayerShape.plain(64, 32)}
    with pytest.raises(AdapterError, match=r"expected \(32, 4\)"):
        match(make_adapter({"layers.0.q_proj": (64, 64)}), layers, strict=False)


def test_l20_head_with_added_tokens(make_adapter: Make) -> None:
    layers = {"lm_head": LayerShape.plain(64, 96)}
    with pytest.raises(AdapterError, match="98 against 96 rows: were added tokens"):
        match(make_adapter({"lm_head": (64, 98)}), layers)


def test_l20_embeddings_and_saved_modules_with_added_tokens() -> None:
    shapes = {"model.embed_tokens.weight": (96, 64)}
    lora = EmbeddingLora("model.embed_tokens", torch.ones(4, 98), torch.ones(64, 4), 1.0)
    adapter = Adapter(AdapterSpec(r=4), {}, embeddings={lora.name: lora})
    with pytest.raises(AdapterError, match="98 against 96 rows: were added tokens"):
        match(adapter, {}, parameters=shapes)
    saved = {"model.embed_tokens.weight": torch.ones(98, 64)}
    with pytest.raises(AdapterError, match="98 against 96 rows: were added tokens"):
        match(Adapter(AdapterSpec(), {}, saved_modules=saved), {}, parameters=shapes)


def test_weights_without_dimensions_are_an_error_like_other_shapes() -> None:
    shapes = {"lm_head.weight": (96, 64), "norm.bias": ()}
    for name, tensor in {"lm_head.weight": torch.ones(()), "norm.bias": torch.ones(3)}.items():
        adapter = Adapter(AdapterSpec(), {}, saved_modules={name: tensor}, path="test")
        with pytest.raises(AdapterError, match=rf"{name} is for a parameter of shape"):
            match(adapter, {}, parameters=shapes)


def test_l48_rank_above_both_sizes(make_adapter: Make) -> None:
    adapter = make_adapter({"layers.0.k_proj": (32, 16)}, rank=48)
    matching = match(adapter, {"layers.0.k_proj": LayerShape.plain(32, 16)})
    assert matching["layers.0.k_proj"].max_rank == 48


# --- other names and parts: L23, L50 ----------------------------------------------------------


@pytest.mark.parametrize("name", ["model.unembed_tokens", "unembed_tokens"])
def test_l23_unembed_tokens_is_the_head(name: str, make_adapter: Make) -> None:
    adapter = make_adapter({name: (64, 96)})
    layers = {**llama_layers(), "lm_head": LayerShape.plain(64, 96)}
    assert match(adapter, layers)["lm_head"].slices == (adapter.modules[name],)


def test_l23_without_a_head_it_is_shown(make_adapter: Make) -> None:
    with pytest.raises(AdapterError, match=r"model\.unembed_tokens"):
        match(make_adapter({"model.unembed_tokens": (64, 96)}), llama_layers())


@pytest.mark.parametrize("served", ["org/Tiny-8B", "/models/tiny-8b/", "tiny-8b"])
def test_l50_same_base(
    served: str, make_adapter: Make, recwarn: pytest.WarningsRecorder
) -> None:  # fmt: skip
    adapter = make_adapter(llama_modules())
    named = Adapter(AdapterSpec(r=4, base_model="other-org/Tiny-8B"), adapter.modules)
    assert match(named, llama_layers(), base_model=served)
    assert match(adapter, llama_layers(), base_model=served), "an adapter without a base name"
    assert not recwarn.list


def test_l50_another_base_is_a_warning(make_adapter: Make) -> None:
    modules = make_adapter(llama_modules()).modules
    adapter = Adapter(AdapterSpec(r=4, base_model="org/Tiny-8B-Instruct"), modules)
    with pytest.warns(UserWarning, match="trained on 'org/Tiny-8B-Instruct', the model is 'org/"):
        assert match(adapter, llama_layers(), base_model="org/Tiny-8B")


def test_parts_without_a_place_are_refused_by_name(make_adapter: Make) -> None:
    adapter = make_adapter(
        llama_modules(), saved_modules={"lm_head.weight": torch.ones(96, 64)}
    )  # fmt: skip
    with pytest.raises(UnsupportedAdapterError, match=r"lm_head\.weight \(modules_to_save\)"):
        match(adapter, llama_layers())
    with pytest.warns(UserWarning, match="lm_head"):
        matching = match(adapter, llama_layers(), strict=False)
    assert not matching.saved_modules
    placed = match(adapter, llama_layers(), parameters={"lm_head.weight": (96, 64)})
    assert list(placed.saved_modules) == ["lm_head.weight"]


def test_prefix_of_saved_modules_and_embeddings_is_exchanged_too(make_adapter: Make) -> None:
    lora = EmbeddingLora("model.language_model.embed", torch.ones(4, 96), torch.ones(64, 4), 1.0)
    adapter = make_adapter(
        llama_modules("model.language_model."),
        embeddings={lora.name: lora},
        saved_modules={"model.language_model.norm.weight": torch.ones(64)},
    )
    shapes = {"model.embed.weight": (96, 64), "model.norm.weight": (64,)}
    matching = match(adapter, llama_layers(), parameters=shapes)
    assert list(matching.embeddings) == ["model.embed"]
    assert list(matching.saved_modules) == ["model.norm.weight"]


def test_bias_without_lora_is_rank_0_on_a_linear_layer(make_adapter: Make) -> None:
    bias, norm = torch.randn(96), torch.randn(64)
    adapter = make_adapter({}, biases={"layers.0.qkv_proj": bias, "layers.0.norm": norm})
    layers = {"layers.0.qkv_proj": PACKED}
    with pytest.raises(UnsupportedAdapterError, match=r"layers\.0\.norm\.bias"):
        match(adapter, layers)
    matching = match(adapter, layers, parameters={"layers.0.norm.bias": (64,)})
    parts = matching["layers.0.qkv_proj"].slices
    assert [part and part.rank for part in parts] == [0, 0, 0]
    assert torch.equal(torch.cat([part.bias for part in parts if part]), bias)  # type: ignore[misc]
    assert list(matching.saved_modules) == ["layers.0.norm.bias"]


@pytest.mark.parametrize("shape", [(), (95,), (96, 1), (0,)], ids=str)
def test_bias_without_lora_of_another_shape(shape: tuple[int, ...], make_adapter: Make) -> None:
    adapter = make_adapter({}, biases={"layers.0.qkv_proj": torch.ones(shape)})
    said = rf"qkv_proj.bias has shape {re.escape(str(shape))}, .* expected \(96,\)"
    with pytest.raises(AdapterError, match=said):
        match(adapter, {"layers.0.qkv_proj": PACKED})


def test_phi3_adapter_on_split_layers_equals_peft(tiny: Any) -> None:
    """The fused delta of peft, cut by rows, is the delta of each of the split layers."""
    pytest.importorskip("peft")
    trained = tiny.train(
        "phi3", target_modules=["qkv_proj", "gate_up_proj"], with_logits=False
    )  # fmt: skip
    layers = {}
    for i in range(2):
        for name, n in {"q_proj": 32, "k_proj": 16, "v_proj": 16}.items():
            layers[f"model.layers.{i}.self_attn.{name}"] = LayerShape.plain(32, n)
        for name in ("gate_proj", "up_proj"):
            layers[f"model.layers.{i}.mlp.{name}"] = LayerShape.plain(32, 48)
    matching = match(load_adapter(trained.path), layers)
    assert len(matching) == len(layers)
    for i in range(2):
        for path, members in {
            "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
            "mlp.gate_up_proj": ("gate_proj", "up_proj"),
        }.items():
            name = f"model.layers.{i}.{path}"
            layer = trained.peft_model.base_model.model.get_submodule(name)
            deltas = []
            for member in members:
                (part,) = matching[f"{name.rpartition('.')[0]}.{member}"].slices
                assert part is not None
                deltas.append(part.scaling * part.b @ part.a)
            torch.testing.assert_close(torch.cat(deltas), layer.get_delta_weight("default"))
