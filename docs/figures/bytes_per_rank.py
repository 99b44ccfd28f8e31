#!/usr/bin/env python3
"""Draws bytes_per_rank.svg: what a rank sends against the number of ranks, from the JSON of dry runs.

    python3 docs/figures/bytes_per_rank.py [build/release/isomer]
"""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORKLOAD = ["--model", "deepseek-v3", "--seq", "16K", "--dtype", "bf16", "--dry-run"]
RANKS = [2, 4, 8, 16, 32, 64, 128]
# Schemes of one line send the same bytes, which the script checks.
LINES = [(["explicit"], "#0072b2", 14), (["explicit-shared-rope"], "#009e73", 3),
         (["laga", "absorbed", "absorbed-two-product"], "#d55e00", -11), (["ring"], "#555555", 4),
         (["latent-gather"], "#cc79a7", 2), (["latent-ring"], "#a07800", 2)]

WIDTH, HEIGHT = 760, 480
LEFT, RIGHT, TOP, BOTTOM = 70, 180, 52, 56
LOW_MB, HIGH_MB = 25, 8000
TICKS_MB = [50, 100, 200, 500, 1000, 2000, 5000]


def sent_mb(isomer):
    """{scheme: [MB a rank sends, forward and backward, for each of RANKS]}."""
    sent = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in RANKS:
            file = Path(folder, f"{ranks}.json")
            subprocess.run([isomer, "compare", *WORKLOAD, "--ranks", str(ranks), "--json", file], check=True,
                           stdout=subprocess.DEVNULL)
            for scheme in json.loads(file.read_text(encoding="utf-8"))["schemes"]:
                sent.setdefault(scheme["layout"], []).append(scheme["bytes_sent_per_rank"] / 1e6)
    return sent


def x_of(ranks):
    share = math.log(ranks / RANKS[0]) / math.log(RANKS[-1] / RANKS[0])
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def y_of(megabytes):
    share = math.log(megabytes / LOW_MB) / math.log(HIGH_MB / LOW_MB)
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def text(x, y, content, anchor="middle", extra=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{content}</text>'


def axes():
    parts = [text(LEFT, 22, "Bytes that a rank sends, forward + backward of one attention block", "start",
                  ' font-weight="bold"'),
             text(LEFT, 40, "DeepSeek-V3, 16,384 tokens, bfloat16", "start", ' fill="#555"')]
    for tick in TICKS_MB:
        y = y_of(tick)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e2e2e2"/>')
        parts.append(text(LEFT - 8, y + 4, f"{tick} MB" if tick < 1000 else f"{tick // 1000} GB", "end"))
    base = HEIGHT - BOTTOM
    parts.append(f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}" stroke="#888"/>')
    for ranks in RANKS:
        parts.append(text(x_of(ranks), base + 18, str(ranks)))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, base + 40, "ranks"))
    return parts


def line(names, values, colour, label_shift):
    points = " ".join(f"{x_of(ranks):.1f},{y_of(value):.1f}" for ranks, value in zip(RANKS, values))
    parts = [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.2"/>']
    parts += [f'<circle cx="{x_of(ranks):.1f}" cy="{y_of(value):.1f}" r="3.2" fill="{colour}"/>'
              for ranks, value in zip(RANKS, values)]
    parts.append(text(WIDTH - RIGHT + 10, y_of(values[-1]) + label_shift, ", ".join(names[:2]), "start",
                      f' fill="{colour}"'))
    return parts


def main():
    isomer = sys.argv[1] if len(sys.argv) > 1 else str(HERE.parents[1] / "build/release/isomer")
    sent = sent_mb(isomer)
    parts = axes()
    for names, colour, shift in LINES:
        if any(sent[name] != sent[names[0]] for name in names):
            sys.exit(f"{', '.join(names)} do not send the same bytes: give each a line of its own")
        parts += line(names, sent[names[0]], colour, shift)
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
           f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="Helvetica, Arial, sans-serif" font-size="13">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>', *parts, "</svg>"]
    (HERE / "bytes_per_rank.svg").write_text("\n".join(svg) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
