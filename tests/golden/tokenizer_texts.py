"""Texts that tell tokenizers apart, for the golden cases and for the comparison with PyPI's `tokenizers`."""

import random
from pathlib import Path

NOVEL = Path(__file__).resolve().parents[2] / "data/text/pride-and-prejudice.txt"

BY_HAND = [
    "", " ", "a", "  ", "\n", "\r\n", "\t\tx", "Hello, world!", " Hello  world ", "it's we'll I'M you'Re they'VE 'tis 'Ll",
    "don’t ‘quote’ “double” — dash… ellipsis", "1 12 123 1234 12345678 3.14159 1,000,000 0x1F ½ ² Ⅷ ٣٤٥ १२३ 一二三",
    "x = foo(bar[0], \"baz\");\n\tif (!x) { return -1; } // comment\r\n", "def f(a, *, b=None):\n    return a ** 2 + b[::-1]\n\n\n",
    "<html><body class='a'>&amp;</body></html>", "https://example.org/a?b=c&d=%20#e user@example.com", "CamelCaseAndHTTPServer snake_case_name kebab-case",
    "中文字符，混合 English 和数字123。", "日本語のテキスト、カタカナとひらがな。", "한국어 텍스트", "Привет, мир! Ёлка", "Γειά σου Κόσμε", "مرحبا بالعالم", "שלום עולם",
    "नमस्ते दुनिया", "สวัสดีชาวโลก", "e\u0301 a\u0308\u0323 o\u0302\u0303 \u0301alone", "Z\u0351\u036b\u0343\u036aA\u0322\u0321L\u0338G\u0321\u0362O\u035e!",
    "😀😃 👨‍👩‍👧‍👦 👍🏽 🇩🇪🇫🇷 ❤️ 1️⃣ 🫨🪿🫷", "\u31350\U00031350\U000323af\U0002ebf0 \U00010d4a \U0001e4f3 \U00011f55", "a\u200db\u200cc\ufeffd\u00ade",
    "a\u00a0b\u2003c\u3000d\u2028e\u2029f\u0085g\u180eh\u200bi\u000bj\u000ck", "\x00", "a\x00b\x01c\x1f\x7f\x80\x9f", "   leading\n\n\n   and trailing   ", "\n \n  \n   x", " \t \n \t ", "x" * 300, "ab" * 150,
    "é" * 70, "!" * 100, "?!?!...---===>>><<<", "\n" * 50, " " * 100 + "x", "1" * 50, "ſtraße ſ K Å ﬁ ŉ İ ı", "'ſ it'ſ", "\ufffd \ufffe \uffff \U0010ffff \ue000",
    "$100 €50 £3 ¥2 100% ±5°C ∑∫√∞ →←↑↓ ✓✗ ░▒▓ ©®™ §¶", "`code` **bold** _it_ # Title\n- item\n1. one\n> quote\n| a | b |\n",
    "<|endoftext|>", "a<|endoftext|>b", " <|endoftext|> ", "<|endoftext|><|endoftext|>\n", "<|endoftext", "<|begin_of_text|>x<|end_of_text|>", "<｜begin▁of▁sentence｜>x<｜end▁of▁sentence｜>",
    "[A] x[A]y [A][A]  [A]  z", "x [L] y[L]  [L]", "[R]  x [R]\n\ny", "[B]   [B]  ", "word aword worda 1word word_ word- (word) wordword éword \u0301word", "norm xnormy norm", "[long] [longer] [long", "NAN NANs",
    "Mr. Bennet was among the earliest of those who waited on Mr. Bingley.", "The quick brown fox jumps over the lazy dog. " * 3,
]

ALPHABETS = [
    "²³¹¼½¾word \U00011de5\U00016ff4", "abcdefghij ", "abc   \n\n\t\r", "0123456789,. ", "!?'\"()[]{}<>|&*+-_=/\\ \n", "ABCdefÀéÜßñ '", "中文字日本语 ひらカタ。、",
    "אבגدهوпривет αβγ ", "\u0301\u0308\u0323e a\u093e\u093f", "😀👍🏽\u200d❤️🇩🇪 ", "\u00a0\u2003\u3000\u0085\u180e\u200b x\n", "\x00\x01\x0b\x0c\x1c\x7f a",
    "'sStTrReEvVmMlLdD ", "\U00031350\U0002ebf0\U0001fae8\U00011f55\u0ece\u2427 a", "<|endoftext|> [A][L][R][B]word ",
]


def random_texts(count, seed):
    """Mixtures of alphabets, code points of the whole of Unicode, and excerpts of a novel."""
    rng = random.Random(seed)
    novel = NOVEL.read_text(encoding="utf-8")
    texts = []
    for i in range(count):
        if i % 3 == 0:
            at = rng.randrange(len(novel) - 200)
            texts.append(novel[at:at + rng.randrange(1, 160)])
        elif i % 3 == 1:
            chosen = rng.sample(ALPHABETS, rng.randrange(1, 4))
            texts.append("".join(rng.choice(rng.choice(chosen)) for _ in range(rng.randrange(1, 60))))
        else:
            points = []
            while len(points) < rng.randrange(1, 30):
                point = rng.choice([rng.randrange(0x80), rng.randrange(0x3000), rng.randrange(0x20000), rng.randrange(0x110000)])
                if not 0xD800 <= point <= 0xDFFF:
                    points.append(chr(point))
            texts.append("".join(points))
    return texts
