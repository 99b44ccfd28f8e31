"""Makes the golden files of this folder with mla_oracle.py and ffn_oracle.py.

    python3 tests/golden/make_golden.py            verify gradients, write *.safetensors beside this script
    python3 tests/golden/make_golden.py --check    verify, and compare with the files that are there

Everything is seeded: two runs on one machine write the same bytes. Another processor's NumPy may round exp or a sum
differently, so --check asks for equal inputs and for results within a few roundings.
"""

import argparse
import json
import math
import pathlib
import struct
import sys
import zlib

import numpy as np

import ffn_oracle
import mla_oracle as oracle

FOLDER = pathlib.Path(__file__).resolve().parent
CHECK_TOLERANCE = 1e-12  # relative to a tensor's largest value: sums of at most a few hundred terms
GRADIENT_TOLERANCE = 1e-8  # fourth-order differences with step 1e-3: 1e-12 of truncation, 1e-11 of cancellation


# ---------------------------------------------------------------------------------------------------------- cases


def mla_config(**changes):
    """A HF-style config of a scaled-down MLA model."""
    config = {
        "model_type": "deepseek_v3",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "rms_norm_eps": 1e-5,  # unlike the inner norms' 1e-6, so that a mix-up shows
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 163840,
        "rope_theta": 10000.0,
        "rope_interleave": True,
        "rope_scaling": None,
    }
    config.update(changes)
    return config


def gqa_config(**changes):
    """A HF-style config of a scaled-down Llama-like model."""
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": None,
    }
    config.update(changes)
    return config


def yarn(factor, beta_fast=32, beta_slow=1, **mscales):
    """rope_scaling of type yarn over an original context of 4096."""
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        **mscales,
    }


LLAMA3 = {
    "rope_type": "llama3",
    "type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LONGROPE = {
    "type": "longrope",
    "original_max_position_embeddings": 256,
    "short_factor": [1.0, 1.02, 1.07, 1.2],
    "long_factor": [1.1, 1.9, 3.4, 4.7],
}


def cases():
    """Case name -> (config, seq, batch, offset of the positions, biases, kv_a_layernorm)."""
    minicpm3 = mla_config(
        model_type="minicpm3", num_attention_heads=5, num_key_value_heads=5, qk_rope_head_dim=8, v_head_dim=6,
        max_position_embeddings=1024, rope_interleave=False, rope_scaling=LONGROPE,
    )
    kimi_k2 = mla_config(
        model_type="kimi_k2", num_attention_heads=3, num_key_value_heads=3, qk_rope_head_dim=8, rope_theta=50000.0,
        rope_scaling=yarn(32.0, beta_fast=1, beta_slow=1, mscale=1.0, mscale_all_dim=1.0),
    )
    v3_yarn = yarn(40.0, mscale=1.0, mscale_all_dim=1.0)
    v2_lite = mla_config(model_type="deepseek_v2", q_lora_rank=None, rms_norm_eps=1e-6,
                         rope_scaling=yarn(40.0, mscale=0.707, mscale_all_dim=0.707))
    glm = mla_config(model_type="glm4_moe_lite", num_attention_heads=2, num_key_value_heads=2, qk_nope_head_dim=24,
                     qk_rope_head_dim=8, v_head_dim=32, rope_theta=1e6)
    qwen = gqa_config(model_type="qwen2", num_attention_heads=5, num_key_value_heads=5, rope_theta=10000.0,
                      rms_norm_eps=1e-6, rope_scaling={"type": "linear", "factor": 4.0})
    return {
        "v2_lite": (v2_lite, 13, 2, 6001, False, True),
        "v3": (mla_config(qk_rope_head_dim=8, rope_scaling=v3_yarn), 16, 2, 5003, False, True),
        "kimi_k2": (kimi_k2, 17, 1, 70001, False, True),
        "glm": (glm, 12, 2, 901, False, True),
        "minicpm3": (minicpm3, 15, 1, 700, False, True),
        "no_kv_norm": (mla_config(q_lora_rank=None, rope_theta=500000.0), 12, 2, 257, False, False),
        "no_rope": (mla_config(qk_rope_head_dim=0), 14, 1, 33, False, True),
        "unrotated": (mla_config(model_type="kimi_linear", q_lora_rank=None, mla_use_nope=True), 14, 1, 99, False, True),
        "biases": (mla_config(attention_bias=True, rope_scaling=yarn(40.0)), 13, 2, 4999, True, True),
        "gqa_llama3": (gqa_config(rope_scaling=LLAMA3), 16, 2, 9001, False, True),
        "gqa_biases_linear": (qwen, 13, 1, 321, True, True),
    }


def ffn_config(**changes):
    """A HF-style config of a scaled-down layer with experts."""
    config = {
        "model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": 24, "intermediate_size": 20,
        "num_hidden_layers": 1, "moe_intermediate_size": 10, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-5,
    }
    config.update(changes)
    return config


def ffn_cases():
    """Case name -> (config, number of tokens)."""
    v2 = ffn_config(model_type="deepseek_v2", topk_method="group_limited_greedy", norm_topk_prob=False,
                    routed_scaling_factor=16.0, n_shared_experts=1)
    return {"ffn_v3": (ffn_config(), 13), "ffn_v2_groups": (v2, 12)}


def head_case():
    """(config, number of tokens) of a dense layer and the head after it, MiniCPM3's division of logits included."""
    config = ffn_config(model_type="minicpm3", dim_model_base=6, vocab_size=41)
    return {key: config[key] for key in config if "expert" not in key and "topk" not in key}, 11


def table_cases():
    """Table name -> (config, rope_dim, positions, num_positions): RoPE at real sizes."""
    positions = [0, 1, 100, 4095, 70001, 131071]
    scalings = {
        "none": {"rope_theta": 1e4},
        "linear": {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}},
        "v3": {"rope_theta": 1e4, "rope_scaling": yarn(40.0, mscale=1.0, mscale_all_dim=1.0)},
        "v2_lite": {"rope_theta": 1e4, "rope_scaling": yarn(40.0, mscale=0.707, mscale_all_dim=0.707)},
        "yarn_without_all_dim": {"rope_theta": 1e4, "rope_scaling": yarn(40.0)},
        "kimi_k2": {"rope_theta": 5e4,
                    "rope_scaling": yarn(32.0, beta_fast=1, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)},
        "llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        "unrotated": {"rope_theta": 1e4, "mla_use_nope": True},
    }
    tables = {name: (config, 64, positions, 131072) for name, config in scalings.items()}
    longrope = {"rope_theta": 1e4, "rope_scaling": LONGROPE, "max_position_embeddings": 1024}
    tables["longrope_short"] = (longrope, 8, [0, 1, 255], 256)
    tables["longrope_long"] = (longrope, 8, [0, 1, 256, 1000], 1001)
    return tables


# ------------------------------------------------------------------------------------------------------ seeded data


def random_tensor(case, name, shape, std=1.0, mean=0.0):
    """Normal values that float32 represents exactly; they depend on case and name alone."""
    state = np.random.RandomState(zlib.crc32(f"{case}/{name}".encode()))
    return (mean + std * state.standard_normal(shape)).astype(np.float32).astype(np.float64)


def random_weights(case, config, shapes):
    """Weights whose logits spread by about 3: under a flat softmax an error of rope or scale would not show."""
    width = config["head_dim"] if "head_dim" in config else config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    q_gain = 3.0 / (oracle.softmax_scale(config) * math.sqrt(width))
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            norm = "layernorm" in name
            weights[name] = random_tensor(case, name, shape, std=0.3, mean=1.0 if norm else 0.0)
        else:
            gain = q_gain if name in ("self_attn.q_proj.weight", "self_attn.q_b_proj.weight") else 1.0
            weights[name] = random_tensor(case, name, shape, std=gain / math.sqrt(shape[1]))
    return weights


# ------------------------------------------------------------------------------------------------- verification


def difference_quotient(loss, tensor, direction, step=1e-3):
    """Fourth-order central difference of loss() along `direction` of `tensor` (changed in place, then restored)."""
    saved = tensor.copy()

    def at(multiple):
        tensor[...] = saved + multiple * step * direction
        return loss()

    quotient = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)
    tensor[...] = saved
    return quotient


def verify_gradients(case, forward, weights, x, dy, dx, grads):
    """Compares every gradient with differences: along one random direction over all entries, and in 12 entries."""

    def loss():
        return float((forward()[0] * dy).sum())

    state = np.random.RandomState(zlib.crc32(case.encode()))
    for name, tensor in {**weights, "x": x}.items():
        gradient = dx if name == "x" else grads[name]
        assert gradient.shape == tensor.shape, (case, name)
        directions = [state.standard_normal(tensor.shape) / math.sqrt(tensor.size)]
        for index in state.choice(tensor.size, min(tensor.size, 12), replace=False):
            directions.append(np.zeros(tensor.shape))
            directions[-1].reshape(-1)[index] = 1.0
        for direction in directions:
            expected = difference_quotient(loss, tensor, direction)
            actual = float((gradient * direction).sum())
            bound = GRADIENT_TOLERANCE * (np.abs(gradient).max() + 1)
            assert abs(actual - expected) <= bound, (case, name, actual, expected)


def verify_constants():
    """The figures that model-math names."""

    def scale(n, r, **scaling):
        return oracle.softmax_scale({"kv_lora_rank": 1, "qk_nope_head_dim": n, "qk_rope_head_dim": r,
                                     "rope_scaling": yarn(**scaling)})

    assert abs(scale(128, 64, factor=40.0, mscale_all_dim=0.707) - 0.114721) < 5e-7
    assert abs(scale(128, 64, factor=40.0, mscale_all_dim=1.0) - 0.135234) < 5e-7
    assert abs(scale(128, 64, factor=32.0, mscale_all_dim=1.0) - 0.130861) < 5e-7
    for theta, betas, low, high in ((1e4, (32, 1), 10, 23), (5e4, (1, 1), 19, 20)):
        inv = np.ones(32)
        scaled = oracle.yarn_frequencies(inv, theta, 64, yarn(40.0, *betas))
        assert np.all(scaled[: low + 1] == 1) and np.all(scaled[low + 1 :] < 1)
        assert np.allclose(scaled[high:], 1 / 40) and np.all(scaled[:high] > 1 / 40)


# ------------------------------------------------------------------------------------------------------- the files


def safetensors_bytes(tensors, metadata):
    """A safetensors file: header length, JSON header padded to 8 bytes, F64 data in the header's order."""
    header, data, offset = {"__metadata__": metadata}, [], 0
    for name, tensor in tensors.items():
        raw = np.ascontiguousarray(tensor, dtype="<f8").tobytes()
        header[name] = {"dtype": "F64", "shape": list(tensor.shape), "data_offsets": [offset, offset + len(raw)]}
        data.append(raw)
        offset += len(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data)


def parse_safetensors(raw):
    """(metadata, tensors by name) of safetensors_bytes."""
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(raw[8 + length + begin : 8 + length + end], "<f8").reshape(entry["shape"])
    return metadata, tensors


def block_file(case, config, seq, batch, offset, biases, kv_norm):
    """Bytes of one block's golden file, its gradients verified."""
    is_mla = "kv_lora_rank" in config
    forward, backward = (oracle.mla_forward, oracle.mla_backward) if is_mla else (oracle.gqa_forward, oracle.gqa_backward)
    shapes = oracle.mla_shapes(config, biases, kv_norm) if is_mla else oracle.gqa_shapes(config, biases)
    weights = random_weights(case, config, shapes)
    x = random_tensor(case, "x", (seq, batch, config["hidden_size"]))
    dy = random_tensor(case, "dy", x.shape)
    y, tape = forward(config, weights, x, offset)
    dx, grads = backward(config, weights, tape, dy)
    verify_gradients(case, lambda: forward(config, weights, x, offset), weights, x, dy, dx, grads)

    intermediates = ("q", "latent", "attention", "lse") if is_mla else ("q", "k_cached", "v_cached", "attention", "lse")
    tensors = dict(weights)
    tensors.update({"x": x, "y": y, "dy": dy, "dx": dx})
    tensors.update({"grad." + name: grads[name] for name in weights})
    tensors.update({"intermediate." + name: tape[name] for name in intermediates})
    metadata = {"config": json.dumps(config), "seq": str(seq), "batch": str(batch), "position_offset": str(offset)}
    return safetensors_bytes(tensors, metadata)


def ffn_weights(case, config):
    """Seeded weights of a layer's second half; router logits with a spread of 3."""
    weights = {}
    for name, shape in ffn_oracle.ffn_shapes(config).items():
        if len(shape) == 1:
            weights[name] = random_tensor(case, name, shape, std=0.3, mean=1.0 if "layernorm" in name else 0.0)
        else:
            gain = 3.0 if name == "mlp.gate.weight" else 1.0
            weights[name] = random_tensor(case, name, shape, std=gain / math.sqrt(shape[1]))
    return weights


def verify_choice(case, config, weights, tape):
    """The choice must not hang on rounding, nor on the steps of verify_gradients."""
    scores, bias = tape["scores"], weights.get("mlp.gate.e_score_correction_bias", 0.0)
    for sign in (-1, 1):
        for e in range(scores.shape[1]):
            moved = scores.copy()
            moved[:, e] *= 1 + sign * 1e-2
            assert np.array_equal(np.sort(ffn_oracle.choose(config, moved, bias)), np.sort(tape["experts"])), (case, e)


def ffn_file(case, config, num_tokens):
    """Bytes of a golden file of a layer's second half, its gradients verified."""
    weights = ffn_weights(case, config)
    x = random_tensor(case, "x", (num_tokens, config["hidden_size"]))
    dy = random_tensor(case, "dy", x.shape)
    y, tape = ffn_oracle.ffn_forward(config, weights, x)
    verify_choice(case, config, weights, tape)
    dx, grads = ffn_oracle.ffn_backward(config, weights, tape, dy)
    trained = {name: tensor for name, tensor in weights.items() if name in grads}
    verify_gradients(case, lambda: ffn_oracle.ffn_forward(config, weights, x), trained, x, dy, dx, grads)
    tensors = {**weights, "x": x, "y": y, "dy": dy, "dx": dx, **{"grad." + name: grads[name] for name in trained}}
    tensors.update({"intermediate.scores": tape["scores"], "intermediate.experts": tape["experts"].astype(float)})
    tensors["intermediate.weights"] = np.take_along_axis(tape["weights"], tape["experts"], axis=-1)
    return safetensors_bytes(tensors, {"config": json.dumps(config)})


def head_file(case, config, num_tokens):
    """Bytes of the golden file of a dense layer and the head behind it: the loss sum's gradients through both."""
    weights = ffn_weights(case, config)
    weights["norm.weight"] = random_tensor(case, "norm.weight", (config["hidden_size"],), std=0.3, mean=1.0)
    weights["lm_head.weight"] = random_tensor(case, "lm_head.weight", (config["vocab_size"], config["hidden_size"]))
    x = random_tensor(case, "x", (num_tokens, config["hidden_size"]))
    targets = np.array([t * 17 % config["vocab_size"] if t % 4 != 2 else -1 for t in range(num_tokens)])

    def forward():
        y, tape = ffn_oracle.ffn_forward(config, weights, x)
        loss, head_tape = ffn_oracle.head_forward(config, weights, y, targets)
        return np.array(loss), tape, head_tape, y

    loss, tape, head_tape, y = forward()
    dy, head_grads = ffn_oracle.head_backward(weights, head_tape, targets)
    dx, grads = ffn_oracle.ffn_backward(config, weights, tape, dy)
    grads.update(head_grads)
    verify_gradients(case, forward, weights, x, np.array(1.0), dx, grads)
    tensors = {**weights, "x": x, "y": y, "dy": dy, "dx": dx, **{"grad." + name: grads[name] for name in weights}}
    tensors.update({"targets": targets.astype(float), "losses": head_tape["losses"], "logits": head_tape["logits"]})
    return safetensors_bytes(tensors, {"config": json.dumps(config)})


def tables_file():
    """Bytes of rope_tables.safetensors: cos and sin of every scaling, described in the metadata's `tables`."""
    tensors, described = {}, {}
    for name, (config, rope_dim, positions, num_positions) in table_cases().items():
        tensors[name + ".cos"], tensors[name + ".sin"] = oracle.rope_tables(config, rope_dim, positions, num_positions)
        described[name] = {"config": config, "rope_dim": rope_dim, "positions": positions,
                           "num_positions": num_positions}
    return safetensors_bytes(tensors, {"tables": json.dumps(described)})


def differences(raw, committed):
    """What differs between two golden files beyond rounding, as text; empty if nothing does."""
    if raw == committed:
        return ""
    (metadata, tensors), (old_metadata, old_tensors) = parse_safetensors(raw), parse_safetensors(committed)
    if metadata != old_metadata or list(tensors) != list(old_tensors):
        return "metadata or names"
    for name, tensor in tensors.items():
        old = old_tensors[name]
        if tensor.shape != old.shape or np.abs(tensor - old).max() > CHECK_TOLERANCE * max(np.abs(old).max(), 1e-300):
            return name
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    check = parser.parse_args().check
    verify_constants()
    files = {case: block_file(case, *arguments) for case, arguments in cases().items()}
    files.update({case: ffn_file(case, *arguments) for case, arguments in ffn_cases().items()})
    files["dense_head"] = head_file("dense_head", *head_case())
    files["rope_tables"] = tables_file()
    bad = False
    for name, raw in files.items():
        path = FOLDER / f"{name}.safetensors"
        status = "written"
        if check:
            difference = differences(raw, path.read_bytes()) if path.exists() else "missing"
            bad = bad or bool(difference)
            status = f"DIFFERS: {difference}" if difference else "same" if raw == path.read_bytes() else "same to rounding"
        else:
            path.write_bytes(raw)
        print(f"{name:20} {len(raw):7} bytes  crc32 {zlib.crc32(raw):08x}  {status}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
