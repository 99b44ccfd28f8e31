#!/usr/bin/env python3
"""A grouped-query model as latent attention and under TPLA: what each step costs, with and without alignment.

usage: ./dev fetch-smollm2
       python3 tools/corpus.py --out build/corpus
       tools/transmla_study.py --corpus build/corpus --out docs/data/smollm2_tpla.json [--ranks 256,128] [--work DIR]

For each kv_lora_rank: `isomer convert transmla`, once as it is and once aligned, then `isomer convert tpla` (PCA, two
shards) of both, and `isomer eval kl` of every model against the original, in decode after an exact prefix. With --work,
converted models are kept there and taken from there. It calibrates on the corpus's first novel (Emma) and evaluates on
the one that is held out (Persuasion). `isomer claims tpla --only T12` computes its verdict from the recording. What
--out has already is not run again, so that an interrupted study goes on.
"""

import argparse
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time

MODEL = "models/external/SmolLM2-135M-Instruct.Q4_1.gguf"
KEEP_KL = ("layout", "mode", "exact", "window", "overlap", "tokens_scored", "mean_kl", "mean_kl_error", "kl_percentiles",
           "largest_kl", "top1_agreement", "nats_per_token_base", "nats_per_token", "nats_difference_error")
SHARDS = 2
VARIANTS = [("pca", "tpla", "every-position"), ("-", f"gla:{SHARDS}", "every-position"), ("none", "tpla", "every-position"),
            ("hadamard", "tpla", "every-position"), ("query-aware", "tpla", "every-position"),
            ("pca", "tpla", "prefill")]


class Study:
    def __init__(self, a, work):
        self.a = a
        self.work = work
        self.calibration = work / "calibrate.txt"
        books = (a.corpus / "train.txt").read_text().split("<|endoftext|>\n")
        self.calibration.write_text(books[0])
        self.recorded = json.loads(a.out.read_text()) if a.out.exists() else {"runs": []}

    def isomer(self, *arguments):
        report = self.work / "report.json"
        command = shlex.split(self.a.isomer) + [str(x) for x in arguments] + ["--json", str(report)]
        result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if result.returncode != 0:
            sys.exit(f"{shlex.join(command)}\n{result.stderr}")
        return json.loads(report.read_text())

    def convert(self, out, kind, *arguments):
        """The report of a conversion into `out`, which may lie there already."""
        kept = out.with_name(out.name + ".report.json")
        if not out.exists():
            report = self.isomer("convert", kind, "--calibrate", self.calibration, "--calibration-tokens",
                                 self.a.calibration_tokens, "--window", self.a.window, "--out", out, *arguments)
            kept.write_text(json.dumps(report))
        return json.loads(kept.read_text())

    def evaluate(self, base, model, layout, mode="decode"):
        result = self.isomer("eval", "kl", "--base", base, "--model", model, "--layout", layout, "--mode", mode,
                             "--data", self.a.corpus / "held-out.txt", "--window", self.a.window, "--limit",
                             self.a.limit)
        for key in ("processor", "cores", "machine", "version"):
            self.recorded[key] = result[key]
        return {key: result[key] for key in KEEP_KL}

    def step(self, rank, steps, tpla_steps, layout, model, report, cached):
        """Evaluates one model, and records it."""
        begin = time.time()
        run = {"kv_lora_rank": rank, "align_steps": steps, "tpla_align_steps": tpla_steps, "layout": layout,
               "cache_elements": cached, "evaluation": self.evaluate(self.a.model, model, layout)}
        if layout.startswith("tp:"):
            run["steps"] = report["steps"]
        self.recorded["runs"].append(run)
        self.a.out.write_text(json.dumps(self.recorded, indent=1) + "\n")
        e = run["evaluation"]
        print(f"{time.time() - begin:5.1f} s  d {rank}, aligned {steps}, {layout} (aligned {tpla_steps}): "
              f"KL {e['mean_kl']:.4f}, first choice {100 * e['top1_agreement']:.1f} %", flush=True)

    def has(self, rank, steps, tpla_steps, layout):
        return any((r["kv_lora_rank"], r["align_steps"], r["tpla_align_steps"], r["layout"]) ==
                   (rank, steps, tpla_steps, layout) for r in self.recorded["runs"])

    def rank(self, rank):
        rope = self.recorded["model"]["head_dim"]
        for steps in (0, self.a.align_steps):
            name = f"d{rank}-a{steps}"
            mla = self.work / name
            report = None
            if not all(self.has(rank, steps, t, f"tpla:g={SHARDS}") for t in self.tpla_steps(steps)) or \
                    not self.has(rank, steps, 0, "tp:1"):
                report = self.convert(mla, "transmla", "--model", self.a.model, "--kv-lora-rank", rank, "--align-steps",
                                      steps, "--align-tokens", self.a.align_tokens)
            if not self.has(rank, steps, 0, "tp:1"):
                self.step(rank, steps, 0, "tp:1", mla, report, rank + rope)
            for tpla_steps in self.tpla_steps(steps):
                if self.has(rank, steps, tpla_steps, f"tpla:g={SHARDS}"):
                    continue
                cut = self.work / f"{name}-g{SHARDS}-a{tpla_steps}"
                self.convert(cut, "tpla", "--model", mla, "--transform", "pca", "--shards", SHARDS, "--align",
                             tpla_steps, "--held-out", 1)
                self.step(rank, steps, tpla_steps, f"tpla:g={SHARDS}", cut, None, rank // SHARDS + rope)

    def variants(self, rank):
        """T3 and T4 on the aligned model: TPLA by each transform and GLA, against the latent attention they are cut from."""
        mla = self.work / f"d{rank}-a{self.a.align_steps}"
        done = self.recorded.setdefault("variants", [])
        for transform, layout, mode in VARIANTS:
            if any((v["transform"], v["evaluation"]["mode"]) == (transform, mode) and layout in v["asked"] for v in done):
                continue
            model = mla
            if transform != "-":
                plain = transform == "pca"
                model = mla.with_name(f"{mla.name}-g{SHARDS}-a0" if plain else f"{mla.name}-{transform}")
                self.convert(model, "tpla", "--model", mla, "--transform", transform, "--shards", SHARDS, "--held-out", 1)
            done.append({"kv_lora_rank": rank, "transform": transform, "asked": layout,
                         "evaluation": self.evaluate(mla, model, layout, mode)})
            self.a.out.write_text(json.dumps(self.recorded, indent=1) + "\n")
            print(f"{transform} {layout} {mode}: KL {done[-1]['evaluation']['mean_kl']:.4f}", flush=True)

    def tpla_steps(self, steps):
        """The cut itself is aligned where the conversion is."""
        return (0, self.a.tpla_align_steps) if steps > 0 and self.a.tpla_align_steps > 0 else (0,)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--corpus", required=True, type=pathlib.Path, help="what tools/corpus.py made")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--work", type=pathlib.Path, help="a folder to keep converted models in")
    parser.add_argument("--ranks", default="256,128", help="values of kv_lora_rank")
    parser.add_argument("--variants", type=int, default=0, help="one of --ranks, whose aligned model is cut in every way")
    parser.add_argument("--align-steps", type=int, default=8, help="of each attention block towards the original's")
    parser.add_argument("--align-tokens", default="2K")
    parser.add_argument("--tpla-align-steps", type=int, default=0, help="of each layer's kv_b towards whole attention")
    parser.add_argument("--calibration-tokens", default="8K")
    parser.add_argument("--limit", default="2K", help="tokens of the held-out novel")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--isomer", default=os.environ.get("ISOMER", "build/release/isomer"))
    a = parser.parse_args()
    if not pathlib.Path(a.model).exists():
        sys.exit(f"{a.model} is not there: ./dev fetch-smollm2 gets it")
    with tempfile.TemporaryDirectory() as folder:
        work = a.work or pathlib.Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        study = Study(a, work)
        study.recorded["model"] = {"name": pathlib.Path(a.model).stem, "num_key_value_heads": 3, "head_dim": 64}
        study.recorded["settings"] = {
            k: getattr(a, k) for k in ("align_tokens", "calibration_tokens", "limit", "window")}
        study.recorded["command"] = f"tools/transmla_study.py --corpus {a.corpus}"
        for rank in a.ranks.split(","):
            study.rank(int(rank))
        if a.variants:
            study.variants(a.variants)


if __name__ == "__main__":
    main()
