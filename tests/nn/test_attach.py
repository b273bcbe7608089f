"""What attach takes, refuses, and gives back."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loraplex as lp
from loraplex.nn import LoraLinear
from loraplex.routing import Routing

pytestmark = pytest.mark.hf


@pytest.fixture
def attached(llama: Any, adapters: Mapping[str, Path]) -> Any:
    model = lp.attach(llama)
    model.add_adapter("mlp", adapters["mlp"])
    model.add_adapter("dora", adapters["dora"])
    return model


def test_layers_share_the_base_weights(llama: Any) -> None:
    before = {name: value.data_ptr() for name, value in llama.state_dict().items()}
    model = lp.attach(llama)
    assert model is llama
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
    wrapped = [name for name, layer in model.named_modules() if isinstance(layer, LoraLinear)]
    assert len(wrapped) == 2 * 7 + 1
    assert isinstance(model.lm_head, LoraLinear)


def test_detach_restores_everything(llama: Any, adapters: Mapping[str, Path]) -> None:
    kind, layers = type(llama), dict(llama.named_modules())
    weights = copy.deepcopy(llama.state_dict())
    own_method, state = llama.add_adapter.__func__, set(vars(llama))
    model = lp.attach(llama)
    model.add_adapter("mlp", adapters["mlp"])
    model.add_adapter("dora", adapters["dora"])
    assert type(model).__name__ == kind.__name__
    assert lp.detach(model) is llama
    assert type(llama) is kind
    assert {name: id(layer) for name, layer in llama.named_modules()} == {
        name: id(layer) for name, layer in layers.items()
    }
    for name, value in llama.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert llama.add_adapter.__func__ is own_method
    assert set(vars(llama)) == state
    with pytest.raises(TypeError, match="must be attached"):
        lp.detach(llama)
    lp.attach(llama)


def test_a_weight_replaced_while_attached_stays_replaced(llama: Any) -> None:
    model = lp.attach(llama)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(torch.zeros_like(layer.weight))
    assert layer.base.weight is layer.weight
    assert not lp.detach(model).model.layers[0].mlp.up_proj.weight.any()


def test_names_come_and_go(attached: Any, adapters: Mapping[str, Path]) -> None:
    assert attached.adapter_names() == attached.list_adapters() == ["mlp", "dora"]
    attached.add_adapter("same-folder", str(adapters["mlp"]))
    attached.add_adapter("loaded", lp.load_adapter(adapters["mlp"]))
    attached.remove_adapter("mlp")
    assert attached.adapter_names() == ["dora", "same-folder", "loaded"]
    with pytest.raises(lp.AdapterExistsError, match="dora"):
        attached.add_adapter("dora", adapters["mlp"])
    for name in ("", "__base__"):
        with pytest.raises(ValueError, match="base row"):
            attached.add_adapter(name, adapters["mlp"])
    with pytest.raises(lp.UnknownAdapterError, match=r"name is 'mlp'.*'dora', 'same-folder'"):
        attached.remove_adapter("mlp")


def test_a_message_lists_a_few_of_many_names(llama: Any, adapters: Mapping[str, Path]) -> None:
    model = lp.attach(llama)
    loaded = lp.load_adapter(adapters["patterns"])
    for number in range(20):
        model.add_adapter(f"{number}" + "x" * 1000, dataclasses.replace(loaded, path=""))
    with pytest.raises(lp.UnknownAdapterError, match="and 12 more$") as caught:
        model.remove_adapter("y" * 5000)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize("call", ["generate", "forward"])
@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["mlp", "nope"], lp.UnknownAdapterError, r"adapter_names\[1\] is 'nope'.*'mlp', 'dora'"),
        (["mlp"], ValueError, r"one name or None per row of the batch \(2\), got 1"),
        (["mlp"] * 4, ValueError, r"per row of the batch \(2\), got 4"),
        ([], ValueError, "got 0"),
        ("mlp", TypeError, "must be a list of names and None, got str"),
        (["mlp", 3], TypeError, r"adapter_names\[1\] must be a str or None, got int"),
    ],
)
def test_wrong_adapter_names(
    call: str, names: Any, error: type[Exception], message: str, attached: Any
) -> None:
    ids = torch.tensor([[5, 6], [7, 8]], device=attached.device)
    run = attached.generate if call == "generate" else attached.forward
    with pytest.raises(error, match=message):
        run(ids, adapter_names=names)
    # The failed call left no routing behind.
    with torch.no_grad():
        after = attached(ids).logits
    assert torch.equal(after, lp.detach(attached)(ids).logits)


def test_training_mode_is_refused(attached: Any) -> None:
    attached.train()
    with pytest.raises(ValueError, match="eval mode"):
        attached(torch.tensor([[5]], device=attached.device), adapter_names=["mlp"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"alora_invocation_tokens": [4, 2]}, r"alora \(alora_invocation_tokens=\[4, 2\]\)"),
        (
            {"trainable_token_indices": [3], "target_modules": ["lm_head"]},
            "lm_head has.*two kinds",
        ),
        ({"target_modules": ["embed_tokens"], "r": 65}, r"rank 65 > 64.*embed_tokens"),
    ],
    ids=["alora", "two-kinds", "embedding-rank"],
)
def test_what_is_not_carried_is_refused_by_name(
    config: Any, message: str, make_llama: Any, make_adapter: Any, tmp_path: Path
) -> None:
    model = make_llama(tie_word_embeddings=True)
    folder = make_adapter(model, tmp_path / "a", **{"r": 4, "target_modules": ["q_proj"]} | config)
    modules = list(model.modules())
    attached = lp.attach(model)
    with pytest.raises(lp.AdapterError, match=message):
        attached.add_adapter("a", folder)
    assert attached.adapter_names() == attached._loraplex.pool.names() == []
    assert list(lp.detach(attached).modules()) == modules


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"target_modules": ["lm_head"]}, "1 of 1 parts.*matched nothing.*lm_head"),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
            "lm_head.*did not exclude",
        ),
    ],
    ids=["lora", "modules_to_save"],
)
def test_an_adapter_on_an_excluded_head_is_refused(
    config: Any, message: str, cpu_llama: Any, llama: Any, make_adapter: Any, tmp_path: Path
) -> None:
    folder = make_adapter(cpu_llama, tmp_path / "a", r=4, **config)
    model = lp.attach(llama, exclude=("lm_head",))
    assert not isinstance(model.lm_head, LoraLinear)
    with pytest.raises(lp.AdapterError, match=message):
        model.add_adapter("a", folder)


def test_an_adapter_of_another_model_changes_nothing(
    llama: Any, make_llama: Any, make_adapter: Any, tmp_path: Path
) -> None:
    other = make_llama(hidden_size=48)
    folder = make_adapter(other, tmp_path / "a", r=4, target_modules=["q_proj"])
    model = lp.attach(llama)
    with pytest.raises(lp.AdapterError, match=r"q_proj.*4[08].*4[08]"):
        model.add_adapter("a", folder)
    assert model.adapter_names() == []


class Quantised(nn.Linear):
    """As in bitsandbytes: a subclass with a weight of its own."""


class Foreign(nn.Module):
    """As in GPTQ: sizes under other names."""

    infeatures, outfeatures = 40, 56


def _set(path: str, layer: nn.Module) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer)

    return change


def _int8(model: Any) -> None:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)


def _experts(model: Any) -> None:
    model.model.layers[0].mlp.experts = nn.ModuleList([nn.Linear(40, 56), nn.Linear(40, 56)])


def _peft(model: Any) -> None:
    peft = pytest.importorskip("peft")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


def _offload(model: Any) -> None:
    model.model.layers[0].mlp.up_proj._hf_hook = object()


def _hook(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)


def _share(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = model.model.layers[0].mlp.up_proj


UP = "model.layers.0.mlp.up_proj"
REFUSED = {
    "quantised": (_set(UP, Quantised(40, 56)), TypeError, rf"{UP}.*Quantised"),
    "foreign": (_set(UP, Foreign()), TypeError, rf"{UP}.*Foreign"),
    "int8": (_int8, TypeError, r"layers\.1\.mlp\.up_proj.*int8"),
    "meta": (_set(UP, nn.Linear(40, 56, device="meta")), TypeError, rf"{UP}.*meta"),
    "experts": (_experts, TypeError, r"mlp\.experts\.0.*expert"),
    "peft": (_peft, TypeError, r"q_proj.*unload PEFT"),
    "offloaded": (_offload, TypeError, rf"{UP}.*accelerate"),
    "hooked": (_hook, TypeError, rf"{UP}.*forward hooks"),
    "shared": (_share, TypeError, rf"{UP}.*layers\.1\.mlp\.up_proj.*one module"),
    "two-dtypes": (
        _set(UP, nn.Linear(40, 56, dtype=torch.float16)),
        ValueError,
        rf"one dtype.*float32.*{UP}.*float16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_cannot_have_adapters_are_refused_by_name(case: str, cpu_llama: Any) -> None:
    change, error, message = REFUSED[case]
    model = copy.deepcopy(cpu_llama)
    change(model)
    kind, layers = type(model), [id(layer) for layer in model.modules()]
    with pytest.raises(error, match=message):
        lp.attach(model)
    assert type(model) is kind
    assert [id(layer) for layer in model.modules()] == layers


def test_a_refused_layer_can_be_excluded(cpu_llama: Any, adapters: Mapping[str, Path]) -> None:
    model = copy.deepcopy(cpu_llama)
    _set(UP, Quantised(40, 56))(model)
    lp.attach(model, exclude=("lm_head", "mlp.up_proj")).add_adapter("a", adapters["attention"])
    with pytest.raises(lp.AdapterError, match="up_proj"):
        model.add_adapter("b", adapters["mlp"])
    with pytest.raises(ValueError, match=r"no part of the model: 'mlp\.upproj'"):
        lp.attach(copy.deepcopy(cpu_llama), exclude=("mlp.upproj",))


def test_models_that_cannot_be_attached(llama: Any) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    with pytest.raises(TypeError, match="PreTrainedModel"):
        lp.attach(nn.Linear(4, 4))
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, vocab_size=16)
    with pytest.raises(TypeError, match="encoder-decoder"):
        lp.attach(transformers.T5ForConditionalGeneration(config))
    wrapped = peft.get_peft_model(
        copy.deepcopy(llama), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    with pytest.raises(TypeError, match="model inside it"):
        lp.attach(wrapped)
    lp.attach(llama)
    with pytest.raises(ValueError, match="attached already"):
        lp.attach(llama)


def test_what_would_break_an_attached_model_is_refused(attached: Any) -> None:
    for change in (attached.half, attached.double, lambda: attached.to("meta")):
        with pytest.raises(lp.LoraplexError, match=r"loraplex\.detach"):
            change()
    sizes = [value.shape for value in attached.state_dict().values()]
    with pytest.raises(lp.LoraplexError, match=r"cannot change its vocabulary.*loraplex\.detach"):
        attached.resize_token_embeddings(100)
    assert [value.shape for value in attached.state_dict().values()] == sizes
    assert attached.resize_token_embeddings() is attached.get_input_embeddings()
    with pytest.raises(lp.LoraplexError, match="cannot be copied"):
        copy.deepcopy(attached)
    with pytest.raises(lp.LoraplexError, match="generate_batch cannot have adapter_names"):
        attached.generate_batch([[5, 6]], adapter_names=["mlp"])
    for method in ("load_adapter", "set_adapter", "disable_adapters", "delete_adapter"):
        with pytest.raises(lp.LoraplexError, match=f"{method} belongs to transformers"):
            getattr(attached, method)("mlp")


def test_base_only_steps_launch_no_lora(attached: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("lora_linear was called")

    monkeypatch.setattr("loraplex.nn.linear.lora_linear", fail)
    ids = torch.tensor([[5, 6], [7, 8]], device=attached.device)
    attached.generate(ids, max_new_tokens=3, adapter_names=[None, None])
    with pytest.raises(AssertionError, match="was called"):
        attached.generate(ids, max_new_tokens=3, adapter_names=[None, "mlp"])


def test_layers_that_no_adapter_of_the_step_changes_run_as_they_are(
    attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import loraplex.nn.linear as module

    shapes: list[torch.Size] = []
    lora_linear = module.lora_linear

    def spy(x: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        shapes.append(weight.shape)
        return lora_linear(x, weight, *args, **kwargs)

    monkeypatch.setattr(module, "lora_linear", spy)
    ids = torch.tensor([[5, 6]], device=attached.device)
    with torch.no_grad():
        attached(ids, adapter_names=["mlp"])
    assert shapes == [torch.Size(s) for s in [(56, 40), (56, 40), (40, 56)] * 2]


def test_routing_is_built_once_per_shape_not_per_layer_or_step(
    attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    update = Routing.update_

    def counting(self: Routing, indices: Any) -> Routing:
        built.append(len(indices))
        return update(self, indices)

    monkeypatch.setattr(Routing, "update_", counting)
    ids = torch.tensor([[5, 6, 7], [7, 8, 9]], device=attached.device)
    attached.generate(ids, max_new_tokens=6, adapter_names=["mlp", "dora"], num_beams=2)
    assert built == [2 * 2 * 3, 2 * 2]


@pytest.mark.gpu
def test_a_decoding_step_never_waits_for_the_gpu(attached: Any) -> None:
    layer = attached.model.layers[0].mlp.up_proj
    x = torch.randn(4, 1, 40, device=attached.device)
    with (
        torch.no_grad(),
        attached._loraplex.serving(["mlp", None, "dora", "mlp"], 4, may_expand=False),
    ):
        attached._loraplex.begin(4, 1)
        expected = layer(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            attached._loraplex.begin(4, 1)
            again = layer(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, expected)


def test_an_adapter_removed_while_it_generates_stays_until_the_end(
    attached: Any, adapters: Mapping[str, Path]
) -> None:
    ids = torch.tensor([[5, 6, 7]], device=attached.device)
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = attached.generate(ids, **options, adapter_names=["mlp"])

    class Replace:
        steps = 0

        def put(self, value: Any) -> None:
            self.steps += 1
            if self.steps == 3:
                attached.remove_adapter("mlp")
                attached.add_adapter("mlp", adapters["rslora"])

        def end(self) -> None:
            pass

    replaced = attached.generate(ids, **options, adapter_names=["mlp"], streamer=Replace())
    assert replaced.tolist() == expected.tolist()
    assert attached.generate(ids, **options, adapter_names=["mlp"]).tolist() != expected.tolist()


def test_threads_route_their_own_batches(attached: Any) -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 4]], device=attached.device)
    mixes = [["mlp", "dora"], ["dora", None], [None, "mlp"], ["dora", "mlp"]]
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = [attached.generate(ids, **options, adapter_names=names).tolist() for names in mixes]
    found: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        out = attached.generate(ids, **options, adapter_names=mixes[number])
        found[number] = out.tolist()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(mixes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(mixes))] == expected


def test_the_body_refuses_adapter_names(llama: Any, prompts: Any) -> None:
    model = lp.attach(llama)
    with pytest.raises(TypeError, match="adapter_names must be given to the attached"):
        model.model(**prompts, adapter_names=[None] * 3)
    body = lp.detach(model).model
    assert not body._forward_pre_hooks


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"impl": "foo"}, ValueError, "impl must be one of .*'foo'"),
        ({"exclude": "lm_head"}, TypeError, "exclude must be a sequence of names"),
        ({"exclude": None}, TypeError, "exclude must be a sequence of names, got the NoneType"),
        (
            {"exclude": ["lm_head", 3]},
            TypeError,
            "exclude must hold names of layers or parts, got 3",
        ),
        (
            {"exclude": ["b\0", "a"]},
            ValueError,
            r"exclude names no part of the model: 'a', 'b\\x00'$",
        ),
        ({"exclude": [""]}, TypeError, "exclude must hold names of layers or parts, got ''"),
        ({"dtype": torch.float16}, TypeError, "attach takes no argument 'dtype': the model says"),
        ({"max_adapters": 0}, ValueError, "max_adapters must be between 1 and .*, got 0"),
        ({"device_bytes": "1GB"}, TypeError, "device_bytes must be an int"),
    ],
)
def test_options_are_checked_before_anything_changes(
    options: dict[str, Any], error: type[Exception], said: str, llama: Any
) -> None:
    kind = type(llama)
    with pytest.raises(error, match=said):
        lp.attach(llama, **options)
    assert type(llama) is kind
