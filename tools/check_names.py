#!/usr/bin/env python3
"""Checks that no two classes of src/ and apps/ have the same name in the same namespace.

Two of them in one program break the one-definition rule: the linker keeps one constructor, one vector<T> of either, and
no compiler says a word. Classes of an unnamed namespace are a file's own and may repeat.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

OPENS = re.compile(r"^(?:inline )?namespace ?([\w:]*) ?\{$")
CLOSES = re.compile(r"^\}  // namespace")
DEFINES = re.compile(r"^(?:struct|class|union|enum|enum class) (?:alignas\(\w+\) )?(\w+)(?: final)? ?(?::(?!:)|\{)")


def definitions(text):
    """(qualified name, line number) of each class at namespace level; those of unnamed namespaces are left out."""
    spaces = []
    for number, line in enumerate(text.splitlines(), 1):
        if opened := OPENS.match(line):
            spaces.append(opened[1])
        elif CLOSES.match(line) and spaces:
            spaces.pop()
        elif (defined := DEFINES.match(line)) and all(spaces):
            yield "::".join([*spaces, defined[1]]), number


def main():
    root = Path(__file__).resolve().parent.parent
    places = defaultdict(list)
    for folder in ("src", "apps"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in {".h", ".cpp", ".inc"}:
                for name, line in definitions(path.read_text(encoding="utf-8")):
                    places[name].append(f"{path.relative_to(root)}:{line}")
    repeated = {name: found for name, found in places.items() if len(found) > 1}
    for name, found in sorted(repeated.items()):
        print(f"{name} is defined twice: {', '.join(found)}; rename one, or put it into an unnamed namespace")
    return 1 if repeated else 0


if __name__ == "__main__":
    sys.exit(main())
