"""Makes the golden files of whole models, model_*.safetensors, with model_oracle.py.

    python3 tests/golden/make_model_golden.py            verify gradients, write the files beside this script
    python3 tests/golden/make_model_golden.py --check    verify, and compare with the files that are there

Seeded like make_golden.py, whose helpers it uses.
"""

import argparse
import json
import math
import pathlib
import sys
import zlib

import numpy as np

import make_golden as blocks
import mla_oracle
import model_oracle as oracle

FOLDER = pathlib.Path(__file__).resolve().parent
SMALLEST_GAP = 1e-5  # between the scores of an expert chosen and one not: no rounding may change a choice


def cases():
    """Case name -> (config, lengths of the packed documents, whether positions start anew with each, biases)."""
    mla_moe = blocks.mla_config(
        vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6,
        rope_scaling=blocks.yarn(40.0, mscale=1.0, mscale_all_dim=1.0), n_routed_experts=8, num_experts_per_tok=3,
        n_shared_experts=1, moe_intermediate_size=4, first_k_dense_replace=1, n_group=4, topk_group=2,
        norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="sigmoid", topk_method="noaux_tc",
    )
    gqa_dense = blocks.gqa_config(
        model_type="qwen2", vocab_size=24, hidden_size=16, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, rope_theta=100.0, tie_word_embeddings=True,
    )
    return {"model_mla_moe": (mla_moe, (9, 8), False, False), "model_gqa_dense": (gqa_dense, (6, 11), True, True)}


def random_weights(case, config, biases):
    """Each matrix N(0, 1/fan_in), queries so that logits spread by about 3, norms and biases as in make_golden.py."""
    weights = {}
    for name, shape in oracle.model_shapes(config, biases).items():
        if len(shape) == 1:
            is_norm = "norm" in name
            weights[name] = blocks.random_tensor(case, name, shape, std=0.3 if is_norm else 0.1, mean=float(is_norm))
            continue
        gain = 1.0
        if name.endswith(("q_proj.weight", "q_b_proj.weight")):
            width = config.get("head_dim") or config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
            gain = 3.0 / (mla_oracle.softmax_scale(config) * math.sqrt(width))
        std = 1.0 if name == "model.embed_tokens.weight" else gain / math.sqrt(shape[1])
        weights[name] = blocks.random_tensor(case, name, shape, std=std)
    return weights


def packed_documents(case, config, lengths, restart):
    """tokens, targets, segments and positions of documents one after another; the last of each has no target."""
    state = np.random.RandomState(zlib.crc32(f"{case}/tokens".encode()))
    data = {"tokens": state.randint(0, config["vocab_size"], sum(lengths))}
    data["segments"] = np.repeat(np.arange(len(lengths)), lengths)
    data["positions"] = np.concatenate([np.arange(n) for n in lengths]) if restart else np.arange(sum(lengths))
    data["targets"] = np.append(data["tokens"][1:], -1)
    data["targets"][np.cumsum(lengths) - 1] = -1
    return data


def verify_gradients(case, config, weights, data, experts, grads):
    """Every gradient against fourth-order differences: one random direction over all entries, and 4 entries."""

    def loss():
        return float(oracle.model_forward(config, weights, data, experts)[0])

    state = np.random.RandomState(zlib.crc32(case.encode()))
    for name, tensor in weights.items():
        if name.endswith("e_score_correction_bias"):
            continue
        directions = [state.standard_normal(tensor.shape) / math.sqrt(tensor.size)]
        for index in state.choice(tensor.size, min(tensor.size, 4), replace=False):
            directions.append(np.zeros(tensor.shape))
            directions[-1].reshape(-1)[index] = 1.0
        for direction in directions:
            expected = blocks.difference_quotient(loss, tensor, direction)
            actual = float((grads[name] * direction).sum())
            assert abs(actual - expected) <= blocks.GRADIENT_TOLERANCE, (case, name, actual, expected)


def model_file(case, config, lengths, restart, biases):
    """Bytes of one model's golden file, its gradients verified."""
    weights = random_weights(case, config, biases)
    data = packed_documents(case, config, lengths, restart)
    experts = [None] * config["num_hidden_layers"]
    loss, losses, tape = oracle.model_forward(config, weights, data, experts)
    assert tape["gap"] > SMALLEST_GAP, (case, tape["gap"])
    grads = oracle.model_backward(config, weights, data, experts, tape)
    verify_gradients(case, config, weights, data, experts, grads)

    tensors = dict(weights)
    tensors.update({name: values.astype(np.float64) for name, values in data.items()})
    tensors.update({f"experts.{i}": e.astype(np.float64) for i, e in enumerate(experts) if e is not None})
    tensors.update({"loss": np.array([loss]), "losses": losses})
    tensors.update({f"output.{i}": layer["output"] for i, layer in enumerate(tape["layers"])})
    tensors.update({"grad." + name: grads[name] for name in weights if name in grads})
    return blocks.safetensors_bytes(tensors, {"config": json.dumps(config)})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    check = parser.parse_args().check
    bad = False
    for name, arguments in cases().items():
        raw = model_file(name, *arguments)
        path = FOLDER / f"{name}.safetensors"
        status = "written"
        if check:
            difference = blocks.differences(raw, path.read_bytes()) if path.exists() else "missing"
            bad = bad or bool(difference)
            status = f"DIFFERS: {difference}" if difference else "same"
        else:
            path.write_bytes(raw)
        print(f"{name:20} {len(raw):7} bytes  crc32 {zlib.crc32(raw):08x}  {status}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
