#!/usr/bin/env python3
"""Draws loss_curves.svg, routing_noise.svg and link_gain.svg from the recordings in docs/data/.

    python3 docs/figures/training_evidence.py

The recordings are made by `isomer claims laga --only L11,L13,L14 --record docs/data`.
"""

import json
import math
from pathlib import Path

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "data"
COLOURS = {"explicit": "#0072b2", "absorbed": "#009e73", "laga": "#d55e00", "ring": "#555555",
           "latent-gather": "#cc79a7", "latent-ring": "#a07800", "another seed": "#aaaaaa"}
DASHES = {1: "", 2: "6 3", 4: "2 2"}
WIDTH, PANEL, LEFT, RIGHT, TOP, GAP = 760, 250, 74, 170, 52, 58


def text(x, y, content, anchor="middle", extra=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{content}</text>'


class Panel:
    """One set of axes; x and y are (low, high, is_log)."""

    def __init__(self, index, x, y):
        self.top = TOP + index * (PANEL + GAP)
        self.x, self.y = x, y

    @staticmethod
    def share(value, axis):
        low, high, is_log = axis
        if is_log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    def place(self, x, y):
        y = min(max(y, self.y[0]), self.y[1])
        return (LEFT + self.share(x, self.x) * (WIDTH - LEFT - RIGHT),
                self.top + (1 - self.share(y, self.y)) * PANEL)

    def axes(self, title, x_ticks, y_ticks, x_label):
        parts = [text(LEFT, self.top - 10, title, "start", ' fill="#333"')]
        for value, label in y_ticks:
            y = self.place(self.x[0], value)[1]
            parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e2e2e2"/>')
            parts.append(text(LEFT - 8, y + 4, label, "end"))
        base = self.top + PANEL
        parts.append(f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}" stroke="#888"/>')
        for value, label in x_ticks:
            parts.append(text(self.place(value, self.y[0])[0], base + 17, label))
        parts.append(text((LEFT + WIDTH - RIGHT) / 2, base + 34, x_label))
        return parts

    def line(self, points, colour, dash="", width=1.6):
        path = " ".join("{:.1f},{:.1f}".format(*self.place(x, y)) for x, y in points)
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dash}"/>'

    def legend(self, entries):
        parts = []
        for i, (label, colour, dash) in enumerate(entries):
            y = self.top + 14 + 18 * i
            parts.append(f'<line x1="{WIDTH - RIGHT + 10}" y1="{y - 4}" x2="{WIDTH - RIGHT + 34}" y2="{y - 4}" '
                         f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>')
            parts.append(text(WIDTH - RIGHT + 40, y, label, "start"))
        return parts


def write(name, title, panels, parts):
    height = TOP + panels * (PANEL + GAP)
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
           f'viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, sans-serif" font-size="13">',
           f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
           text(LEFT, 22, title, "start", ' font-weight="bold"'), *parts, "</svg>"]
    (HERE / name).write_text("\n".join(svg) + "\n", encoding="utf-8")


def read(name):
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def powers(low, high):
    return [(10.0**e, f"1e{e}") for e in range(low, high + 1)]


def steps_axis(count):
    return [(step, str(step)) for step in range(0, count + 1, max(1, count // 4))]


def loss_curves():
    recorded = read("loss_curves")
    curves, count = recorded["curves"], recorded["settings"]["steps"]
    reference = curves[0]["losses"]
    top = Panel(0, (0, count, False), (math.floor(min(reference)), math.ceil(max(reference)), False))
    low = Panel(1, (0, count, False), (1e-9, 1, True))
    parts = top.axes("loss, nats a token: the curves lie on one another", steps_axis(count),
                     [(v, str(v)) for v in range(int(top.y[0]), int(top.y[1]) + 1)], "step")
    parts += low.axes("difference from explicit on one rank", steps_axis(count), powers(-9, 0), "step")
    for curve in curves:
        layout = "another seed" if curve["name"] == "another seed" else curve["layout"]
        dash = DASHES[curve["ranks"]]
        parts.append(top.line(enumerate(curve["losses"], 1), COLOURS[layout], dash))
        gaps = [(i, abs(a - b)) for i, (a, b) in enumerate(zip(curve["losses"], reference), 1) if a != b]
        if gaps:
            parts.append(low.line(gaps, COLOURS[layout], dash, 1.1))
    parts += top.legend([(name, colour, "") for name, colour in COLOURS.items()])
    parts += low.legend([("P = 1", "#333", ""), ("P = 2", "#333", DASHES[2]), ("P = 4", "#333", DASHES[4])])
    write("loss_curves.svg", "Six schemes at P = 1, 2, 4 train the same model", 2, parts)


def routing_noise():
    recorded = read("routing_noise")
    count, parts = recorded["settings"]["steps"], []
    names = ["#d55e00", "#0072b2"]
    top = Panel(0, (0, count, False), (1e-9, 1, True))
    low = Panel(1, (0, count, False), (0.5, 2 * recorded["tokens_a_step"], True))
    parts += top.axes("difference of the loss, nats; dashed: the same with routing replayed", steps_axis(count),
                      powers(-9, 0), "step")
    parts += low.axes(f"tokens routed otherwise, both layers (of {2 * recorded['tokens_a_step']} choices a step)",
                      steps_axis(count), [(v, str(v)) for v in (1, 10, 100)], "step")
    for pair, colour in zip(recorded["pairs"], names):
        for key, dash in (("loss_difference", ""), ("loss_difference_replayed", "5 3")):
            parts.append(top.line([(i, d) for i, d in enumerate(pair[key], 1) if d > 0], colour, dash, 1.3))
        flips = [sum(step) for step in zip(*pair["flips"].values())]
        parts.append(low.line([(i, max(f, 0.5)) for i, f in enumerate(flips, 1)], colour, "", 1.3))
    parts += top.legend([("one ulp", names[0], ""), ("other summation", names[1], "")])
    write("routing_noise.svg", "What a rounding difference does to a mixture of experts", 2, parts)


def link_gain():
    times = [t for t in read("throughput")["times"] if t["attention"] == "fused" and t["bandwidth_bytes_per_s"] > 0]
    seconds = {(t["layout"], t["ranks"], t["seq"], t["bandwidth_bytes_per_s"]): t["seconds"] for t in times}
    links = sorted({t["bandwidth_bytes_per_s"] for t in times})
    x = (links[0] / 1e6, links[-1] / 1e6, True)
    # Two ranks ran in wall time, which is no figure where the machine was busy; the rest on the virtual clock.
    ranks = {4: "#0072b2", 8: "#d55e00", 16: "#cc79a7"}
    parts = []
    for index, (fast, slow, title) in enumerate((("laga", "explicit", "LAGA's gain on explicit"),
                                                 ("latent-gather", "laga", "latent-gather's gain on LAGA"))):
        panel = Panel(index, x, (0.7, 4, True))
        parts += panel.axes(f"{title}: solid S = 1024, dashed S = 2048", [(b / 1e6, f"{b / 1e6:.0f}") for b in links],
                            [(v, f"{v}×") for v in (0.8, 1, 1.25, 1.5, 2, 3)], "link, MB/s a rank")
        for p, colour in ranks.items():
            for seq, dash in ((1024, ""), (2048, "6 3")):
                line = [(b / 1e6, seconds[slow, p, seq, b] / seconds[fast, p, seq, b]) for b in links
                        if (slow, p, seq, b) in seconds]
                parts.append(panel.line(line, colour, dash))
        parts += panel.legend([(f"P = {p}", colour, "") for p, colour in ranks.items()])
    write("link_gain.svg", "One block under links from slow to fast", 2, parts)


if __name__ == "__main__":
    loss_curves()
    routing_noise()
    link_gain()
