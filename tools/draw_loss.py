#!/usr/bin/env python3
"""Draws a training run's loss.csv as loss.svg beside it: loss, and held-out bits a byte, over steps.

    python3 tools/draw_loss.py models/tiny-mla
"""

import csv
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 340, 56, 60, 24, 44
LOSS_COLOUR, HELD_OUT_COLOUR = "#0072b2", "#d55e00"


def scale(low, high, begin, end):
    return lambda value: begin + (value - low) / (high - low) * (end - begin)


def points(rows, x, y, key):
    return " ".join(f"{x(float(row['step'])):.1f},{y(float(row[key])):.1f}" for row in rows if row[key])


def draw(rows):
    held_out = [row for row in rows if row["held_out_bits_per_byte"]]
    losses = [float(row["loss"]) for row in rows]
    bits = [float(row["held_out_bits_per_byte"]) for row in held_out]
    last = float(rows[-1]["step"])
    x = scale(0, last, LEFT, WIDTH - RIGHT)
    low, high = int(min(losses)), int(max(losses)) + 1
    loss_y = scale(low, high, HEIGHT - BOTTOM, TOP)
    bits_low, bits_high = int(10 * min(bits)) / 10 - 0.1, int(10 * max(bits)) / 10 + 0.2
    bits_y = scale(bits_low, bits_high, HEIGHT - BOTTOM, TOP)
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
           'font-size="12">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for tick in range(low, high + 1):
        svg.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{loss_y(tick):.1f}" y2="{loss_y(tick):.1f}" '
                   'stroke="#dddddd"/>')
        svg.append(f'<text x="{LEFT - 8}" y="{loss_y(tick) + 4:.1f}" text-anchor="end" fill="{LOSS_COLOUR}">{tick}</text>')
    for i in range(5):
        value = bits_low + (bits_high - bits_low) * i / 4
        svg.append(f'<text x="{WIDTH - RIGHT + 8}" y="{bits_y(value) + 4:.1f}" fill="{HELD_OUT_COLOUR}">{value:.2f}</text>')
    for i in range(5):
        step = last * i / 4
        svg.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step:.0f}</text>')
    svg.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    svg.append(f'<polyline fill="none" stroke="{LOSS_COLOUR}" points="{points(rows, x, loss_y, "loss")}"/>')
    svg.append(f'<polyline fill="none" stroke="{HELD_OUT_COLOUR}" stroke-width="2" '
               f'points="{points(held_out, x, bits_y, "held_out_bits_per_byte")}"/>')
    svg.append(f'<text x="{LEFT}" y="14" fill="{LOSS_COLOUR}">training loss, nats a token</text>')
    svg.append(f'<text x="{WIDTH - RIGHT}" y="14" text-anchor="end" fill="{HELD_OUT_COLOUR}">held out, bits a byte</text>')
    return "\n".join([*svg, "</svg>", ""])


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    with open(folder / "loss.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if len(rows) < 2 or not any(row["held_out_bits_per_byte"] for row in rows):
        sys.exit(f"{folder / 'loss.csv'}: {len(rows)} rows: expected a curve with held-out bits a byte")
    (folder / "loss.svg").write_text(draw(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
