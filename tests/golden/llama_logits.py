"""A Llama in NumPy, straight from a GGUF file, to hold `isomer eval logits` against: dequantisation and layout by
gguf_oracle.py, everything after it in float64. It keeps the file's own order of rows in Q and K, and so turns adjacent
pairs, where Isomer puts the rows back and turns halves.

    isomer tokenizer encode --tokenizer x.gguf --data text.txt > ids.txt
    isomer eval logits --model x.gguf --ids ids.txt --out logits.safetensors
    python3 tests/golden/llama_logits.py x.gguf ids.txt logits.safetensors

Ends with 1 if a logit is further off than --bound times the largest one.
"""

import argparse
import json
import pathlib
import struct
import sys

import numpy as np

import gguf_oracle


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate_pairs(x, theta):
    """RoPE on pairs (2i, 2i + 1): x [T, heads, head_dim], positions 0, 1, …"""
    tokens, _, dim = x.shape
    angles = np.arange(tokens)[:, None] * theta ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    even, odd = x[..., 0::2], x[..., 1::2]
    return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def attention(q, k, v):
    """Causal: q [T, h, w], k and v [T, h_kv, w] -> [T, h·w]."""
    tokens, heads, dim = q.shape
    group = heads // k.shape[1]
    mask = np.triu(np.full((tokens, tokens), -np.inf), 1)
    out = np.empty_like(q)
    for head in range(heads):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(dim) + mask
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, head // group]
    return out.reshape(tokens, -1)


def logits_of(metadata, tensors, ids):
    get = lambda key: metadata["llama." + key]
    heads, kv_heads = get("attention.head_count"), get("attention.head_count_kv")
    eps, theta = get("attention.layer_norm_rms_epsilon"), float(get("rope.freq_base"))
    if "rope_freqs.weight" in tensors or metadata.get("llama.rope.scaling.type", "none") != "none":
        raise SystemExit("RoPE scaling is not part of this script")
    weight = lambda name: tensors[name].astype(np.float64)
    x = weight("token_embd.weight")[ids]
    for layer in range(get("block_count")):
        of = lambda part: weight(f"blk.{layer}.{part}.weight")
        normed = rms_norm(x, of("attn_norm"), eps)
        split = lambda y, count: y.reshape(len(ids), count, -1)
        q, k, v = (split(normed @ of(f"attn_{part}").T, count) for part, count in
                   (("q", heads), ("k", kv_heads), ("v", kv_heads)))
        x = x + attention(rotate_pairs(q, theta), rotate_pairs(k, theta), v) @ of("attn_output").T
        normed = rms_norm(x, of("ffn_norm"), eps)
        gate = normed @ of("ffn_gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ of("ffn_up").T)) @ of("ffn_down").T
    head = tensors.get("output.weight", tensors["token_embd.weight"]).astype(np.float64)
    return rms_norm(x, weight("output_norm.weight"), eps) @ head.T


def read_logits(path):
    raw = pathlib.Path(path).read_bytes()
    length, = struct.unpack_from("<Q", raw)
    entry = json.loads(raw[8:8 + length])["logits"]
    begin, end = entry["data_offsets"]
    return np.frombuffer(raw[8 + length + begin:8 + length + end], "<f4").reshape(entry["shape"]).astype(np.float64)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model"), parser.add_argument("ids"), parser.add_argument("logits", nargs="?")
    parser.add_argument("--bound", type=float, default=1e-4)
    parser.add_argument("--record", help="write ids, first choices and their logits here, as JSON")
    a = parser.parse_args()
    ids = [int(word) for word in pathlib.Path(a.ids).read_text().split()]
    ours = logits_of(*gguf_oracle.read(pathlib.Path(a.model).read_bytes()), ids)
    log_p = ours - np.log(np.exp(ours - ours.max(1, keepdims=True)).sum(1, keepdims=True)) - ours.max(1, keepdims=True)
    nats = -log_p[np.arange(len(ids) - 1), ids[1:]].mean()
    print(f"{len(ids)} tokens, {ours.shape[1]} logits each, largest {np.abs(ours).max():.4g}; {nats:.5f} nats a token")
    if a.record:
        best = ours.argmax(1)
        record = {"ids": ids, "first_choices": best.tolist(), "logits": [round(float(row[i]), 5) for row, i in zip(ours, best)],
                  "nats_per_token": round(float(nats), 6)}
        pathlib.Path(a.record).write_text(json.dumps(record) + "\n")
    if a.logits is None:
        return 0
    theirs = read_logits(a.logits)
    if theirs.shape != ours.shape:
        print(f"{a.logits} has shape {theirs.shape}")
        return 1
    worst = np.abs(theirs - ours).max()
    same = (theirs.argmax(1) == ours.argmax(1)).sum()
    print(f"largest difference {worst:.3g}, {worst / np.abs(ours).max():.3g} of the largest logit; "
          f"the same first choice at {same} of {len(ids)} positions")
    return 0 if worst <= a.bound * np.abs(ours).max() else 1


if __name__ == "__main__":
    sys.exit(main())
