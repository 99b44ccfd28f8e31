"""Makes tpla.safetensors: transforms and one sharded attention, in NumPy from the equations alone.

    python3 tests/golden/make_tpla_golden.py            write it beside this script
    python3 tests/golden/make_tpla_golden.py --check    compare with the file that is there
"""

import argparse
import json
import pathlib
import struct
import sys

import numpy as np

FILE = pathlib.Path(__file__).resolve().parent / "tpla.safetensors"
TOLERANCE = 1e-10  # eigenvectors amplify a rounding by 1/gap of the eigenvalues, here below 100
EPS = 1e-6


def fix_signs(vectors):
    """Each column's component of largest magnitude positive."""
    rows = np.argmax(np.abs(vectors), axis=0)
    return vectors * np.sign(vectors[rows, np.arange(vectors.shape[1])])


def descending(matrix):
    values, vectors = np.linalg.eigh(matrix)
    return values[::-1].copy(), fix_signs(vectors[:, ::-1])


def by_magnitude(matrix):
    values, vectors = np.linalg.eigh(matrix)
    order = np.argsort(-np.abs(values))
    return values[order].copy(), fix_signs(vectors[:, order])


def transforms(rng):
    """Moments of tokens f and queries q_nope, and what follows: h = 2 heads, n = 3, v = 4, d = 8."""
    tokens, heads, n, v, d = 200, 2, 3, 4, 8
    scales = np.linspace(2.0, 0.25, d)
    f = (rng.standard_normal((tokens, d)) * scales + rng.standard_normal(d) * 0.5) @ np.linalg.qr(
        rng.standard_normal((d, d)))[0]
    q = rng.standard_normal((tokens, heads, n))
    kv_b = rng.standard_normal((heads, n + v, d))
    gamma = 1 + 0.3 * rng.standard_normal(d)
    second, first = f.T @ f, f.sum(axis=0)
    c = second / tokens
    absorbed = np.einsum("thn,hnd->thd", q, kv_b[:, :n] * gamma).reshape(-1, d)
    energy = absorbed.T @ absorbed / len(absorbed)
    t = {"second": second, "first": first, "query_second": np.einsum("thi,thj->hij", q, q), "kv_b": kv_b,
         "gamma": gamma, "query_moment": energy}
    t["pca.values"], t["pca.vectors"] = descending(c)
    t["pca-centred.values"], t["pca-centred.vectors"] = descending(c - np.outer(first, first) / tokens**2)
    t["query-aware.values"], t["query-aware.vectors"] = by_magnitude((energy @ c + c @ energy) / 2)
    return t, {"tokens": tokens, "heads": heads, "n": n, "v": v, "d": d}


def attention(rng, mode):
    """Sharded attention of 7 queries behind 4 keys: g = 3, m = 2 shared columns of d = 8, h = 2, n = 3, r = 4, v = 5."""
    queries, before, heads, n, r, v, d, g, m = 7, 4, 2, 3, 4, 5, 8, 3, 2
    keys, scale = before + queries, (n + r) ** -0.5
    q = rng.standard_normal((queries, heads, n + r))
    c, k_pe = rng.standard_normal((keys, d)), rng.standard_normal((keys, r))
    kv_b, gamma = rng.standard_normal((heads, n + v, d)), 1 + 0.3 * rng.standard_normal(d)
    kappa, rms_scale = 1 + 0.5 * rng.standard_normal((heads, g)), 1 + rng.random(g)
    absorbed = np.einsum("qhn,hnd->qhd", q[..., :n], kv_b[:, :n])
    rope = np.einsum("qhr,kr->hqk", q[..., n:], k_pe)
    hidden = np.arange(keys)[None, :] > before + np.arange(queries)[:, None]
    out, lses = np.zeros((queries, heads, v)), []
    width = (d - m) // g
    for i in range(g):
        own, shared = slice(m + i * width, m + (i + 1) * width), slice(0, m)
        mean_square = (c**2).sum(1) / d
        if mode == "sliced":
            mean_square = rms_scale[i] * ((c[:, shared] ** 2).sum(1) + (c[:, own] ** 2).sum(1)) / d
        normed = c / np.sqrt(mean_square + EPS)[:, None] * gamma
        z = np.einsum("qhd,kd->hqk", absorbed[..., shared], normed[:, shared])
        z = scale * (z + kappa[:, i, None, None] * np.einsum("qhd,kd->hqk", absorbed[..., own], normed[:, own]) + rope)
        z = np.where(hidden[None], -np.inf, z)
        top = z.max(-1, keepdims=True)
        lse = top[..., 0] + np.log(np.exp(z - top).sum(-1))
        p = np.exp(z - lse[..., None])
        lses.append(lse.T)
        columns = [own, shared] if i == 0 else [own]
        for part in columns:
            out += np.einsum("hqk,kd,hvd->qhv", p, normed[:, part], kv_b[:, n:, part])
    return {f"{mode}.{name}": value for name, value in {
        "q": q, "c": c, "k_pe": k_pe, "kv_b": kv_b, "gamma": gamma, "kappa": kappa, "rms_scale": rms_scale,
        "attention": out, "lse": np.stack(lses)}.items()}


def make():
    rng = np.random.default_rng(20)
    tensors, sizes = transforms(rng)
    tensors.update(attention(rng, "exact"))
    tensors.update(attention(rng, "sliced"))
    return tensors, {key: str(value) for key, value in sizes.items()}


def write(tensors, metadata):
    header, data = {"__metadata__": metadata}, b""
    for name in sorted(tensors):
        raw = np.ascontiguousarray(tensors[name], dtype="<f8").tobytes()
        header[name] = {"dtype": "F64", "shape": list(tensors[name].shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    FILE.write_bytes(struct.pack("<Q", len(text)) + text + data)


def check(tensors):
    raw = FILE.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:8 + length])
    bad = 0
    for name, value in tensors.items():
        begin, end = header[name]["data_offsets"]
        there = np.frombuffer(raw[8 + length + begin:8 + length + end], "<f8").reshape(header[name]["shape"])
        if not np.allclose(there, value, rtol=0, atol=TOLERANCE * np.abs(value).max()):
            print(f"{name} differs")
            bad = 1
    return bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    made, sizes_of = make()
    if parser.parse_args().check:
        sys.exit(check(made))
    write(made, sizes_of)
