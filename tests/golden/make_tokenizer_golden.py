#!/usr/bin/env python3
"""Writes tokenizer/*.json: small tokenizers of every supported kind, and what PyPI's `tokenizers` makes of texts with each.

Needs `pip install tokenizers`. Deterministic for one version of it; {"tokenizer": the tokenizer.json, "cases": [[text, ids,
ids with special tokens, bytes of decode as hex]]}."""

import copy
import json
from pathlib import Path

import tokenizers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from tokenizer_texts import BY_HAND, NOVEL, random_texts

HERE = Path(__file__).resolve().parent
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
DEEPSEEK = [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
            "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"]
GPT4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_level(prefix=False, regex=False):
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


def added(content, **flags):
    return {"id": -1, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": True, **flags}


def template(begin, end=None):
    special = lambda token: [{"SpecialToken": {"id": token, "type_id": 0}}] if token else []
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {"type": "TemplateProcessing", "single": special(begin) + [text] + special(end),
            "pair": special(begin) + [text, {"Sequence": {"id": "B", "type_id": 1}}] + special(end),
            "special_tokens": {t: {"id": t, "ids": [-1], "tokens": [t]} for t in (begin, end) if t}}


def trained_model(num_merges):
    """A vocabulary and its merges from the novel and all the texts written by hand."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])
    trainer = trainers.BpeTrainer(vocab_size=256 + num_merges, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    tokenizer.train_from_iterator([NOVEL.read_text(encoding="utf-8")[:200000]] + BY_HAND * 30, trainer)
    return json.loads(tokenizer.to_str())["model"]


def complete(model, pre_tokenizer, tokens, post_processor=None, merges_as_text=False, **options):
    model = {**copy.deepcopy(model), **options}
    if merges_as_text:
        model["merges"] = [" ".join(pair) for pair in model["merges"]]
    ids = dict(model["vocab"])
    for token in tokens:
        token["id"] = ids.setdefault(token["content"], len(ids))
    for token in (post_processor or {}).get("special_tokens", {}).values():
        token["ids"] = [ids[token["id"]]]
    processors = [byte_level(True, True)] + ([post_processor] if post_processor else [])
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "normalizer": None,
            "pre_tokenizer": pre_tokenizer, "post_processor": {"type": "Sequence", "processors": processors},
            "decoder": byte_level(True, True), "model": model}


def tricky_tokens():
    return [added("[A]"), added("[L]", lstrip=True), added("[R]", rstrip=True), added("[B]", lstrip=True, rstrip=True),
            added("word", single_word=True, special=False), added("norm", normalized=True, special=False),
            added("[long", normalized=True), added("[longer]"), added("the", special=False), added("NAN")]


def whitespace_vocabulary(model):
    """With tokens that merges never reach: only ignore_merges finds them."""
    model = copy.deepcopy(model)
    for token in ("Ġearliest", "ĠBingley", "quickly", "ä¸ŃæĸĩåŃĹç¬¦"):
        model["vocab"].setdefault(token, len(model["vocab"]))
    return model


def variants():
    small, tiny = trained_model(700), trained_model(60)
    digits = lambda individual: {"type": "Digits", "individual_digits": individual}
    yield "gpt2", complete(small, byte_level(regex=True), [added("<|endoftext|>", normalized=True)], merges_as_text=True,
                           continuing_subword_prefix="", end_of_word_suffix="")
    yield "llama3", complete(whitespace_vocabulary(small), sequence(split(LLAMA3), byte_level()),
                             [added("<|begin_of_text|>"), added("<|end_of_text|>")],
                             template("<|begin_of_text|>"), ignore_merges=True)
    yield "deepseek", complete(small, sequence(*map(split, DEEPSEEK), byte_level()),
                               [added("<｜begin▁of▁sentence｜>"), added("<｜end▁of▁sentence｜>"),
                                added("<｜User｜>", normalized=True, special=False)])
    yield "gpt4o", complete(tiny, sequence(split(GPT4O), byte_level()), [added("<|endoftext|>")],
                            template("<|endoftext|>", "<|endoftext|>"))
    yield "prefix_space", complete(tiny, byte_level(prefix=True, regex=True), tricky_tokens())
    yield "digits", complete(tiny, sequence(digits(True), byte_level(regex=True)), tricky_tokens())
    yield "digit_runs", complete(tiny, sequence(digits(False), split(" ", "MergedWithNext", kind="String"),
                                                byte_level(prefix=True)), tricky_tokens())
    yield "removed", complete(tiny, sequence(split(r"\s+", "Removed"), split(r"\w", "MergedWithPrevious"), byte_level()), [])
    yield "inverted", complete(tiny, sequence(split(r"\w+|[^\w\s]+", "Removed", True),
                                              split(r"[aeiou]", "MergedWithNext", True), byte_level()), [])
    yield "contiguous", complete(tiny, sequence(split(r"[a-z\-]", "Contiguous"), split(r"\b", "Isolated"), byte_level()), [])
    yield "empty_matches", complete(tiny, sequence(split("x*", "Isolated"), split(r"^|$", "MergedWithPrevious"),
                                                   split("l{,2}(?<=l)", "MergedWithNext"), byte_level()), [])
    yield "whole", complete(tiny, byte_level(), tricky_tokens())


def bytes_of(tokenizer, ids):
    """The reference decodes to text; bytes are read off its tokens, one by one."""
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return None if "\ufffd" in text else text.encode().hex()


def main():
    (HERE / "tokenizer").mkdir(exist_ok=True)
    for seed, (name, description) in enumerate(variants()):
        tokenizer = Tokenizer.from_str(json.dumps(description))
        cases = []
        for text in BY_HAND + random_texts(45, seed):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            cases.append([text, ids, tokenizer.encode(text).ids, bytes_of(tokenizer, ids)])
        out = {"made_with": f"tokenizers {tokenizers.__version__}", "tokenizer": description, "cases": cases}
        (HERE / "tokenizer" / f"{name}.json").write_text(json.dumps(out, separators=(",", ":")) + "\n")
        print(name, len(cases), (HERE / "tokenizer" / f"{name}.json").stat().st_size)


main()
