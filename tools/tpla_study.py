#!/usr/bin/env python3
"""What slicing a latent costs: converts one model in many ways, evaluates each, and writes one recording.

usage: python3 tools/corpus.py --out build/corpus
       tools/tpla_study.py --model models/tiny-mla --corpus build/corpus --out docs/data/tpla_tiny.json [--only T3,T4]

Every figure comes from `isomer convert tpla`, `isomer eval kl` and `isomer eval heads`; the recording has the options of
each. `isomer claims tpla` computes its verdicts from it. It calibrates on the corpus's first novel (Emma), for T9 also on
as much of its commentary on the Psalms; it evaluates on the novel that is held out.
Runs that are recorded in --out already are not repeated, so that an interrupted study goes on.
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

KEEP_KL = ("layout", "mode", "exact", "window", "overlap", "tokens_scored", "mean_kl", "mean_kl_error", "kl_percentiles",
           "largest_kl", "top1_agreement", "mean_probability_change", "root_mean_square_probability_change",
           "nats_per_token_base", "nats_per_token", "nats_difference_error")


def variants(rank, heads, normed):
    """(claims, conversion options, [(layout, mode)]). rank: kv_lora_rank; normed: whether there is an RMS to slice."""
    grouped = [("gla:2", "decode"), ("gla:2", "every-position")] if heads % 2 == 0 else []  # heads that two groups share
    both = [("tpla", "decode"), ("tpla", "every-position")]
    decode = [("tpla", "decode")]
    yield "T3", {"transform": "pca"}, both + [("tpla", "prefill")] + grouped
    for transform in ("none", "hadamard", "pca"):
        yield "T4", {"transform": transform}, both
        if normed:
            yield "T4", {"transform": transform, "rms": "sliced"}, both + [("tpla:softmax=whole", "decode"),
                                                                           ("tpla:softmax=whole", "every-position")]
    for shards in (2, 4, 8):
        yield "T8", {"transform": "pca", "shards": shards}, both
    for transform in ("pca", "pca-centred", "query-aware", "none", "hadamard"):
        for kappa in ("one", "lsq", "share", "inverse-share"):
            yield "T10", {"transform": transform, "kappa": kappa}, decode
    for text in ("calibrate", "other"):
        for tokens in (1024, 4096, 16384):
            for seed in (1, 2):
                yield "T9", {"transform": "pca", "text": text, "tokens": tokens, "seed": seed}, decode
    for shards in (2, 4):
        for steps in (100, 400):
            yield "T11", {"shards": shards, "align": steps}, decode + [("tpla", "prefill")]
    for shards in (2, 4):
        for transform in ("pca", "query-aware"):
            for eighths in (0, 1, 2, 3, 4, 6):
                yield "B5", {"transform": transform, "shards": shards, "kappa": "lsq",
                             "shared_columns": eighths * rank // 8}, decode


def defaults(options):
    return {"transform": "pca", "shards": 2, "shared_columns": 0, "rms": "exact", "kappa": "one", "text": "calibrate",
            "tokens": 16384, "seed": 1, **options}


def calibration_texts(corpus, folder):
    """A novel, and as much of a commentary: another kind of English."""
    books = (pathlib.Path(corpus) / "train.txt").read_text().split("<|endoftext|>\n")
    texts = {"calibrate": books[0], "other": books[-1][:len(books[0])]}
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return {name: folder / f"{name}.txt" for name in texts}


class Study:
    def __init__(self, a, texts):
        self.a = a
        self.texts = texts
        self.recorded = json.loads(a.out.read_text()) if a.out.exists() else {"runs": []}
        self.done = {json.dumps(run["options"], sort_keys=True): run for run in self.recorded["runs"]}

    def isomer(self, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder) / "report.json"
            command = shlex.split(self.a.isomer) + [str(x) for x in arguments] + ["--json", str(report)]
            result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if result.returncode != 0:
                sys.exit(f"{shlex.join(command)}\n{result.stderr}")
            return json.loads(report.read_text())

    def run(self, claim, options, evaluations):
        options = defaults(options)
        key = json.dumps(options, sort_keys=True)
        run = self.done.setdefault(key, {"claims": [], "options": options, "evaluations": []})
        if run not in self.recorded["runs"]:
            self.recorded["runs"].append(run)
        if claim not in run["claims"]:
            run["claims"].append(claim)
        seen = {(e["asked"], e["mode"]) for e in run["evaluations"]}
        missing = [e for e in evaluations if e not in seen]
        if missing:
            with tempfile.TemporaryDirectory() as folder:
                self.convert_and_evaluate(run, options, missing, pathlib.Path(folder) / "model")
        self.a.out.write_text(json.dumps(self.recorded, indent=1) + "\n")

    def convert_and_evaluate(self, run, o, evaluations, out):
        begin = time.time()
        report = self.isomer("convert", "tpla", "--model", self.a.model, "--out", out, "--calibrate",
                             self.texts[o["text"]], "--transform", o["transform"], "--shards", o["shards"],
                             "--shared-columns", o["shared_columns"], "--rms", o["rms"], "--kappa", o["kappa"],
                             "--calibration-tokens", o["tokens"], "--seed", o["seed"], "--align",
                             o.get("align", 0), "--window", self.a.window, "--held-out", 2)
        run["cache_elements"] = report["cache_elements"]
        run["rewritten"] = report["report"]
        run["alignment"] = report.get("alignment", [])
        run["layers"] = [{"shared_share": layer["shared_share"], "shares": layer["shares"],
                          "mean_cosine": self.mean(layer["cosine"]), "mean_kl": self.mean(layer["kl"]),
                          "mean_lsq_kappa": self.mean(layer["lsq_kappa"])} for layer in report["layers"]]
        for layout, mode in evaluations:
            result = self.isomer("eval", "kl", "--base", self.a.model, "--model", out, "--data",
                                 pathlib.Path(self.a.corpus) / "held-out.txt", "--layout",
                                 layout, "--mode", mode, "--window", self.a.window, "--limit", self.a.limit)
            run["evaluations"].append({"asked": layout, **{k: result[k] for k in KEEP_KL}})
            for key in ("processor", "cores", "machine", "version"):
                self.recorded[key] = result[key]
        first = run["evaluations"][0]
        print(f"{time.time() - begin:5.1f} s  {o}  KL {first['mean_kl']:.5f}", flush=True)

    @staticmethod
    def mean(by_head):
        """Over heads, by shard."""
        return [sum(column) / len(column) for column in zip(*by_head)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--corpus", required=True, help="what tools/corpus.py made")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--only", default="", help="claims, separated by commas")
    parser.add_argument("--limit", default="6K", help="tokens of the held-out novel")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--isomer", default=os.environ.get("ISOMER", "build/release/isomer"))
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_study(a, Study(a, calibration_texts(a.corpus, pathlib.Path(folder))))


def run_study(a, study):
    config = json.loads((pathlib.Path(a.model) / "config.json").read_text())
    study.recorded["model"] = {"name": pathlib.Path(a.model).name,
                               **{k: config[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads",
                                                         "kv_lora_rank", "qk_rope_head_dim", "vocab_size")}}
    study.recorded["command"] = f"tools/tpla_study.py --model {a.model} --corpus {a.corpus}"
    for claim, options, evaluations in variants(config["kv_lora_rank"], config["num_attention_heads"],
                                                config.get("kv_a_layernorm", True)):
        if not a.only or claim in a.only.split(","):
            study.run(claim, options, evaluations)


if __name__ == "__main__":
    main()
