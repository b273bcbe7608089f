"""``loraplex inspect``: what adapter folders hold, and whether they fit a model."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from loraplex.adapters import (
    Adapter,
    EmbeddingLora,
    LayerShape,
    ModuleLora,
    ParameterLora,
    load_adapter,
    match,
    shape_in_model,
)
from loraplex.adapters.sorting import printable
from loraplex.cli.generate import DEMO
from loraplex.cli.render import Column, print_table
from loraplex.errors import AdapterError, UnsupportedAdapterError
from loraplex.nn.attachment import FEATURES

COLUMNS = (
    Column("adapter"),
    Column("base model"),
    Column("rank", True),
    Column("scale", True),
    Column("targets"),
    Column("dtype"),
    Column("size", True),
    Column("also"),
    Column("fits"),
)


@dataclass(frozen=True)
class ModelShapes:
    """The layers and parameters of a model folder; nothing but its config was read."""

    name: str
    layers: Mapping[str, LayerShape]
    parameters: Mapping[str, tuple[int, ...]]


@dataclass
class Report:
    """What `inspect` says about one folder; `fits` is None when no model was given."""

    path: str
    error: str | None = None
    base_model: str | None = None
    peft_version: str | None = None
    ranks: list[int] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    targets: dict[str, int] = field(default_factory=dict)
    dtypes: list[str] = field(default_factory=list)
    num_bytes: int = 0
    use_rslora: bool = False
    features: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    fits: bool | None = None
    is_partial: bool = False  # it fits, but --lenient left parts out
    why_not: str | None = None
    renaming: list[str] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_bad(self) -> bool:
        """Whether the folder cannot be loaded or does not fit."""
        return self.error is not None or self.fits is False


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "inspect",
        help="show what an adapter folder holds",
        description="Load PEFT LoRA folders as the library would and show their targets, ranks, "
        "scales, dtype and bytes; with --model, whether they fit that model and why not.",
        epilog="Exit codes: 0 all can be loaded (and fit), 1 some cannot, 2 wrong usage or input.",
    )
    parser.add_argument("folders", nargs="+", metavar="DIR", help="a PEFT adapter folder")
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="model folder, or 'demo' for the embedded model; only its config.json is read "
        "(extra: hf)",
    )
    parser.add_argument(
        "--lenient", action="store_true", help="ignore tensors and parts that match nothing"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(args: argparse.Namespace) -> int:
    """Inspect the folders."""
    model = None if args.model is None else read_model(args.model)
    reports = [inspect_folder(path, model, strict=not args.lenient) for path in args.folders]
    if args.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        _print(reports)
    return 1 if any(report.is_bad for report in reports) else 0


def inspect_folder(path: str, model: ModelShapes | None, *, strict: bool = True) -> Report:
    """Load one folder and say what it holds; a folder that cannot be loaded is a report too."""
    report = Report(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            adapter = load_adapter(path, strict=strict)
        except AdapterError as error:
            report.error = str(error)
        else:
            _describe(report, adapter)
            _note_unserved(report, adapter)
            if model is not None:
                _fit(report, adapter, model, strict=strict)
    report.notes += dict.fromkeys(str(warning.message) for warning in caught)
    return report


def _note_unserved(report: Report, adapter: Adapter) -> None:
    """An adapter may be valid, and fit, and still be none that an attached model carries."""
    try:
        adapter.require(FEATURES)
    except UnsupportedAdapterError as error:
        said = str(error).removeprefix(f"{adapter.path}: ")
        report.notes.append(f"attach cannot serve it: {said}")


def _describe(report: Report, adapter: Adapter) -> None:
    spec = adapter.spec
    parts: list[ModuleLora | EmbeddingLora | ParameterLora] = [
        *adapter.modules.values(),
        *adapter.embeddings.values(),
        *adapter.parameters.values(),
    ]
    report.base_model, report.peft_version = spec.base_model, spec.peft_version
    report.ranks = sorted({part.rank for part in parts})
    report.scales = sorted({part.scaling for part in parts})
    report.targets = dict(sorted(Counter(part.name.rpartition(".")[2] for part in parts).items()))
    report.dtypes = [str(dtype).removeprefix("torch.") for dtype in adapter.dtypes]
    report.num_bytes = adapter.num_bytes
    report.use_rslora = spec.use_rslora
    report.features = sorted(adapter.features)
    report.ignored = list(adapter.ignored)


def _fit(report: Report, adapter: Adapter, model: ModelShapes, *, strict: bool) -> None:
    try:
        matching = match(
            adapter,
            model.layers,
            parameters=model.parameters,
            base_model=model.name,
            strict=strict,
        )
    except AdapterError as error:
        report.fits, report.why_not = False, str(error)
        return
    parts = (matching.embeddings, matching.parameters, matching.token_rows, matching.saved_modules)
    report.fits = any(len(part) for part in (matching, *parts))
    report.why_not = None if report.fits else "no part of the adapter matches the model"
    report.is_partial = bool(matching.ignored)
    report.renaming = None if matching.renaming is None else list(matching.renaming)
    report.ignored += matching.ignored


def read_model(path: str) -> ModelShapes:
    """Layers and parameter shapes of a model folder, built without weights.

    Args:
        path: the folder, or ``"demo"`` for the embedded model, as for ``generate``.

    Raises:
        ImportError: transformers is not installed.
        ValueError: no config.json, or one that transformers cannot build a model from.
    """
    if path == DEMO:
        from loraplex.demo import NAME, demo_folder

        path = str(demo_folder() / NAME)
    if not os.path.isfile(os.path.join(path, "config.json")):
        raise ValueError(
            f"--model must be a folder with a config.json, or {DEMO!r} for the embedded model, "
            f"got {path!r}"
        )
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ImportError("--model needs transformers: pip install 'loraplex[hf]'") from error
    import torch

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # whatever transformers' own code runs into
        raise ValueError(f"--model {path}: {type(error).__name__}: {error}") from error
    text_config = config.get_text_config()
    layers: dict[str, LayerShape] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            layers[name] = shape_in_model(name, layer.in_features, layer.out_features, text_config)
        elif type(layer).__name__ == "Conv1D":
            layers[name] = LayerShape.plain(*layer.weight.shape)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return ModelShapes(getattr(config, "_name_or_path", "") or path, layers, shapes)


def _print(reports: list[Report]) -> None:
    labels = _short_labels([report.path for report in reports])
    rows = [
        [printable(cell) for cell in _row(label, report)]
        for label, report in zip(labels, reports, strict=True)
    ]
    bad = [number for number, report in enumerate(reports) if report.is_bad]
    print_table(COLUMNS, rows, bad_rows=bad)
    for label, report in zip(labels, reports, strict=True):
        said = [report.error, report.why_not, *report.notes]
        if report.renaming is not None:
            said.append("prefix {!r} in the adapter is {!r} in the model".format(*report.renaming))
        if report.ignored:
            said.append(f"ignored: {', '.join(report.ignored[:8])}")
        for text in filter(None, said):
            print(printable(f"{label}: {text.removeprefix(f'{report.path}: ')}", limit=2000))


def _row(label: str, report: Report) -> list[str]:
    if report.error is not None:
        return [label, "", "", "", "", "", "", "", "cannot be loaded"]
    also = (["rslora"] if report.use_rslora else []) + report.features
    fits = {None: "", True: "in part" if report.is_partial else "yes", False: "no"}[report.fits]
    return [
        label,
        report.base_model or "?",
        _span(report.ranks, "d"),
        _span(report.scales, ".4g"),
        _targets(report.targets),
        ", ".join(report.dtypes),
        _size(report.num_bytes),
        ", ".join(also),
        fits,
    ]


def _span(values: list[Any], spec: str) -> str:
    """``8`` or ``4..16``."""
    ends = [format(value, spec) for value in values[:1] + values[-1:]]
    return "..".join(dict.fromkeys(ends))


def _targets(targets: Mapping[str, int]) -> str:
    """``q_proj, v_proj ×12``, grouped by how often a target occurs."""
    groups: dict[int, list[str]] = {}
    for name, count in targets.items():
        groups.setdefault(count, []).append(name)
    return "; ".join(
        f"{', '.join(names)}{f' ×{count}' if count > 1 else ''}"
        for count, names in sorted(groups.items(), reverse=True)
    )


def _size(num_bytes: int) -> str:
    """Three digits and a unit."""
    number, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while number >= 999.5 and len(units) > 1:  # it would be shown as 1e+03
        number /= 1000
        units.pop(0)
    return f"{number:.3g} {units[0]}"


def _short_labels(paths: Iterable[str]) -> list[str]:
    """Folder names where they are distinct, else the whole paths."""
    paths = list(paths)
    names = [os.path.basename(os.path.normpath(path)) for path in paths]
    return names if len(set(names)) == len(names) else paths
