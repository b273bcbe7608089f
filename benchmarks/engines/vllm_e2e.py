#!/usr/bin/env python3
"""vLLM end to end: without LoRA, with its own LoRA, and with loraplex, on one machine in one run.

    python benchmarks/engines/vllm_e2e.py --out DIR                       # main table, log-probs
    python benchmarks/engines/vllm_e2e.py --out DIR --groups rank64,many  # rank 64; 64 adapters
    python benchmarks/engines/vllm_e2e.py --out DIR --groups main --loads 64x128x128 --profile 0

Engines of a group start side by side (--apart: one after the other), each in its own process with
the same settings, and are measured one at a time, in turns, so that a drift of the machine meets
all of them. The model has Llama-3-8B's shape and dummy weights, the adapters are random and on all
linear layers. A run is timed with one new token and with all of them: the time per output token is
the difference over the tokens between. The group `demo` compares log-probabilities on loraplex's
embedded model, which has real structure: ours and vLLM's own, beside float32 with the adapter
merged into the weights.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from vllm_engine import DEMO_ADAPTERS, ROOT, demo_folder, write_adapters, write_model

START = time.time()
EngineKind = tuple[str, int, int]  # name, rank (0: without LoRA), slots
GROUPS: dict[str, list[EngineKind]] = {
    "main": [("base", 0, 0), ("own-r16", 16, 8), ("loraplex-r16", 16, 8)],
    "rank64": [("own-r64", 64, 8), ("loraplex-r64", 64, 8)],
    "many": [("own-r16x64", 16, 64), ("loraplex-r16x64", 16, 64)],
    "demo": [("own-demo", 32, 8), ("loraplex-demo", 32, 8)],
}
DEMO_NEW = 24
# vLLM 0.26 takes one scale for all modules of an adapter, and this one has several
OTHER_SCALE = "french"
Row = tuple[list[int], "str | None"]  # tokens, adapter


def say(*words: object) -> None:
    print(f"[{time.time() - START:6.1f}s]", *words, flush=True)


def install_here(work: Path) -> dict[str, str]:
    """Environment in which vLLM finds this checkout's plugin, as after `pip install`."""
    sys.path.insert(0, str(ROOT / "src"))
    from loraplex.version import __version__

    info = work / "site" / f"loraplex-{__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: loraplex\nVersion: {__version__}\n"
    )
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nloraplex = loraplex.engines.vllm.plugin:load\n"
    )
    path = [str(ROOT / "src"), str(work / "site"), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(p for p in path if p),
        # the sampler asks for flashinfer without looking whether it is there; these runs are greedy
        "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


class Child:
    """An engine's process, as the parent sees it."""

    def __init__(self, args: argparse.Namespace, name: str, rank: int, slots: int) -> None:
        self.name, self.rank, self.slots = name, rank, slots
        self.is_demo = name.endswith("demo")
        self.log = Path(args.out) / f"engine_{name}.log"
        address = f"{args.work}/{name}.sock"
        Path(address).unlink(missing_ok=True)
        self.listener = Listener(address, "AF_UNIX")
        command = [
            sys.executable, str(Path(__file__).with_name("vllm_engine.py")), "--engine", name,
            "--address", address, "--work", args.work, "--rank", str(rank), "--slots", str(slots),
            "--max-seqs", str(args.max_seqs), "--tp", str(args.tp), "--kv-gib", str(args.kv_gib),
            "--demo-backend", args.demo_backend,
        ]  # fmt: skip
        env = {**os.environ, **args.env, "LORAPLEX": str(int(name.startswith("loraplex")))}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.link: Connection | None = None
        self.about: dict[str, Any] = {}

    def wait(self, deadline: float) -> bool:
        """Whether the engine is ready by then."""
        self.listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        while time.time() < deadline and self.process.poll() is None:
            with contextlib.suppress(TimeoutError):
                self.link = self.link or self.listener.accept()
            with contextlib.suppress(EOFError, ConnectionError):
                if self.link is not None and self.link.poll(1.0):
                    self.about = self.link.recv()
                    return True
        return False

    def ask(self, name: str, *values: Any) -> Any:
        assert self.link is not None
        self.link.send((name, values))
        return self.link.recv()

    def plugin(self) -> str:
        """What the log says about loraplex."""
        lines = [x for x in self.log.read_text().splitlines() if "loraplex" in x and " is o" in x]
        return lines[-1][lines[-1].rindex("loraplex ") :] if lines else "silent"

    def end(self) -> None:
        if self.link:
            self.link.close()
        self.link = None
        self.listener.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


def batches(args: argparse.Namespace) -> Iterator[list[EngineKind]]:
    """Engines that start together: the small ones of the demo beside the next group's."""
    waiting: list[EngineKind] = []
    for group in args.groups.split(","):
        engines = [engine for engine in GROUPS[group] if args.base or engine[1]]
        if group == "demo" and not args.apart:
            waiting = engines
        elif group != "demo" and args.apart:
            yield from ([engine] for engine in engines)
        else:
            yield waiting + engines
            waiting = []
    if waiting:
        yield waiting


def start(args: argparse.Namespace, engines: list[EngineKind]) -> list[Child]:
    """The engines that are ready, in this order; a word about those that are not."""
    say("engines start:", *(name for name, _, _ in engines))
    children = [Child(args, *engine) for engine in engines]
    for rank in {child.rank for child in children if not child.is_demo} - {0}:
        write_adapters(Path(args.work) / "adapters", rank)
    ready = []
    for child in children:
        if not child.wait(START + args.limit):
            tail = "\n".join(child.log.read_text().splitlines()[-15:])
            say(f"{child.name} did not start:\n{tail}")
            child.end()
            continue
        plugin = child.plugin()
        say(f"{child.name}: ready in {child.about['ready_s']:.0f} s; loraplex: {plugin}")
        if child.name.startswith("loraplex") and " is on" not in plugin:
            say(f"{child.name} would measure vLLM's own path and is left out")
            child.end()
            continue
        ready.append(child)
    return ready


def measure(args: argparse.Namespace, children: list[Child]) -> Iterator[dict[str, Any]]:
    """A row per load, engine and case; runs take turns."""
    jobs = [
        (child, case)
        for child in children
        for case in (("none", "one", "all") if child.rank else ("none",))
        if not args.cases or case in args.cases.split(",")
    ]
    for load in args.loads.split(","):
        if time.time() > START + args.limit:
            say(f"out of time: {load} is left out")
            continue
        batch, prompt, new = map(int, load.split("x"))
        for child, case in jobs:
            child.ask("run", case, batch, prompt, new)
        runs: dict[tuple[str, str], list[tuple[float, float]]] = collections.defaultdict(list)
        for _ in range(args.repeat):
            for child, case in jobs:
                first = child.ask("run", case, batch, prompt, 1)
                full = child.ask("run", case, batch, prompt, new) if new > 1 else first
                runs[child.name, case].append((first, full))
        for child, case in jobs:
            row = make_row(child, case, batch, prompt, new, runs[child.name, case])
            say(line(row))
            yield row


def make_row(
    child: Child, case: str, batch: int, prompt: int, new: int, runs: list[tuple[float, float]]
) -> dict[str, Any]:
    rate = [batch * new / full if new > 1 else batch * prompt / first for first, full in runs]
    token = [1e3 * (full - first) / (new - 1) for first, full in runs] if new > 1 else []
    middle = statistics.median(rate)
    return {
        "engine": child.name, "rank": child.rank, "slots": child.slots, "case": case,
        "batch": batch, "prompt": prompt, "new": new, "rate": middle,
        "unit": "out tok/s" if new > 1 else "in tok/s",
        "spread": (max(rate) - min(rate)) / middle,
        "ms_per_token": statistics.median(token) if token else None, "runs": runs,
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    token = f"{row['ms_per_token']:7.3f} ms/token" if row["ms_per_token"] else " " * 16
    return (
        f"{row['batch']:3d}x{row['prompt']}x{row['new']:<4d} {row['engine']:16s} {row['case']:5s}"
        f"{row['rate']:9.0f} {row['unit']:9s} {token}  spread {100 * row['spread']:.1f}%"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: each load and kind of requests, as parts of the engine without LoRA."""
    base = {(r["batch"], r["prompt"], r["new"]): r["rate"] for r in rows if r["engine"] == "base"}
    out = [
        "| load | requests | engine | tokens/s | ms per token | of no LoRA | spread |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for r in sorted(rows, key=lambda r: (r["new"] == 1, -r["batch"], r["case"], r["engine"])):
        reference = base.get((r["batch"], r["prompt"], r["new"]))
        part = f"{r['rate'] / reference:.3f}" if reference else ""
        token = f"{r['ms_per_token']:.3f}" if r["ms_per_token"] else ""
        out.append(
            f"| {r['batch']} x {r['prompt']} x {r['new']} | {r['case']} | {r['engine']} | "
            f"{r['rate']:.0f} | {token} | {part} | {100 * r['spread']:.1f} % |"
        )
    return "\n".join(out)


# Log-probabilities on the embedded model


def demo_rows() -> list[Row]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(demo_folder() / "loraplex-demo"))
    prompts = ["what is the sea?", "where is the old house?", "who are you?", "is the tea hot?"]
    return [
        (tokenizer(prompt)["input_ids"], adapter)
        for prompt in prompts
        for adapter in [None, *DEMO_ADAPTERS]
    ]


def merged_logprobs(whole: list[Row]) -> list[list[float]]:
    """Float32 on the CPU with the adapter merged: the log-probability of every token but one."""
    import torch
    from transformers import AutoModelForCausalLM

    from loraplex.adapters import load_adapter

    found: list[list[float]] = [[] for _ in whole]
    for adapter in dict.fromkeys(own for _, own in whole):
        model = AutoModelForCausalLM.from_pretrained(
            str(demo_folder() / "loraplex-demo"), dtype=torch.float32
        )
        if adapter:
            for name, module in load_adapter(demo_folder() / "adapters" / adapter).modules.items():
                weight = model.get_submodule(name).weight.data
                weight += module.scaling * (module.b.float() @ module.a.float())
        for number, (tokens, own) in enumerate(whole):
            if own == adapter:
                ids = torch.tensor([tokens])
                with torch.no_grad():
                    logs = model(ids).logits.log_softmax(-1)[0, :-1]
                found[number] = logs.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return found


def compare_demo(children: list[Child]) -> dict[str, Any]:
    """How far ours and vLLM's own are from float32 and from each other, on the same tokens."""
    engines = {child.name.partition("-")[0]: child for child in children}
    own, rows = engines["own"], demo_rows()
    decoded = {name: child.ask("score", rows, DEMO_NEW) for name, child in engines.items()}
    # the same tokens for both: prompt and reply of vLLM's own, as one prompt, all rows together
    whole = [([*t, *r["tokens"]], a) for (t, a), r in zip(rows, decoded["own"], strict=True)]
    prefill = {name: [s["prompt"] for s in c.ask("score", whole, 1)] for name, c in engines.items()}
    alone = [own.ask("score", [one], 1)[0]["prompt"] for one in whole]
    base = [s["prompt"] for s in own.ask("score", [(tokens, None) for tokens, _ in whole], 1)]
    known = [number for number, (_, adapter) in enumerate(whole) if adapter != OTHER_SCALE]
    truth = merged_logprobs([whole[number] for number in known])
    pairs = list(zip(decoded["own"], decoded["loraplex"], strict=True))
    steps = [same_steps(*pair) for pair in pairs]
    result: dict[str, Any] = {
        "rows": len(rows),
        "greedy_replies_equal": sum(a["tokens"] == b["tokens"] for a, b in pairs),
        "decode_loraplex_to_own": apart(*([[p[i] for p in row] for row in steps] for i in (0, 1))),
        "loraplex_to_own": apart(prefill["loraplex"], prefill["own"]),
        "own_to_itself_alone": apart(alone, prefill["own"]),
        "own_to_float32": apart([prefill["own"][number] for number in known], truth),
        "loraplex_to_float32": apart([prefill["loraplex"][number] for number in known], truth),
        "what_adapters_change": apart(base, prefill["own"]),
    }
    # as everywhere in loraplex: at most twice the error of the other, and one rounding of bfloat16
    limit = 2 * result["own_to_float32"]["mean"] + 2**-8
    result["agrees"] = result["loraplex_to_float32"]["mean"] <= limit
    return result


def same_steps(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[float, float]]:
    """Log-probabilities of the replies' tokens up to where the replies part."""
    pairs = zip(a["tokens"], b["tokens"], a["reply"], b["reply"], strict=True)
    return [(x, y) for _, _, x, y in itertools.takewhile(lambda p: p[0] == p[1], pairs)]


def apart(a: list[list[float]], b: list[list[float]]) -> dict[str, float]:
    """How far two lists of lists of numbers are from each other."""
    gaps = [abs(x - y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
    return {"mean": statistics.fmean(gaps), "max": max(gaps)}


def run(args: argparse.Namespace, children: list[Child], result: dict[str, Any]) -> None:
    """Everything that is measured on engines that have started together."""
    result["engines"] += [
        {"engine": child.name, **child.about, "loraplex": child.plugin()} for child in children
    ]
    demo = [child for child in children if child.is_demo]
    if len(demo) == 2:
        result["demo"] = compare_demo(demo)
        say(json.dumps(result["demo"]))
    for child in demo:
        child.end()
    children = [child for child in children if not child.is_demo]
    for row in measure(args, children):
        result["rows"].append(row)
        save(args, result)
    for child in children if args.profile else []:
        case = "all" if child.rank else "none"
        result["kernels"][f"{child.name} {case}"] = top = child.ask("profile", case)
        total = sum(ms for _, ms, _ in top) or 1.0
        say(f"{child.name} {case}: kernels of 64 prompts of 128 tokens and 9 new tokens each")
        for name, ms, count in top[:10]:
            print(f"    {100 * ms / total:5.1f}% {ms:8.2f} ms {count:6d}  {name}", flush=True)


def save(args: argparse.Namespace, result: dict[str, Any]) -> None:
    from loraplex.bench.header import make_header

    if not result["header"]:
        command = ["python", "benchmarks/engines/vllm_e2e.py", *sys.argv[1:]]
        versions = sorted({engine["version"] for engine in result["engines"]})
        result["header"] = {**make_header(command), "vllm": ", ".join(versions)}
    text = json.dumps(result, indent=1)
    (Path(args.out) / f"vllm_e2e_{args.groups.replace(',', '_')}.json").write_text(text + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", default="out")
    add("--work", default="/tmp/vllm_e2e", help="where models and adapters go")
    add("--groups", default="demo,main", help=f"of {', '.join(GROUPS)}")
    loads = "64x128x128,64x1024x1,16x128x128,1x128x128"
    add("--loads", default=loads, help="requests x prompt tokens x new tokens, ...")
    add("--cases", default="", help="of none, one, all (adapters in turn)")
    add("--repeat", type=int, default=3)
    add("--max-seqs", type=int, default=256)
    add("--kv-gib", type=float, default=10.0, help="KV cache of each engine")
    add("--tp", type=int, default=1)
    add("--base", type=int, default=1, help="0 leaves out the engine without LoRA")
    add("--profile", type=int, default=1, help="0 leaves out kernel times")
    add("--limit", type=float, default=440, help="seconds after which no load begins")
    add("--apart", action="store_true", help="engines start one after the other")
    add("--demo-backend", default="", help="attention backend for the demo model")
    return parser.parse_args()


def main() -> int:
    args = parse()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    args.env = install_here(Path(args.work))
    write_model(Path(args.work) / "model")
    result: dict[str, Any] = {"header": {}, "engines": [], "rows": [], "kernels": {}, "demo": None}
    for engines in batches(args):
        children = start(args, engines)
        try:
            run(args, children, result)
        finally:
            for child in children:
                child.end()
        save(args, result)
    print(f"\n{table(result['rows'])}\n{json.dumps(result['demo'], indent=1)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
