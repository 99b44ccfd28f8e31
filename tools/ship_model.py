#!/usr/bin/env python3
"""Makes of a training run the directory that ships: weights in bfloat16, loss curve, evaluation.

usage: tools/ship_model.py copy --run RUN --out DIR
       tools/ship_model.py check --run RUN --model DIR --perplexity P.json --ngram N.json

`copy` takes config, tokenizer and weights of the run's newest checkpoint; float32 weights are rounded to bfloat16 (to
nearest, ties to even), routers' correction biases stay float32. `check` adds loss.csv and evaluation.json, and fails
unless the model has fewer bits per byte than every n-gram. Python's standard library only.
"""

import argparse
import array
import json
import pathlib
import shutil
import struct
import sys

LIMIT_BYTES = 6_000_000
CURVE_POINTS = 400


class ShipError(Exception):
    """The message says what is wrong."""


def read_safetensors(path):
    """(header, data) of a safetensors file."""
    data = path.read_bytes()
    if len(data) < 8:
        raise ShipError(f"{path}: {len(data)} bytes are no safetensors file")
    size, = struct.unpack("<Q", data[:8])
    if size > len(data) - 8:
        raise ShipError(f"{path}: a header of {size} bytes in a file of {len(data)}")
    return json.loads(data[8:8 + size]), memoryview(data)[8 + size:]


def bfloat16_bytes(data):
    """Little-endian float32 values as bfloat16, rounded to nearest even."""
    words = array.array("I")
    words.frombytes(data)
    if sys.byteorder != "little":
        words.byteswap()
    # Not for NaN, which would round to infinity; a model that has one is refused.
    if any(w & 0x7f800000 == 0x7f800000 for w in words):
        raise ShipError("the weights hold infinities or NaN")
    halves = array.array("H", [(w + 0x7fff + (w >> 16 & 1)) >> 16 for w in words])
    if sys.byteorder != "little":
        halves.byteswap()
    return halves.tobytes()


def convert(source, target):
    """model.safetensors with its float32 matrices in bfloat16."""
    header, data = read_safetensors(source)
    metadata = header.pop("__metadata__", {"format": "pt"})
    result, parts, offset = {"__metadata__": metadata}, [], 0
    for name, info in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = info["data_offsets"]
        part, dtype = bytes(data[begin:end]), info["dtype"]
        if dtype == "F32" and not name.endswith("e_score_correction_bias"):
            part, dtype = bfloat16_bytes(part), "BF16"
        result[name] = {"dtype": dtype, "shape": info["shape"], "data_offsets": [offset, offset + len(part)]}
        parts.append(part)
        offset += len(part)
    text = json.dumps(result, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    target.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    size = target.stat().st_size
    if size > LIMIT_BYTES:
        raise ShipError(f"{target}: {size} bytes; at most {LIMIT_BYTES} ship. Fewer parameters, or a smaller vocabulary")
    print(f"{target}: {size} bytes")


def copy(arguments):
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(arguments.run / name, arguments.out / name)
    convert(arguments.run / "model.safetensors", arguments.out / "model.safetensors")


def write_curve(metrics, target):
    """Step, tokens, loss (mean over the steps since the last point), learning rate, held-out bits per byte."""
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    every = max(1, len(steps) // CURVE_POINTS)
    rows, losses = ["step,tokens,loss,learning_rate,held_out_bits_per_byte"], []
    for step in steps:
        losses.append(step["loss"])
        held_out = step.get("eval_bits_per_byte")
        if step["step"] % every == 0 or held_out is not None or step is steps[-1]:
            rows.append(f"{step['step']},{step['tokens']},{sum(losses) / len(losses):.4f},{step['learning_rate']:.6g},"
                        + (f"{held_out:.5f}" if held_out is not None else ""))
            losses = []
    target.write_text("\n".join(rows) + "\n")


def check(arguments):
    perplexity = json.loads(arguments.perplexity.read_text())
    ngrams = json.loads(arguments.ngram.read_text())["models"]
    settings = json.loads((arguments.run / "run.json").read_text())
    for key in ("config", "config_json"):
        settings.pop(key, None)
    write_curve(arguments.run / "metrics.jsonl", arguments.model / "loss.csv")
    kept = ("bits_per_byte", "nats_per_token", "perplexity", "tokens_scored", "bytes_scored", "window", "overlap", "mode")
    evaluation = {
        "held_out": "Persuasion (tools/corpus.py)",
        "model": {key: perplexity[key] for key in kept},
        "ngrams": {m["name"]: {key: m[key] for key in ("bits_per_byte", "perplexity")} for m in ngrams},
        "training": settings,
    }
    (arguments.model / "evaluation.json").write_text(json.dumps(evaluation, indent=2) + "\n")
    print(f"model {perplexity['bits_per_byte']:.4f} bits per byte of the held-out novel")
    for m in ngrams:
        print(f"{m['name']} {m['bits_per_byte']:.4f}")
    best = min(ngrams, key=lambda m: m["bits_per_byte"])
    if perplexity["bits_per_byte"] >= best["bits_per_byte"]:
        raise ShipError(f"the model is no better than the {best['name']}: not copied. Train it for longer")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(required=True)
    options = {copy: ("run", "out"), check: ("run", "model", "perplexity", "ngram")}
    for action, names in options.items():
        command = actions.add_parser(action.__name__)
        for name in names:
            command.add_argument("--" + name, type=pathlib.Path, required=True)
        command.set_defaults(action=action)
    arguments = parser.parse_args()
    try:
        arguments.action(arguments)
    except (ShipError, OSError, KeyError, ValueError) as error:
        sys.exit(f"ship_model.py: {type(error).__name__}: {error}" if isinstance(error, KeyError) else
                 f"ship_model.py: {error}")


if __name__ == "__main__":
    main()
