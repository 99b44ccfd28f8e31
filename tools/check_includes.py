#!/usr/bin/env python3
"""Checks that includes between the layers of src/ and apps/ point downwards only (CONTRIBUTING.md has the order)."""

import re
import sys
from pathlib import Path

# Highest first: a layer may include itself and what stands after it.
LAYERS = ["apps", "study", "plan", "eval", "convert", "train", "infer", "parallel", "cache", "layers", "comm", "kernels", "cost",
          "sharding", "model", "core"]
# Downwards, and still not allowed: layer → layers that it does without, and why.
EXCEPTIONS = {("plan", "kernels"): "the planner prices descriptions of operations, it runs none"}

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]')
SUFFIXES = {".h", ".hpp", ".cpp", ".cc", ".inc"}


def layer_of(path):
    """The layer of a path relative to the repository: apps/…, or the folder below src/. None if it lies in neither."""
    parts = Path(path).parts
    if parts[0] == "apps":
        return "apps"
    return parts[1] if parts[0] == "src" and len(parts) > 1 else None


def included_layer(root, includer, target):
    """The layer that `target`, as written in `includer`, belongs to; None for a header from elsewhere."""
    beside = (root / includer).parent / target
    if beside.exists() and beside.resolve().is_relative_to(root):
        return layer_of(beside.resolve().relative_to(root))
    first = Path(target).parts[0]
    return first if first in LAYERS else None


def complaint(layer, target_layer):
    """Why `layer` may not include `target_layer`; None if it may."""
    if target_layer not in LAYERS:
        return f"'{target_layer}' is no layer"
    if LAYERS.index(target_layer) < LAYERS.index(layer):
        return f"{layer} may not include {target_layer}, which stands above it"
    if (layer, target_layer) in EXCEPTIONS:
        return f"{layer} may not include {target_layer}: {EXCEPTIONS[layer, target_layer]}"
    return None


def check(root):
    """Lines `file:line: complaint`, one a violation, for the tree at `root`."""
    root = Path(root).resolve()
    complaints = []
    for path in sorted(p for top in ("src", "apps") for p in (root / top).rglob("*") if p.suffix in SUFFIXES):
        name = path.relative_to(root)
        layer = layer_of(name)
        if layer not in LAYERS:
            complaints.append(f"{name}:1: src/{layer} is no layer; known are {', '.join(LAYERS)}")
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            match = INCLUDE.match(line)
            target_layer = match and included_layer(root, name, match[1])
            problem = target_layer and complaint(layer, target_layer)
            if problem:
                complaints.append(f"{name}:{number}: {problem} ({match[1]})")
    return complaints


def main():
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent
    complaints = check(root)
    for line in complaints:
        print(line, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
