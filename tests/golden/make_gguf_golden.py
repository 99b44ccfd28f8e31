"""Makes gguf/*.gguf, and beside each the tensors that it stands for, as NumPy reads it (gguf_oracle.py).

    python3 tests/golden/make_gguf_golden.py            write the files
    python3 tests/golden/make_gguf_golden.py --check    compare with the files that are there
"""

import argparse
import pathlib
import sys

import numpy as np

import gguf_oracle as gguf
import make_golden as blocks

FOLDER = pathlib.Path(__file__).resolve().parent / "gguf"


def byte_alphabet():
    """GPT-2's visible character for each byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {**{byte: chr(byte) for byte in visible}, **{byte: chr(256 + i) for i, byte in enumerate(hidden)}}


def tokenizer():
    """SmolLM's kind: three control tokens, one that users add, the bytes, and what the merges make."""
    merges = ["Ġ t", "h e", "Ġt he", "i n", "1 2", "' s"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[user]"]
    tokens += [character for byte, character in byte_alphabet().items() if byte != 4]  # as SmolLM's, which lacks some
    tokens += [merge.replace(" ", "") for merge in merges]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(tokens) - 4), "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{'<|im_start|>' + message['role']}}",
    }


class Builder:
    """A file and what it stands for, tensor by tensor."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.tensors, self.expected = {}, {}

    def add(self, name, kind, shape, hugging_face=None):
        raw = gguf.random_blocks(kind, shape, self.rng)
        self.tensors[name] = (kind, shape, raw)
        value = gguf.dequantise(kind, raw, int(np.prod(shape))).reshape(shape)
        if hugging_face:
            self.expected[hugging_face] = value
        return value


def pairs_undone(value, heads):
    """Rows of each head from adjacent pairs back to halves."""
    dim = value.shape[0] // heads
    return value.reshape(heads, dim // 2, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def llama():
    """Grouped-query attention with biases on q and k; every type with blocks of 32, F16, BF16 and F32."""
    hidden, heads, kv_heads, ffn = 32, 4, 2, 64
    words = tokenizer()
    vocabulary = len(words["tokenizer.ggml.tokens"])
    metadata = {
        "general.architecture": "llama", "general.name": "tiny llama", "general.alignment": 64,
        "llama.block_count": 2, "llama.context_length": 128, "llama.embedding_length": hidden,
        "llama.feed_forward_length": ffn, "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads, "llama.rope.freq_base": 100000.0,
        "llama.rope.dimension_count": hidden // heads, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": vocabulary, **words,
    }
    b = Builder(1)
    b.add("token_embd.weight", "Q8_0", [vocabulary, hidden], "model.embed_tokens.weight")
    b.add("output_norm.weight", "F32", [hidden], "model.norm.weight")
    kinds = [["Q4_1", "Q4_0", "F16", "BF16"], ["Q8_0", "Q4_1", "F32", "Q4_0"]]
    for layer, (of_q, of_k, of_v, of_rest) in enumerate(kinds):
        ours, theirs = f"blk.{layer}.", f"model.layers.{layer}."
        b.add(ours + "attn_norm.weight", "F32", [hidden], theirs + "input_layernorm.weight")
        b.add(ours + "ffn_norm.weight", "F32", [hidden], theirs + "post_attention_layernorm.weight")
        head_dim = hidden // heads
        for part, kind, count in (("q", of_q, heads), ("k", of_k, kv_heads)):
            weight = b.add(f"{ours}attn_{part}.weight", kind, [count * head_dim, hidden])
            bias = b.add(f"{ours}attn_{part}.bias", "F32", [count * head_dim])
            b.expected[f"{theirs}self_attn.{part}_proj.weight"] = pairs_undone(weight, count)
            b.expected[f"{theirs}self_attn.{part}_proj.bias"] = pairs_undone(bias, count)
        b.add(ours + "attn_v.weight", of_v, [kv_heads * head_dim, hidden], theirs + "self_attn.v_proj.weight")
        b.add(ours + "attn_output.weight", of_rest, [hidden, hidden], theirs + "self_attn.o_proj.weight")
        for part, shape in (("gate", [ffn, hidden]), ("up", [ffn, hidden]), ("down", [hidden, ffn])):
            b.add(f"{ours}ffn_{part}.weight", of_rest, shape, f"{theirs}mlp.{part}_proj.weight")
    return gguf.write(metadata, b.tensors, alignment=64), b.expected


def deepseek2():
    """V3's kind: k_b and v_b apart in layer 0, together in layer 1; experts stacked; YaRN."""
    hidden, heads, q_lora, kv_lora, n, r, v, ffn, experts, moe_ffn = 32, 2, 32, 32, 32, 8, 16, 32, 3, 32
    metadata = {
        "general.architecture": "deepseek2", "deepseek2.block_count": 2, "deepseek2.context_length": 256,
        "deepseek2.embedding_length": hidden, "deepseek2.feed_forward_length": ffn, "deepseek2.vocab_size": 8,
        "deepseek2.attention.head_count": heads, "deepseek2.attention.head_count_kv": 1,
        "deepseek2.attention.layer_norm_rms_epsilon": 1e-6, "deepseek2.attention.q_lora_rank": q_lora,
        "deepseek2.attention.kv_lora_rank": kv_lora, "deepseek2.attention.key_length": kv_lora + r,
        "deepseek2.attention.value_length": kv_lora, "deepseek2.attention.key_length_mla": n + r,
        "deepseek2.attention.value_length_mla": v, "deepseek2.rope.dimension_count": r,
        "deepseek2.rope.freq_base": 10000.0, "deepseek2.rope.scaling.type": "yarn",
        "deepseek2.rope.scaling.factor": 40.0, "deepseek2.rope.scaling.original_context_length": 64,
        "deepseek2.rope.scaling.yarn_log_multiplier": 0.0707, "deepseek2.leading_dense_block_count": 1,
        "deepseek2.expert_count": experts, "deepseek2.expert_used_count": 2, "deepseek2.expert_shared_count": 1,
        "deepseek2.expert_feed_forward_length": moe_ffn, "deepseek2.expert_weights_scale": 2.5,
        "deepseek2.expert_weights_norm": True, "deepseek2.expert_gating_func": 2,
    }
    b = Builder(2)
    b.add("token_embd.weight", "F16", [8, hidden], "model.embed_tokens.weight")
    b.add("output_norm.weight", "F32", [hidden], "model.norm.weight")
    b.add("output.weight", "Q8_0", [8, hidden], "lm_head.weight")
    for layer in range(2):
        ours, theirs = f"blk.{layer}.", f"model.layers.{layer}."
        attention = theirs + "self_attn."
        b.add(ours + "attn_norm.weight", "F32", [hidden], theirs + "input_layernorm.weight")
        b.add(ours + "ffn_norm.weight", "F32", [hidden], theirs + "post_attention_layernorm.weight")
        b.add(ours + "attn_q_a.weight", "Q4_1", [q_lora, hidden], attention + "q_a_proj.weight")
        b.add(ours + "attn_q_a_norm.weight", "F32", [q_lora], attention + "q_a_layernorm.weight")
        b.add(ours + "attn_q_b.weight", "Q8_0", [heads * (n + r), q_lora], attention + "q_b_proj.weight")
        b.add(ours + "attn_kv_a_mqa.weight", "Q4_0", [kv_lora + r, hidden], attention + "kv_a_proj_with_mqa.weight")
        b.add(ours + "attn_kv_a_norm.weight", "F32", [kv_lora], attention + "kv_a_layernorm.weight")
        if layer == 0:
            keys = b.add(ours + "attn_k_b.weight", "Q8_0", [heads, kv_lora, n])
            values = b.add(ours + "attn_v_b.weight", "Q4_1", [heads, v, kv_lora])
            both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
            b.expected[attention + "kv_b_proj.weight"] = both.reshape(heads * (n + v), kv_lora)
        else:
            b.add(ours + "attn_kv_b.weight", "BF16", [heads * (n + v), kv_lora], attention + "kv_b_proj.weight")
        b.add(ours + "attn_output.weight", "F32", [hidden, heads * v], attention + "o_proj.weight")
    for part, shape in (("gate", [ffn, hidden]), ("up", [ffn, hidden]), ("down", [hidden, ffn])):
        b.add(f"blk.0.ffn_{part}.weight", "Q8_0", shape, f"model.layers.0.mlp.{part}_proj.weight")
        stacked = b.add(f"blk.1.ffn_{part}_exps.weight", "Q4_0", [experts, *shape])
        for expert in range(experts):
            b.expected[f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"] = stacked[expert]
        b.add(f"blk.1.ffn_{part}_shexp.weight", "Q4_1", shape, f"model.layers.1.mlp.shared_experts.{part}_proj.weight")
    b.add("blk.1.ffn_gate_inp.weight", "F32", [experts, hidden], "model.layers.1.mlp.gate.weight")
    b.add("blk.1.exp_probs_b.bias", "F32", [experts], "model.layers.1.mlp.gate.e_score_correction_bias")
    return gguf.write(metadata, b.tensors), b.expected


def every_type():
    """Two rows of every type: all bit patterns of blocks."""
    b = Builder(3)
    for kind in gguf.TYPES:
        b.add(kind, kind, [2, 256], kind)
    return gguf.write({"general.architecture": "none"}, b.tensors), b.expected


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    differ = []
    for name, case in (("llama", llama), ("deepseek2", deepseek2), ("types", every_type)):
        raw, expected = case()
        read_back = gguf.read(raw)[1]
        assert all(np.isfinite(value).all() for value in read_back.values())
        tensors = {key: value.astype(np.float64) for key, value in expected.items()}
        for path, data in ((FOLDER / f"{name}.gguf", raw), (FOLDER / f"{name}.safetensors", blocks.safetensors_bytes(tensors, {}))):
            if not check:
                path.write_bytes(data)
            elif path.read_bytes() != data:
                differ.append(path.name)
    if differ:
        sys.exit("not what this script makes: " + ", ".join(differ))


if __name__ == "__main__":
    main()
