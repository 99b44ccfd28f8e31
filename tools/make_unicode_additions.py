#!/usr/bin/env python3
"""Writes src/model/tokenizer/unicode_additions.cpp: what the regular expressions of PyPI's `tokenizers` (Oniguruma) put
into each class and Unicode 14, that of Debian 12's PCRE2 and Python, doesn't know yet.

Needs `pip install tokenizers`. Run it when a new version of `tokenizers` brings a newer Unicode."""

import sys
import unicodedata
from pathlib import Path

from tokenizers import Regex, pre_tokenizers

OUT = Path(__file__).resolve().parent.parent / "src/model/tokenizer/unicode_additions.cpp"
CATEGORIES = ("Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf").split()
SCRIPTS = ("Arabic Armenian Bengali Cyrillic Devanagari Georgian Greek Han Hangul Hebrew Hiragana Katakana Latin Tamil Thai "
           "Tibetan").split()
CHARACTERS = [chr(c) for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]


def members(pattern):
    splitter = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    return {ord(c) for piece, _ in splitter.pre_tokenize_str("".join(CHARACTERS)) for c in piece}


def ranges(points):
    found = []
    for point in sorted(points):
        if found and found[-1][1] == point - 1:
            found[-1][1] = point
        else:
            found.append([point, point])
    return found


def pattern_text(points):
    return "".join(f"\\\\x{{{a:x}}}" + (f"-\\\\x{{{b:x}}}" if b > a else "") for a, b in ranges(points))


def wrapped(text, indent):
    pieces, line = [], ""
    for item in text.replace("\\\\x", "\n\\\\x").split("\n"):
        if len(line) + len(item) > 112 - indent:
            pieces.append(line)
            line = ""
        line += item
    return f"\n{' ' * indent}".join(f'"{piece}"' for piece in [*pieces, line])


def main():
    if unicodedata.unidata_version != "14.0.0":
        sys.exit(f"Python's Unicode is {unicodedata.unidata_version}, not 14.0.0: what PCRE2 10.42 lacks can't be told")
    old = {name: set() for name in CATEGORIES}
    for c in CHARACTERS:
        if unicodedata.category(c) in old:
            old[unicodedata.category(c)].add(ord(c))
    new = {name: members(f"\\p{{{name}}}") for name in CATEGORIES}
    for name in CATEGORIES:
        if old[name] - new[name]:
            print(f"{name}: {ranges(old[name] - new[name])} left it; PCRE2 keeps them", file=sys.stderr)
    added = {name: new[name] - old[name] for name in CATEGORIES}
    unassigned = {ord(c) for c in CHARACTERS if unicodedata.category(c) == "Cn"}
    for name in SCRIPTS:
        added[name] = members(f"\\p{{{name}}}") & unassigned
    # Besides what came later: six No of Latin-1 that Oniguruma counts as word characters.
    word = members("\\w")
    added["\\\\w"] = word & (unassigned | {0xB2, 0xB3, 0xB9, 0xBC, 0xBD, 0xBE})
    lines = [f'      {{"{name}",\n       {wrapped(pattern_text(points), 7)}}},' for name, points in added.items() if points]
    OUT.write_text("// Written by tools/make_unicode_additions.py.\n"
                   '#include "model/tokenizer/unicode_additions.h"\n\n#include <array>\n#include <utility>\n\n'
                   "namespace isomer {\n\nstd::string_view unicode_additions(std::string_view name) {\n"
                   "  using Entry = std::pair<std::string_view, std::string_view>;\n"
                   f"  static constexpr std::array<Entry, {len(lines)}> kAdditions = {{{{\n"
                   + "\n".join(lines) +
                   "\n  }};\n  for (const auto& [key, ranges] : kAdditions)\n    if (key == name) return ranges;\n"
                   "  return {};\n}\n\n}  // namespace isomer\n")


main()
