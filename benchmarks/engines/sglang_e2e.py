"""SGLang end to end: what LoRA costs with each of its backends and with loraplex.

    python sglang_e2e.py prepare                 # models, adapters, kernels, the plugin
    python sglang_e2e.py run --out DIR           # log-probabilities, then times
    python sglang_e2e.py run --out DIR --parts main --batches 64 --prefill 0
    python sglang_e2e.py prepare --parts rank64,many
    python sglang_e2e.py run --out DIR --parts rank64,many
    python sglang_e2e.py table DIR/sglang.json   # also: plot, which writes DIR/sglang.png

Engines of a part start together, since starting is CPU work, and are measured one after the other
on an otherwise idle GPU; those asked for log-probabilities answer as soon as they are up. A run is
timed with all new tokens and with one, so the time per output token is the difference over the
tokens between. `base` requests have no adapter, `mixed` ones go round robin over all adapters;
backend `none` has LoRA off. Everything goes into one JSON file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_parts import Part, engine_arguments, make_parts, vocabulary

SOURCE = Path(__file__).resolve().parents[2] / "src"
if str(SOURCE) not in sys.path:
    sys.path.insert(0, str(SOURCE))
# the kernel package that torch 2.11 can load is not the one that 0.5.23 asks for
os.environ.setdefault("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
START = time.monotonic()
PARTS = "demo, wide, main, rank64, many, tp2, wide_tp2; those joined by + start together"
POLL = 0.1


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:6.1f} s]", *words, flush=True)


def parts_of(options: argparse.Namespace) -> dict[str, Part]:
    """The parts, with what the options leave of them."""
    batches = {int(size) for size in options.batches.split(",")}
    demo = SOURCE / "loraplex" / "demo" / "data"
    parts = make_parts(Path(options.dir), demo, options.slots)
    for name, part in parts.items():
        loads = tuple(
            load for load in part.loads
            if (options.prefill if load.new == 1 else load.batch in batches)
        )  # fmt: skip
        if options.new:
            loads = tuple(replace(load, new=min(load.new, options.new)) for load in loads)
        backends = tuple(b for b in part.backends if b in options.backends.split(","))
        if "torch_native" in options.backends:
            backends = ("torch_native", *backends)
        parts[name] = replace(part, loads=loads, backends=backends)
    return parts


class Worker:
    """One engine, in a process that waits for its turn on standard input."""

    def __init__(self, options: argparse.Namespace) -> None:
        import sglang

        self.part, self.options = parts_of(options)[options.part], options
        extra = json.loads(options.extra)
        self.engine = sglang.Engine(**engine_arguments(self.part, options.backend, extra))
        self.names = [] if options.backend == "none" else list(self.part.adapters())
        self.random = random.Random(7)
        self.folder = Path(options.dir) / "state" / f"{options.part}_{options.backend}"

    def work(self) -> None:
        (self.folder / "up").touch()
        # answers are the same beside engines that start; only times need a GPU without them
        if self.part.is_check:
            from sglang_check import ask

            self.emit(answers=ask(self.engine, self.part))
        else:
            sys.stdin.readline()
        for load in self.part.loads:
            for case in self.options.cases.split(","):
                if case == "base" or self.names:
                    self.measure(load.batch, load.prompt, load.new, case)
        (self.folder / "done").touch()
        self.engine.shutdown()

    def measure(self, batch: int, prompt: int, new: int, case: str) -> None:
        runs = self.options.runs
        for _ in range(2):
            self.generate(batch, prompt, min(new, 16), case)
        full, first = [], []
        for _ in range(runs):
            full.append(self.generate(batch, prompt, new, case))
            first.append(self.generate(batch, prompt, 1, case) if new > 1 else full[-1])
        total, start = statistics.median(full), statistics.median(first)
        self.emit(
            batch=batch, prompt=prompt, new=new, case=case, full_s=full, first_s=first,
            output_tokens_per_s=batch * new / total, prompt_tokens_per_s=batch * prompt / start,
            ms_per_token=1e3 * (total - start) / (new - 1) if new > 1 else None,
            spread=(max(full) - min(full)) / total,
        )  # fmt: skip

    def generate(self, batch: int, prompt: int, new: int, case: str) -> float:
        size = vocabulary(self.part)
        ids = [[self.random.randrange(10, size) for _ in range(prompt)] for _ in range(batch)]
        names = {
            "base": [None] * batch,
            "one": self.names[:1] * batch,
            "mixed": [self.names[i % len(self.names)] for i in range(batch)] if self.names else [],
        }[case]
        chosen = {} if case == "base" else {"lora_path": names}
        sampling = {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True}
        begin = time.perf_counter()
        outputs = self.engine.generate(input_ids=ids, sampling_params=sampling, **chosen)
        took = time.perf_counter() - begin
        made = {output["meta_info"]["completion_tokens"] for output in outputs}
        assert made == {new}, f"asked for {new} tokens, got {made}"
        return took

    def emit(self, **row: Any) -> None:
        with (self.folder / "rows").open("a") as file:
            file.write(json.dumps({"part": self.part.name, "backend": self.options.backend, **row}))
            file.write("\n")


class Engine:
    """A worker, seen from the process that starts it."""

    def __init__(self, options: argparse.Namespace, part: Part, backend: str) -> None:
        self.name = f"{part.name}_{backend}"
        self.is_check = part.is_check
        self.folder = Path(options.dir) / "state" / self.name
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.iterdir():
            old.unlink()
        command = [sys.executable, "-u", __file__, "worker", "--part", part.name]
        command += ["--backend", backend]
        for key in ("dir", "slots", "batches", "runs", "prefill", "cases", "extra", "new",
                    "backends"):  # fmt: skip
            command += [f"--{key}", str(getattr(options, key))]
        path = [str(Path(options.dir) / "plugin"), str(SOURCE), os.environ.get("PYTHONPATH", "")]
        self.log = self.folder / "log"
        # a group of its own: an engine has several processes, and all of them must end with it
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self.log.open("w"), stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)}, start_new_session=True,
        )  # fmt: skip

    def wait_for(self, mark: str, deadline: float) -> bool:
        while not (self.folder / mark).exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                return (self.folder / mark).exists()
            time.sleep(POLL)
        return True

    def go(self) -> None:
        """Let it measure its times."""
        assert self.process.stdin is not None
        # an engine that is gone is noticed where its mark is waited for
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"go\n")
            self.process.stdin.flush()

    def why(self) -> str:
        """Why it was not measured."""
        code = self.process.poll()
        when = "while measured" if (self.folder / "up").exists() else "before it was up"
        return f"out of time {when}" if code is None else f"ended with {code} {when}"

    def end(self) -> None:
        # only an engine that was measured ends by itself; the time of the others is not waited for
        if (self.folder / "done").exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def rows(self) -> list[dict[str, Any]]:
        file = self.folder / "rows"
        return [json.loads(line) for line in file.open()] if file.exists() else []

    def last_lines(self) -> list[str]:
        lines = self.log.read_text(errors="replace").splitlines()
        return [line[:300] for line in lines if "server_args=" not in line][-30:]


def run(options: argparse.Namespace) -> None:
    from loraplex.bench.header import make_header, package_version

    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    header = make_header(["python", *sys.argv])
    for name in ("sglang", "sglang-kernel", "transformers"):
        header[name] = package_version(name) or "unknown"
    settings = {key: value for key, value in vars(options).items() if key not in ("out", "dir")}
    result: dict[str, Any] = {
        "header": header, "settings": settings, "rows": [], "checks": [], "failures": {},
    }  # fmt: skip
    deadline = START + options.limit
    parts = parts_of(options)
    for names in options.parts.split(","):
        try:
            run_parts(options, [parts[name] for name in names.split("+")], deadline, result)
        finally:
            # what was measured before an interrupt stays
            (out / "sglang.json").write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    for engine, lines in result["failures"].items():
        print(f"\n{engine} failed:", *lines, sep="\n")
    sys.exit(bool(result["failures"]) or not all(c.get("is_right", True) for c in result["checks"]))


def run_parts(
    options: argparse.Namespace, parts: list[Part], deadline: float, result: dict[str, Any]
) -> None:
    """Start, measure and end the engines of some parts, and add what they gave to the result."""
    engines = [Engine(options, part, backend) for part in parts for backend in part.backends]
    answers: dict[str, dict[str, Any]] = {part.name: {} for part in parts}
    try:
        last = min(deadline, time.monotonic() + 240)
        up = [e for e in engines if e.wait_for("done" if e.is_check else "up", last)]
        say("up:", *(engine.name for engine in up))
        for engine in engines:
            if engine in up and not engine.is_check:
                engine.go()
                engine.wait_for("done", deadline)
            is_done = (engine.folder / "done").exists()
            why = "" if is_done else engine.why()
            if why:
                result["failures"][engine.name] = [why, *engine.last_lines()]
            for row in engine.rows():
                if "answers" in row:
                    answers[row["part"]][row["backend"]] = row["answers"]
                else:
                    result["rows"].append(row)
            say(engine.name, f"FAILED: {why}" if why else "measured")
    finally:
        for engine in engines:
            engine.end()
    for part in parts:
        if answers[part.name]:
            from sglang_check import judge

            result["checks"] += judge(part, answers[part.name])


def show(result: dict[str, Any]) -> None:
    """A short table: each row beside the engine without LoRA in the same part."""
    for check in result["checks"]:
        verdict = {True: "right", False: "WRONG", None: ""}[check.get("is_right")]
        print(
            f"{check['part']:8s} {check['backend']:10s} log-probabilities: error rms "
            f"{check['error_rms']:.4f} max {check['error_max']:.3f}, adapters change them by "
            f"{check['effect_of_adapters_rms']:.3f} {verdict}"
        )
    rows = result["rows"]
    bases = {
        (r["part"], r["batch"], r["prompt"], r["new"]): r for r in rows if r["backend"] == "none"
    }
    for row in rows:
        base = bases.get((row["part"], row["batch"], row["prompt"], row["new"]))
        speed = row["output_tokens_per_s" if row["new"] > 1 else "prompt_tokens_per_s"]
        text = f"{row['part']:8s} {row['batch']:3d} x {row['prompt']}+{row['new']:<4d}"
        text += f"{row['backend']:10s} {row['case']:6s} {speed:9.0f} tokens/s"
        if row["new"] > 1:
            text += f" {row['ms_per_token']:7.3f} ms/token"
        if base:
            other = base["output_tokens_per_s" if row["new"] > 1 else "prompt_tokens_per_s"]
            text += f"  {100 * speed / other:6.1f} % of no LoRA"
            if row["new"] > 1:
                text += f", decode {100 * base['ms_per_token'] / row['ms_per_token']:6.1f} %"
        print(f"{text}  (spread {100 * row['spread']:.1f} %)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("verb", choices=["prepare", "run", "worker", "table", "plot"])
    add("files", nargs="*", help="result files, for `table` and `plot`")
    add("--dir", default="/tmp/loraplex_sglang", help="models, adapters, logs of the engines")
    add("--out", default="benchmarks/results", help="folder of sglang.json")
    add("--parts", default="demo+wide,main", help=PARTS)
    add("--backends", default="none,csgmv,triton,triton_v2,loraplex")
    add("--batches", default="64,16,1")
    add("--prefill", type=int, default=1, help="0 leaves out the load of one new token")
    add("--cases", default="base,mixed", help="base, one, mixed")
    add("--runs", type=int, default=3)
    add("--new", type=int, default=0, help="at most so many new tokens")
    add("--slots", type=int, default=8, help="slots of main and rank64; one is for base requests")
    add("--limit", type=float, default=460, help="seconds after which engines are ended")
    add("--extra", default="{}", help="more arguments of sglang.Engine, as JSON")
    add("--bare", action="store_true", help="prepare: patch an SGLang without its dependencies")
    add("--tiny", action="store_true", help="prepare: small models, to try this on a CPU")
    add("--part", help=argparse.SUPPRESS)
    add("--backend", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.verb == "prepare":
        from sglang_setup import prepare

        names = options.parts.replace("+", ",").split(",")
        parts = [parts_of(options)[name] for name in names]
        prepare(
            Path(options.dir),
            sorted({part.rank for part in parts if part.loads}),
            options.slots,
            parts,
            is_tiny=options.tiny,
            is_bare=options.bare,
        )
    elif options.verb == "run":
        run(options)
    elif options.verb == "worker":
        Worker(options).work()
    elif options.verb == "plot":
        from sglang_plot import draw

        for file in map(Path, options.files):
            draw(json.loads(file.read_text()), file.with_suffix(".png"))
    else:
        for file in options.files:
            show(json.loads(Path(file).read_text()))


if __name__ == "__main__":
    main()
