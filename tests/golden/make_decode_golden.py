"""Makes the golden files of decoding, decode_*.safetensors: logits of every position of one long text, by the forward
of model_oracle.py over the whole sequence.

    python3 tests/golden/make_decode_golden.py            write the files beside this script
    python3 tests/golden/make_decode_golden.py --check    compare with the files that are there

An engine that reads the same tokens one by one, under any exact layout, must come to the same logits. Seeded like
make_model_golden.py, whose helpers it uses; the backward that would verify a forward is verified there.
"""

import argparse
import json
import pathlib
import sys
import zlib

import numpy as np

import make_golden as blocks
import make_model_golden as models
import model_oracle as oracle

FOLDER = pathlib.Path(__file__).resolve().parent
TOKENS = 320
SMALLEST_GAP = 1e-8  # between an expert chosen and one not: far above what float64 rounds


def cases():
    """Case name -> (config, biases). Four heads, so that four ranks may share them; YaRN beyond its original context."""
    scaling = {**blocks.yarn(8.0, mscale=1.0, mscale_all_dim=1.0), "original_max_position_embeddings": 64}
    mla_moe = blocks.mla_config(
        vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6,
        rope_scaling=scaling, n_routed_experts=8, num_experts_per_tok=3,
        n_shared_experts=1, moe_intermediate_size=4, first_k_dense_replace=1, n_group=4, topk_group=2,
        norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="sigmoid", topk_method="noaux_tc",
    )
    gqa_dense = blocks.gqa_config(
        model_type="qwen2", vocab_size=24, hidden_size=16, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, rope_theta=100.0, tie_word_embeddings=True,
    )
    return {"decode_mla_moe": (mla_moe, False), "decode_gqa_dense": (gqa_dense, True)}


def decode_file(case, config, biases):
    """Bytes of one file: weights, tokens [T], logits [T, V]."""
    weights = models.random_weights(case, config, biases)
    data = models.packed_documents(case, config, (TOKENS,), False)
    experts = [None] * config["num_hidden_layers"]
    _, _, tape = oracle.model_forward(config, weights, data, experts)
    assert tape["gap"] > SMALLEST_GAP, (case, tape["gap"])
    tensors = dict(weights)
    tensors["tokens"] = data["tokens"].astype(np.float64)
    tensors["logits"] = tape["normed"] @ weights[oracle.head_name(config)].T
    return blocks.safetensors_bytes(tensors, {"config": json.dumps(config)})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    check = parser.parse_args().check
    bad = False
    for name, arguments in cases().items():
        raw = decode_file(name, *arguments)
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
