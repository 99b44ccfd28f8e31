"""Float64 oracle of one attention block, forward and backward, in plain NumPy; make_golden.py writes files with it.

The block is y = x + W_o · attention(MLA(RMSNorm(x))), or the same with GQA projections. Shapes: S tokens of B
sequences, x [S, B, D]; h heads, n/r/v their no-rope, rope and value widths, d the latent width.
"""

import math

import numpy as np

INNER_EPS = 1e-6  # of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps says


# ---------------------------------------------------------------------------------------------- rotary embedding


def mscale(factor, m):
    """YaRN's magnitude for a context stretched by `factor`."""
    return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_frequencies(inv, theta, r, scaling):
    """Inverse frequencies [r/2] after YaRN's ramp between the pairs that turn beta_fast and beta_slow times."""

    def dim(beta):
        original = scaling["original_max_position_embeddings"]
        return r * math.log(original / (2 * math.pi * beta)) / (2 * math.log(theta))

    low = max(math.floor(dim(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(dim(scaling.get("beta_slow", 1))), r - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(r // 2) - low) / (high - low), 0, 1)
    m = 1 - ramp
    return inv / scaling["factor"] * (1 - m) + inv * m


def llama3_frequencies(inv, scaling):
    """Inverse frequencies [r/2]: long wavelengths divided by factor, short ones kept, a linear blend between."""
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / inv
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv / scaling["factor"] + smooth * inv
    out = np.where(wavelength > original / low, inv / scaling["factor"], blended)
    return np.where(wavelength < original / high, inv, out)


def rope_frequencies(config, r, num_positions):
    """(inverse frequencies [r/2], factor on cos and sin). num_positions: largest position + 1."""
    inv = config["rope_theta"] ** (-np.arange(0, r, 2) / max(r, 1))
    scaling = config.get("rope_scaling") or {"type": "none"}
    kind = scaling["type"]
    if kind == "none":
        return inv, 1.0
    if kind == "linear":
        return inv / scaling["factor"], 1.0
    if kind == "llama3":
        return llama3_frequencies(inv, scaling), 1.0
    if kind == "yarn":
        factor = scaling["factor"]
        magnitude = mscale(factor, scaling.get("mscale", 1)) / mscale(factor, scaling.get("mscale_all_dim", 0))
        return yarn_frequencies(inv, config["rope_theta"], r, scaling), magnitude
    if kind == "longrope":
        original = scaling["original_max_position_embeddings"]
        factor = config["max_position_embeddings"] / original
        divisors = scaling["long_factor"] if num_positions > original else scaling["short_factor"]
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return inv / np.array(divisors, dtype=np.float64), magnitude
    raise ValueError(f"unknown rope scaling {kind}")


def rope_tables(config, r, positions, num_positions):
    """cos and sin [len(positions), r/2], magnitude included."""
    positions = np.asarray(positions, dtype=np.float64)
    if config.get("mla_use_nope"):
        return np.ones((len(positions), r // 2)), np.zeros((len(positions), r // 2))
    inv, magnitude = rope_frequencies(config, r, num_positions)
    angle = positions[:, None] * inv[None, :]
    return np.cos(angle) * magnitude, np.sin(angle) * magnitude


def rotate(x, cos, sin, interleave):
    """Rotates the last axis of x [S, ..., r] pair by pair and leaves every element in its place."""
    shape = (cos.shape[0],) + (1,) * (x.ndim - 2) + (cos.shape[1],)
    c, s = cos.reshape(shape), sin.reshape(shape)
    half = x.shape[-1] // 2
    out = np.empty_like(x)
    first = (Ellipsis, slice(0, None, 2)) if interleave else (Ellipsis, slice(0, half))
    second = (Ellipsis, slice(1, None, 2)) if interleave else (Ellipsis, slice(half, None))
    out[first] = x[first] * c - x[second] * s
    out[second] = x[first] * s + x[second] * c
    return out


def rotate_backward(dy, cos, sin, interleave):
    """The transpose of rotate: the rotation by the opposite angle, of the same magnitude."""
    return rotate(dy, cos, -sin, interleave)


def softmax_scale(config):
    """s of the logits."""
    if "kv_lora_rank" not in config:
        return config["head_dim"] ** -0.5
    scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
    scaling = config.get("rope_scaling") or {}
    factor, all_dim = scaling.get("factor", 1), scaling.get("mscale_all_dim", 0)
    if scaling.get("type") == "yarn" and factor > 1 and all_dim != 0:
        scale *= mscale(factor, all_dim) ** 2
    return scale


# -------------------------------------------------------------------------------------------------- small pieces


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x²) + eps) · weight over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rms_norm_backward(dy, x, weight, eps):
    """(dx, dweight) of rms_norm."""
    inv = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    normed = x * inv
    g = dy * weight
    dx = inv * (g - normed * np.mean(g * normed, axis=-1, keepdims=True))
    return dx, (dy * normed).reshape(-1, x.shape[-1]).sum(axis=0)


def linear(x, weights, name):
    """x W^T (+ bias if the weights have one); a weight is stored [out, in]."""
    y = x @ weights[name + ".weight"].T
    return y + weights[name + ".bias"] if name + ".bias" in weights else y


def linear_backward(dy, x, weights, name, grads):
    """Adds the gradients of the projection `name` to grads and returns dx."""
    flat_dy, flat_x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    grads[name + ".weight"] = flat_dy.T @ flat_x
    if name + ".bias" in weights:
        grads[name + ".bias"] = flat_dy.sum(axis=0)
    return dy @ weights[name + ".weight"]


def attention(q, k, v, scale, mask=None):
    """Softmax attention of q, k [S, B, h, dk], v [S, B, h, dv]: (out [S, B, h, dv], p [B, h, S, S], lse).

    mask [S, S]: whether a query sees a key; causal if it is not given."""
    seq = q.shape[0]
    logits = scale * np.einsum("ibhd,tbhd->bhit", q, k)
    logits = np.where(np.tril(np.ones((seq, seq), dtype=bool)) if mask is None else mask, logits, -np.inf)
    largest = logits.max(axis=-1, keepdims=True)
    e = np.exp(logits - largest)
    total = e.sum(axis=-1, keepdims=True)
    p = e / total
    lse = (largest + np.log(total))[..., 0].transpose(2, 0, 1)  # [S, B, h]
    return np.einsum("bhit,tbhd->ibhd", p, v), p, lse


def attention_backward(dout, q, k, v, p, scale):
    """(dq, dk, dv) of attention."""
    dv = np.einsum("bhit,ibhd->tbhd", p, dout)
    dp = np.einsum("ibhd,tbhd->bhit", dout, v)
    ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True)) * scale
    return np.einsum("bhit,tbhd->ibhd", ds, k), np.einsum("bhit,ibhd->tbhd", ds, q), dv


# ------------------------------------------------------------------------------------------------------ MLA block


def mla_forward(config, weights, x, offset, positions=None, mask=None):
    """(y [S, B, D], tape) of the block with latent attention; positions are offset, offset + 1, ... if not given."""
    seq, batch, _ = x.shape
    h, n, r = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    d, v = config["kv_lora_rank"], config["v_head_dim"]
    positions = np.arange(offset, offset + seq) if positions is None else positions
    t = {"x": x, "cos_sin": rope_tables(config, r, positions, int(max(positions)) + 1)}
    interleave = config["rope_interleave"]

    t["u"] = rms_norm(x, weights["input_layernorm.weight"], config["rms_norm_eps"])
    if config.get("q_lora_rank"):
        t["c_q"] = linear(t["u"], weights, "self_attn.q_a_proj")
        t["c_q_normed"] = rms_norm(t["c_q"], weights["self_attn.q_a_layernorm.weight"], INNER_EPS)
        q = linear(t["c_q_normed"], weights, "self_attn.q_b_proj")
    else:
        q = linear(t["u"], weights, "self_attn.q_proj")
    q = q.reshape(seq, batch, h, n + r)
    t["q"] = np.concatenate([q[..., :n], rotate(q[..., n:], *t["cos_sin"], interleave)], axis=-1)

    kv_a = linear(t["u"], weights, "self_attn.kv_a_proj_with_mqa")
    t["c"] = kv_a[..., :d]
    gamma = weights.get("self_attn.kv_a_layernorm.weight")
    t["c_normed"] = t["c"] if gamma is None else rms_norm(t["c"], gamma, INNER_EPS)
    k_pe = rotate(kv_a[..., d:], *t["cos_sin"], interleave)
    t["latent"] = np.concatenate([t["c_normed"], k_pe], axis=-1)

    kv = linear(t["c_normed"], weights, "self_attn.kv_b_proj").reshape(seq, batch, h, n + v)
    shared = np.broadcast_to(k_pe[:, :, None, :], (seq, batch, h, r))
    t["k"], t["v"] = np.concatenate([kv[..., :n], shared], axis=-1), kv[..., n:]
    out, t["p"], t["lse"] = attention(t["q"], t["k"], t["v"], softmax_scale(config), mask)
    t["attention"] = out.reshape(seq, batch, h * v)
    return x + linear(t["attention"], weights, "self_attn.o_proj"), t


def mla_backward(config, weights, t, dy):
    """(dx, gradients by weight name) of mla_forward."""
    seq, batch, _ = dy.shape
    h, n = config["num_attention_heads"], config["qk_nope_head_dim"]
    v, interleave = config["v_head_dim"], config["rope_interleave"]
    grads = {}
    dout = linear_backward(dy, t["attention"], weights, "self_attn.o_proj", grads).reshape(seq, batch, h, v)
    dq, dk, dv = attention_backward(dout, t["q"], t["k"], t["v"], t["p"], softmax_scale(config))

    dkv = np.concatenate([dk[..., :n], dv], axis=-1).reshape(seq, batch, -1)
    dc = linear_backward(dkv, t["c_normed"], weights, "self_attn.kv_b_proj", grads)
    if "self_attn.kv_a_layernorm.weight" in weights:
        name = "self_attn.kv_a_layernorm.weight"
        dc, grads[name] = rms_norm_backward(dc, t["c"], weights[name], INNER_EPS)
    dk_pe = rotate_backward(dk[..., n:].sum(axis=2), *t["cos_sin"], interleave)  # one rope key for all heads
    dkv_a = np.concatenate([dc, dk_pe], axis=-1)
    du = linear_backward(dkv_a, t["u"], weights, "self_attn.kv_a_proj_with_mqa", grads)

    dq_pe = rotate_backward(dq[..., n:], *t["cos_sin"], interleave)
    dq = np.concatenate([dq[..., :n], dq_pe], axis=-1).reshape(seq, batch, -1)
    if config.get("q_lora_rank"):
        dc_q = linear_backward(dq, t["c_q_normed"], weights, "self_attn.q_b_proj", grads)
        name = "self_attn.q_a_layernorm.weight"
        dc_q, grads[name] = rms_norm_backward(dc_q, t["c_q"], weights[name], INNER_EPS)
        du = du + linear_backward(dc_q, t["u"], weights, "self_attn.q_a_proj", grads)
    else:
        du = du + linear_backward(dq, t["u"], weights, "self_attn.q_proj", grads)

    name = "input_layernorm.weight"
    dx, grads[name] = rms_norm_backward(du, t["x"], weights[name], config["rms_norm_eps"])
    return dy + dx, grads


def mla_shapes(config, biases, kv_norm):
    """Weight name -> shape of an MLA block."""
    big_d, h = config["hidden_size"], config["num_attention_heads"]
    n, r, v, d = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
    q_lora = config.get("q_lora_rank")
    shapes = {"input_layernorm.weight": (big_d,)}
    if q_lora:
        shapes["self_attn.q_a_proj.weight"] = (q_lora, big_d)
        shapes["self_attn.q_a_layernorm.weight"] = (q_lora,)
        shapes["self_attn.q_b_proj.weight"] = (h * (n + r), q_lora)
    else:
        shapes["self_attn.q_proj.weight"] = (h * (n + r), big_d)
    shapes["self_attn.kv_a_proj_with_mqa.weight"] = (d + r, big_d)
    if kv_norm:
        shapes["self_attn.kv_a_layernorm.weight"] = (d,)
    shapes["self_attn.kv_b_proj.weight"] = (h * (n + v), d)
    shapes["self_attn.o_proj.weight"] = (big_d, h * v)
    if biases:
        shapes["self_attn.q_a_proj.bias"] = (q_lora,)
        shapes["self_attn.kv_a_proj_with_mqa.bias"] = (d + r,)
        shapes["self_attn.o_proj.bias"] = (big_d,)
    return shapes


# ------------------------------------------------------------------------------------------------------ GQA block


def gqa_forward(config, weights, x, offset, positions=None, mask=None):
    """(y [S, B, D], tape) of the block with grouped-query attention; RoPE on the whole head_dim, in halves."""
    seq, batch, _ = x.shape
    h, kv_heads, w = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    positions = np.arange(offset, offset + seq) if positions is None else positions
    t = {"x": x, "cos_sin": rope_tables(config, w, positions, int(max(positions)) + 1)}
    t["u"] = rms_norm(x, weights["input_layernorm.weight"], config["rms_norm_eps"])
    q = linear(t["u"], weights, "self_attn.q_proj").reshape(seq, batch, h, w)
    k = linear(t["u"], weights, "self_attn.k_proj").reshape(seq, batch, kv_heads, w)
    v = linear(t["u"], weights, "self_attn.v_proj").reshape(seq, batch, kv_heads, w)
    t["q"] = rotate(q, *t["cos_sin"], False)
    t["k_cached"], t["v_cached"] = rotate(k, *t["cos_sin"], False), v
    group = np.arange(h) * kv_heads // h  # KV head of query head i
    t["k"], t["v"] = t["k_cached"][:, :, group], v[:, :, group]
    out, t["p"], t["lse"] = attention(t["q"], t["k"], t["v"], softmax_scale(config), mask)
    t["attention"] = out.reshape(seq, batch, h * w)
    return x + linear(t["attention"], weights, "self_attn.o_proj"), t


def gqa_backward(config, weights, t, dy):
    """(dx, gradients by weight name) of gqa_forward."""
    seq, batch, _ = dy.shape
    h, kv_heads, w = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    grads = {}
    dout = linear_backward(dy, t["attention"], weights, "self_attn.o_proj", grads).reshape(seq, batch, h, w)
    dq, dk_heads, dv_heads = attention_backward(dout, t["q"], t["k"], t["v"], t["p"], softmax_scale(config))
    dk, dv = np.zeros((seq, batch, kv_heads, w)), np.zeros((seq, batch, kv_heads, w))
    for i in range(h):  # a KV head collects from all its query heads
        dk[:, :, i * kv_heads // h] += dk_heads[:, :, i]
        dv[:, :, i * kv_heads // h] += dv_heads[:, :, i]
    dq = rotate_backward(dq, *t["cos_sin"], False).reshape(seq, batch, -1)
    dk = rotate_backward(dk, *t["cos_sin"], False).reshape(seq, batch, -1)
    du = linear_backward(dq, t["u"], weights, "self_attn.q_proj", grads)
    du = du + linear_backward(dk, t["u"], weights, "self_attn.k_proj", grads)
    du = du + linear_backward(dv.reshape(seq, batch, -1), t["u"], weights, "self_attn.v_proj", grads)
    name = "input_layernorm.weight"
    dx, grads[name] = rms_norm_backward(du, t["x"], weights[name], config["rms_norm_eps"])
    return dy + dx, grads


def gqa_shapes(config, biases):
    """Weight name -> shape of a GQA block."""
    big_d, w = config["hidden_size"], config["head_dim"]
    q_width, kv_width = config["num_attention_heads"] * w, config["num_key_value_heads"] * w
    shapes = {"input_layernorm.weight": (big_d,)}
    for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
        shapes[f"self_attn.{name}_proj.weight"] = (width, big_d)
        if biases:
            shapes[f"self_attn.{name}_proj.bias"] = (width,)
    shapes["self_attn.o_proj.weight"] = (big_d, q_width)
    return shapes
