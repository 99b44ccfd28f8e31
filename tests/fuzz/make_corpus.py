#!/usr/bin/env python3
"""Writes the seeds of the fuzzers: corpus/{safetensors,config,tokenizer_json,gguf,tpla_side}/{good,bad}-*. Deterministic; run it after adding one."""

import json
import struct
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODELS = HERE.parent.parent / "models"


def file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors_seeds():
    x = lambda n: bytes(i * 7 % 256 for i in range(n))
    good = {"t": tensor("F32", [2], 0, 8)}
    pair = lambda dtype, begin, end: {"a": tensor("F32", [2], 0, 8), "b": tensor(dtype, [2], begin, end)}
    fp8 = {"w": tensor("F8_E4M3", [130, 129], 16, 16 + 130 * 129), "w_scale_inv": tensor("F32", [2, 2], 0, 16)}
    yield "good-empty", file("{}")
    yield "good-f32", file(good, x(8))
    yield "good-f16", file({"t": tensor("F16", [3, 5], 0, 30)}, x(30))
    yield "good-bf16-unaligned", file(json.dumps({"t": tensor("BF16", [4, 3], 0, 24)}) + " ", x(24))
    yield "good-every-kind", file(
        {"a": tensor("F64", [1, 1], 0, 8), "b": tensor("I64", [1], 8, 16), "c": tensor("BOOL", [3], 16, 19),
         "d": tensor("F32", [], 20, 24), "e": tensor("U8", [1], 19, 20), "__metadata__": {"format": "pt"}}, x(24))
    yield "good-fp8", file(fp8, x(16 + 130 * 129))
    yield "good-fp8-no-scale", file({"w": tensor("F8_E4M3", [1, 1], 0, 1)}, b"8")
    yield "good-zero-size", file({"a": tensor("F32", [0, 7], 0, 0), "t": tensor("F32", [2], 0, 8)}, x(8))
    yield "good-index", json.dumps({"metadata": {"total_size": 1}, "weight_map": {"t": "model-00001-of-00001.safetensors"}}).encode()
    yield "bad-nothing", b""
    yield "bad-short", b"1234567"
    yield "bad-length-beyond-file", file("{}", length=100)
    yield "bad-length-negative", file("{}", length=2**63)
    yield "bad-length-max", file("{}", length=2**64 - 1)
    yield "bad-length-limit", file("{}", length=200_000_000)
    yield "bad-length-zero", file("")
    yield "bad-array", file("[]")
    yield "bad-json", file('{"t":')
    yield "bad-nested-arrays", file("[" * 3000)
    yield "bad-nested-objects", file('{"a":' * 1000)
    yield "bad-utf8", file(b'{"\xff\xfe":1}')
    yield "bad-entry", file({"t": 3})
    yield "bad-metadata", file({"__metadata__": {"a": 1}})
    yield "bad-truncated", file(good, x(7))
    yield "bad-trailing", file(good, x(9))
    yield "bad-dtype", file({"t": tensor("F33", [2], 0, 8)}, x(8))
    yield "bad-shape-product", file({"t": tensor("F32", [3], 0, 8)}, x(8))
    yield "bad-shape-negative", file({"t": tensor("F32", [-2], 0, 8)}, x(8))
    yield "bad-shape-overflow", file({"t": tensor("F32", [2**62, 4, 2], 0, 8)}, x(8))
    yield "bad-shape-zero-overflow", file({"t": tensor("F32", [0, 2**62, 8], 0, 0)})
    yield "bad-shape-float", file({"t": tensor("F32", [2.0], 0, 8)}, x(8))
    yield "bad-offsets-order", file({"t": tensor("F32", [2], 8, 0)}, x(8))
    yield "bad-offsets-one", file({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, x(8))
    yield "bad-overlap", file(pair("F32", 4, 12), x(16))
    yield "bad-same-place", file(pair("F32", 0, 8), x(8))
    yield "bad-hole", file(pair("F32", 16, 24), x(24))
    yield "bad-misaligned", file({"a": tensor("U8", [1], 0, 1), "b": tensor("F32", [1], 1, 5)}, x(5))
    yield "bad-duplicate-name", file('{"t":%s,"t":%s}' % ((json.dumps(tensor("U8", [1], 0, 1)),) * 2), b"x")
    yield "bad-index-outside", json.dumps({"weight_map": {"t": "../x.safetensors"}}).encode()
    yield "bad-index-absolute", json.dumps({"weight_map": {"t": "/etc/passwd"}}).encode()
    yield "bad-index-empty", b'{"weight_map":{}}'
    yield "bad-index-number", b'{"weight_map":{"t":1}}'


def config_seeds():
    for path in sorted(MODELS.glob("*.json")):
        yield "good-" + path.stem, path.read_bytes()
    v3 = json.loads((MODELS / "deepseek-v3.json").read_text())
    minicpm = json.loads((MODELS / "minicpm3.json").read_text())
    llama = json.loads((MODELS / "llama-3.1-405b.json").read_text())
    with_ = lambda base, **changes: json.dumps({**base, **changes}).encode()
    parameters = {**{k: v for k, v in v3["rope_scaling"].items() if k != "type"}, "rope_type": "yarn", "rope_theta": 1e4}
    yield "good-rope-parameters", with_(v3, rope_scaling=None, rope_parameters=parameters)
    yield "bad-nothing", b""
    yield "bad-array", b"[]"
    yield "bad-nested", b'{"model_type":' + b"[" * 3000
    yield "bad-nan", b'{"model_type":"llama","rope_theta":NaN}'
    yield "bad-duplicate-key", b'{"model_type":"llama","model_type":"qwen2"}'
    yield "bad-utf8", b'{"model_type":"\xff"}'
    yield "bad-model-type", with_(v3, model_type="gpt2")
    yield "bad-missing", with_(v3, kv_lora_rank=None)
    yield "bad-negative", with_(v3, hidden_size=-1)
    yield "bad-huge", with_(v3, hidden_size=2**63)
    yield "bad-float", with_(v3, vocab_size=1e5)
    yield "bad-string", with_(v3, num_hidden_layers="61")
    yield "bad-groups", with_(v3, n_group=7)
    yield "bad-topk", with_(v3, num_experts_per_tok=200)
    yield "bad-odd-rope", with_(v3, qk_rope_head_dim=63)
    yield "bad-total", with_(v3, hidden_size=2**24, n_routed_experts=2**16, moe_intermediate_size=2**24)
    yield "bad-yarn", with_(v3, rope_scaling={"type": "yarn", "factor": 0})
    yield "bad-scaling-kind", with_(v3, rope_scaling={"type": "ntk"})
    yield "bad-layer-types", with_(v3, mlp_layer_types=["dense", 3])
    yield "bad-longrope", with_(minicpm, rope_scaling={"type": "longrope", "short_factor": [1], "long_factor": [{}]})
    yield "bad-heads", with_(llama, num_key_value_heads=7)
    yield "bad-llama3", with_(llama, rope_scaling={"rope_type": "llama3", "factor": 8})


def byte_characters():
    """GPT-2's alphabet: the visible bytes as they are, the others from U+0100 on."""
    visible = [b for b in range(256) if 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE]
    return [chr(c) for c in visible + [256 + i for i in range(256 - len(visible))]]


def tokenizer_json_seeds():
    vocab = {c: i for i, c in enumerate(byte_characters())}
    for token in ("in", "Ġw", "Ġwo", "ing"):
        vocab[token] = len(vocab)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = {**level, "use_regex": False}
    token = lambda i, content, **flags: {"id": 260 + i, "content": content, "single_word": False, "lstrip": False,
                                         "rstrip": False, "normalized": False, "special": True, **flags}
    split = lambda pattern, behavior="Isolated", invert=False: {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}
    steps = lambda *items: {"type": "Sequence", "pretokenizers": list(items)}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": vocab, "merges": [["i", "n"], ["Ġ", "w"], ["Ġw", "o"], ["in", "g"]]}
    base = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [token(0, "<|endoftext|>")],
            "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model}
    with_ = lambda **changes: json.dumps({**base, **changes}, ensure_ascii=False, separators=(",", ":")).encode()
    with_model = lambda **changes: with_(model={**model, **changes})
    begin = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}},
                                                      {"Sequence": {"id": "A", "type_id": 0}}],
             "pair": [], "special_tokens": {"x": {"id": "x", "ids": [260], "tokens": ["x"]}}}
    yield "good-plain", with_()
    yield "good-text-merges", with_model(merges=["i n", "Ġ w", "Ġw o", "in g"], ignore_merges=True)
    yield "good-sequence", with_(pre_tokenizer=steps({"type": "Digits", "individual_digits": True}, split("\\s+", "Removed"),
                                                     split("[a-e]", "MergedWithNext", True), plain))
    yield "good-flags", with_(added_tokens=[token(0, "[A]", lstrip=True, rstrip=True), token(1, "word", single_word=True),
                                            token(2, "<|", normalized=True), token(3, "<|endoftext|>")])
    yield "good-template", with_(post_processor={"type": "Sequence", "processors": [level, begin]})
    yield "good-backtracking", with_(pre_tokenizer=steps(split("(?:(?:[a-z]+)+)+[!?]"), plain))
    yield "bad-nothing", b""
    yield "bad-array", b"[]"
    yield "bad-nested", b'{"model":' + b"[" * 3000
    yield "bad-duplicate-key", b'{"model":1,"model":1}'
    yield "bad-no-model", b"{}"
    yield "bad-model-kind", with_model(type="WordPiece")
    yield "bad-vocab-array", with_model(vocab=[["a", 0]])
    yield "bad-vocab-short", with_model(vocab={"a": 0})
    yield "bad-vocab-id-twice", with_model(vocab={**vocab, "in": 0})
    yield "bad-vocab-id-huge", with_model(vocab={**vocab, "in": 2**31})
    yield "bad-vocab-id-gap", with_model(vocab={**vocab, "in": 100000})
    yield "bad-vocab-id-negative", with_model(vocab={**vocab, "in": -1})
    yield "bad-merges-unknown", with_model(merges=[["i", "☃"]])
    yield "bad-merges-result", with_model(merges=[["i", "i"]])
    yield "bad-merges-number", with_model(merges=[7])
    yield "bad-merges-one", with_model(merges=["in"])
    yield "bad-dropout", with_model(dropout=0.5)
    yield "bad-normalizer", with_(normalizer={"type": "NFC"})
    yield "bad-decoder", with_(decoder=None)
    yield "bad-pre-tokenizer", with_(pre_tokenizer={"type": "Metaspace"})
    yield "bad-pattern", with_(pre_tokenizer=steps(split("(("), plain))
    yield "bad-pattern-verb", with_(pre_tokenizer=steps(split("(*LIMIT_MATCH=1)a"), plain))
    yield "bad-pattern-nested", with_(pre_tokenizer=steps(split("(" * 500 + ")" * 500), plain))
    yield "bad-pattern-repeat", with_(pre_tokenizer=steps(split("(?:(?:a{60000}){60000})"), plain))
    yield "bad-sequence-nested", with_(pre_tokenizer=steps(*[steps(split("a"))] * 70, plain))
    yield "bad-token-id", with_(added_tokens=[token(5, "<|endoftext|>")])
    yield "bad-token-empty", with_(added_tokens=[token(0, "")])
    yield "bad-token-twice", with_(added_tokens=[token(0, "a b"), token(0, "a b")])
    yield "bad-template", with_(post_processor={**begin, "special_tokens": {"x": {"ids": [261]}}})


def gguf_text(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_value(value):
    if isinstance(value, bytes):  # with its type, as it stands in the file
        return value
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, list) and value and isinstance(value[0], int):
        return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(gguf_text, value))
    return struct.pack("<II", 4, value)


def gguf_file(metadata, tensors, alignment=32, version=3, counts=None, cut=None):
    """tensors: (name, type, sizes with the fastest first, data[, offset])."""
    table, data = b"", b""
    for name, kind, sizes, content, *offset in tensors:
        data += bytes(-len(data) % alignment)
        table += gguf_text(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        table += struct.pack("<IQ", kind, offset[0] if offset else len(data))
        data += content
    num_tensors, num_metadata = counts or (len(tensors), len(metadata))
    out = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_metadata)
    out += b"".join(gguf_text(key) + gguf_value(value) for key, value in metadata.items()) + table
    return (out + bytes(-len(out) % alignment) + data)[:cut]


def gguf_seeds():
    x = lambda n: bytes(i * 7 % 64 for i in range(n))
    llama = {"general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64,
             "llama.embedding_length": 8, "llama.feed_forward_length": 8, "llama.attention.head_count": 2,
             "llama.rope.freq_base": 10000.0}
    words = byte_characters() + ["<|im_end|>", "in"]
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": words,
              "tokenizer.ggml.token_type": [1] * 256 + [3, 1], "tokenizer.ggml.merges": ["i n"],
              "tokenizer.ggml.eos_token_id": 256}
    embedding = ("token_embd.weight", 0, [8, 3], x(96))
    deepseek = {"general.architecture": "deepseek2", "deepseek2.attention.head_count": 2}
    one = lambda *tensor: gguf_file(llama, [embedding, tensor])
    yield "good-llama", gguf_file(llama, [embedding, ("blk.0.attn_q.weight", 0, [8, 8], x(256)),
                                          ("blk.0.attn_k.bias", 1, [8], x(16)), ("rope_freqs.weight", 0, [2], x(8))])
    yield "good-tokenizer", gguf_file({**llama, **tokens}, [("token_embd.weight", 1, [8, 258], x(8 * 258 * 2))])
    yield "good-blocks", gguf_file(llama, [("a", 2, [32, 2], x(36)), ("b", 3, [32], x(20)), ("c", 8, [32, 1, 2], x(68)),
                                           ("d", 12, [256], x(144)), ("e", 14, [256, 2], x(420)), ("f", 30, [3], x(6))])
    yield "good-deepseek2", gguf_file(deepseek, [("blk.0.attn_k_b.weight", 1, [2, 4, 2], x(32)),
                                                 ("blk.0.attn_v_b.weight", 1, [4, 3, 2], x(48)),
                                                 ("blk.1.ffn_up_exps.weight", 0, [2, 2, 3], x(48))])
    yield "good-version-2", gguf_file(llama, [embedding], version=2)
    yield "good-alignment", gguf_file({**llama, "general.alignment": 8}, [embedding], alignment=8)
    yield "bad-nothing", b""
    yield "bad-magic", b"GGML" + x(60)
    yield "bad-big-endian", b"GGUF" + struct.pack(">IQQ", 3, 0, 0)
    yield "bad-version", gguf_file(llama, [embedding], version=1)
    yield "bad-tensor-count", gguf_file(llama, [embedding], counts=(2**64 - 1, 7))
    yield "bad-metadata-count", gguf_file(llama, [embedding], counts=(1, 2**40))
    yield "bad-one-more-tensor", gguf_file(llama, [embedding], counts=(2, 7))
    yield "bad-cut-table", gguf_file(llama, [embedding], cut=300)
    yield "bad-cut-data", gguf_file(llama, [embedding], cut=-1)
    yield "bad-key-length", b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + x(40)
    yield "bad-value-type", gguf_file({"a": struct.pack("<IQ", 13, 0)}, [])
    yield "bad-array-length", gguf_file({"a": struct.pack("<IIQ", 9, 8, 2**61)}, [])
    yield "bad-array-nested", gguf_file({"a": struct.pack("<IIQ", 9, 9, 1) + x(12)}, [])
    yield "bad-flag", gguf_file({"a": struct.pack("<IB", 7, 2)}, [])
    yield "bad-architecture", gguf_file({"general.architecture": "gpt2"}, [embedding])
    yield "bad-no-architecture", gguf_file({}, [embedding])
    yield "bad-alignment", gguf_file({**llama, "general.alignment": 24}, [embedding])
    yield "bad-alignment-text", gguf_file({**llama, "general.alignment": "32"}, [embedding])
    yield "bad-dims", one("t", 0, [1] * 5, x(4))
    yield "bad-no-dims", one("t", 0, [], x(4))
    yield "bad-size-zero", one("t", 0, [0, 4], b"")
    yield "bad-size-overflow", one("t", 0, [2**62, 2**62], x(4))
    yield "bad-bytes-overflow", one("t", 0, [2**62], x(4))
    yield "bad-type", one("t", 7, [32], x(32))
    yield "bad-block", one("t", 8, [33], x(64))
    yield "bad-offset-alignment", one("t", 0, [2], x(8), 97)
    yield "bad-offset-beyond", one("t", 0, [2], x(8), 2**62)
    yield "bad-overlap", one("t", 0, [2], x(8), 64)
    yield "bad-twice", one("token_embd.weight", 0, [2], x(8))
    yield "bad-same-target", one("model.embed_tokens.weight", 0, [2], x(8))
    yield "bad-heads", one("blk.0.attn_q.weight", 0, [8, 3], x(96))
    yield "bad-experts", one("blk.0.ffn_up_exps.weight", 0, [8, 3], x(96))
    yield "bad-k-alone", gguf_file(deepseek, [("blk.0.attn_k_b.weight", 1, [2, 4, 2], x(32))])
    yield "bad-k-and-v", gguf_file(deepseek, [("blk.0.attn_k_b.weight", 1, [2, 4, 2], x(32)),
                                              ("blk.0.attn_v_b.weight", 1, [4, 3, 1], x(24))])


def tpla_side_seeds():
    """tpla.json, a zero byte, tpla.safetensors, of the model in targets.h: 1 layer, 2 heads, d 4, r 2."""
    doubles = lambda *values: struct.pack(f"<{len(values)}d", *values)
    base = {"format": "isomer-tpla", "version": 1, "isomer": "0.1", "transform": "pca", "shards": 2, "shared_columns": 0,
            "rms": "sliced", "kappa": "lsq", "align_steps": 0, "seed": 1, "num_hidden_layers": 1, "num_attention_heads": 2,
            "kv_lora_rank": 4, "qk_rope_head_dim": 2, "weights_hash": "0" * 16, "scalars_hash": "f" * 16,
            "calibration": {"files": [{"name": "a.txt", "bytes": 9, "hash": "0" * 16}], "window": 4, "tokens": 8}}
    values = {"kappa": ([2, 2], (1, 0.5, -2, 3)), "rms_scale": ([2], (1.5, 3)), "shares": ([2], (0.75, 0.25)),
              "moments": ([4], (3, 2, 1, 0))}

    def scalars(dtype="F64", **changes):
        header, data = {}, b""
        for name, (shape, numbers) in {**values, **changes}.items():
            part = doubles(*numbers)
            header["layers.0." + name] = tensor(dtype, shape, len(data), len(data) + len(part))
            data += part
        return file(header, data)

    both = lambda side, numbers: json.dumps(side).encode() + b"\0" + numbers
    with_ = lambda **changes: both({**base, **changes}, scalars())
    g = lambda count: {"kappa": ([2, count], (1,) * 2 * count), "rms_scale": ([count], (1,) * count),
                       "shares": ([count], (1 / count,) * count)}
    yield "good-two", with_()
    yield "good-one", both({**base, "shards": 1}, scalars(**g(1)))
    yield "good-four-none", both({**base, "shards": 4, "transform": "none", "rms": "exact"}, scalars(**g(4)))
    yield "good-shared", with_(shared_columns=2, transform="query-aware", kappa="inverse-share")
    yield "good-all-shared", with_(shared_columns=4, transform="hadamard", calibration={"files": [], "window": 1, "tokens": 1})
    yield "bad-nothing", b""
    yield "bad-array", b"[]\0" + scalars()
    yield "bad-nested", b'{"format":' + b"[" * 3000
    yield "bad-format", with_(format="isomer")
    yield "bad-version", with_(version=2)
    yield "bad-shards-three", with_(shards=3)
    yield "bad-shards-zero", with_(shards=0)
    yield "bad-shards-huge", with_(shards=2**31)
    yield "bad-shared-columns", with_(shared_columns=5)
    yield "bad-shared-negative", with_(shared_columns=-2)
    yield "bad-shared-huge", with_(shared_columns=2**63)
    yield "bad-transform", with_(transform="svd")
    yield "bad-rms", with_(rms=1)
    yield "bad-kappa", with_(kappa="two")
    yield "bad-layers", with_(num_hidden_layers=2)
    yield "bad-rank", with_(kv_lora_rank=8)
    yield "bad-seed", with_(seed=-1)
    yield "bad-align-steps", with_(align_steps=-1)
    yield "bad-hash", with_(weights_hash="0" * 15 + "g")
    yield "bad-calibration", with_(calibration=[])
    yield "bad-calibration-tokens", with_(calibration={"files": [], "window": 4, "tokens": 0})
    yield "bad-calibration-file", with_(calibration={"files": [{"name": 1}], "window": 4, "tokens": 4})
    yield "bad-no-scalars", json.dumps(base).encode()
    yield "bad-scalars-truncated", both(base, scalars()[:-1])
    yield "bad-scalars-dtype", both(base, scalars("I64"))
    yield "bad-kappa-shape", both(base, scalars(kappa=([4], (1, 1, 1, 1))))
    yield "bad-kappa-nan", both(base, scalars(kappa=([2, 2], (1, float("nan"), 1, 1))))
    yield "bad-rms-scale-zero", both(base, scalars(rms_scale=([2], (1, 0))))
    yield "bad-share-above-one", both(base, scalars(shares=([2], (1.5, 0))))
    yield "bad-moment-infinite", both(base, scalars(moments=([4], (1, float("inf"), 0, 0))))
    yield "bad-extra", both(base, scalars(extra=([1], (1,))))


for folder, seeds in (("gguf", gguf_seeds()), ("safetensors", safetensors_seeds()), ("config", config_seeds()),
                      ("tokenizer_json", tokenizer_json_seeds()), ("tpla_side", tpla_side_seeds())):
    (HERE / "corpus" / folder).mkdir(parents=True, exist_ok=True)
    for name, content in seeds:
        (HERE / "corpus" / folder / name).write_bytes(content)
