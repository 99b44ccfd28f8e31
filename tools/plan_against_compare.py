#!/usr/bin/env python3
"""What the planner predicts of this machine against what `isomer compare` measures on it: the table of docs/planner.md.

    isomer probe --out this.json
    python3 tools/plan_against_compare.py --isomer build/release/isomer --hardware this.json

Layouts × lengths × dtypes on 1 and 2 ranks of one thread. Times are those of the ranks' clocks, the median of --runs
runs of compare, each of which is the median of its own repetitions. With --link both sides have this emulated link, and
clocks are processor time: for a machine that others use too, where the time of a transfer says nothing.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCHEMES = ["explicit", "explicit-shared-rope", "absorbed", "absorbed-two-product", "laga", "laga:kv=strided", "ring",
           "latent-gather", "latent-ring"]


def run_json(command):
    """The JSON that `command` writes with --json; exits with what it says if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "out.json"
        done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return json.loads(file.read_text())


def sized(scheme, ranks):
    name, _, option = scheme.partition(":")
    return f"{name}:{ranks}" + (f",{option}" if option else "")


COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_receive"}
UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}


def quantity(text):
    """"5us" or "2GB/s" in seconds or bytes a second."""
    number = text.rstrip("/skKMGTBnum")
    return float(number) * UNITS[text[len(number):]]


def with_link(file, link, folder):
    """The hardware file with this link instead of the measured ones, and without curves of collectives."""
    hardware = json.loads(Path(file).read_text())
    latency, bandwidth = (quantity(part) for part in link.split(","))
    hardware["links"] = [{**hardware["links"][0], "latency_s": latency, "bandwidth_bytes_per_s": bandwidth}]
    hardware["curves"] = [c for c in hardware["curves"] if c["operation"] not in COLLECTIVES]
    result = Path(folder) / "hardware.json"
    result.write_text(json.dumps(hardware))
    return str(result)


def measured(arguments, case, layouts):
    """Seconds by layout: the slowest rank's, the median over runs."""
    seconds = {layout: [] for layout in layouts}
    for _ in range(arguments.runs):
        link = ["--link", arguments.link] if arguments.link else []
        report = run_json([arguments.isomer, "compare", *case, *link, "--schemes", ";".join(layouts)])
        for scheme in report["schemes"]:
            if scheme["seconds"]:
                seconds[scheme["layout"]].append(scheme["seconds"])
    return {layout: statistics.median(values) for layout, values in seconds.items() if values}


def print_table(arguments):
    """Every layout's prediction beside its time, and the mean error."""
    print("| layout | dtype | tokens | predicted, ms | measured, ms | ratio |\n|---|---|---|---|---|---|")
    errors = []
    for dtype in arguments.dtypes.split(","):
        for seq in arguments.seq.split(","):
            for ranks in arguments.ranks.split(","):
                layouts = [sized(scheme, ranks) for scheme in SCHEMES]
                case = ["--model", arguments.model, "--seq", seq, "--dtype", dtype]
                predicted = run_json([arguments.isomer, "plan", "block", "--hardware", arguments.hardware, *case,
                                      "--schemes", ";".join(layouts)])
                times = measured(arguments, [*case, "--ranks", ranks, "--threads", "1"], layouts)
                for block in predicted["blocks"]:
                    if block["layout"] not in times:
                        continue
                    time = times[block["layout"]]
                    ratio = block["seconds"] / time
                    errors.append(abs(ratio - 1))
                    print(f"| `{block['layout']}` | {dtype} | {seq} | {1e3 * block['seconds']:.1f} | {1e3 * time:.1f} "
                          f"| {ratio:.2f} |")
    print(f"\n{len(errors)} layouts, mean error {100 * statistics.mean(errors):.0f} %, "
          f"largest {100 * max(errors):.0f} %")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isomer", default="build/release/isomer")
    parser.add_argument("--hardware", required=True, help="what `isomer probe` wrote")
    parser.add_argument("--model", default="deepseek-v2-lite")
    parser.add_argument("--seq", default="512", help="lengths, separated by commas")
    parser.add_argument("--dtypes", default="f32,bf16")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--link", help="emulated, LATENCY,BANDWIDTH (50us,2GB/s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.link:
            arguments.hardware = with_link(arguments.hardware, arguments.link, folder)
        print_table(arguments)


if __name__ == "__main__":
    main()
