#!/usr/bin/env python3
"""The accounts of `isomer compare --json FILE` in full: a line a scheme, or one scheme tensor by tensor.

    python3 examples/accounts.py FILE            # all schemes
    python3 examples/accounts.py FILE LAYOUT     # what this one sends, and what stands in its peak

Of each scheme the rank that sends most, and the one whose peak is highest; megabytes are 10^6 bytes.
"""

import json
import sys


def megabytes(count):
    return f"{count / 1e6:.3f}"


def print_table(header, rows):
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        cells = [cell.ljust(width) if column == 0 else cell.rjust(width)
                 for column, (cell, width) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())


def busiest(scheme):
    return max(scheme["ranks"], key=lambda rank: rank["bytes_sent"]["forward"] + rank["bytes_sent"]["backward"])


def fullest(scheme):
    return max(scheme["ranks"], key=lambda rank: rank["peak_activation_bytes"])


def summary(report):
    rows = []
    for scheme in report["schemes"]:
        sent, memory = busiest(scheme)["bytes_sent"], fullest(scheme)
        rows.append([scheme["layout"], *(megabytes(sent[phase]) for phase in ("forward", "backward", "gradient_sync")),
                     megabytes(memory["saved_bytes"]), megabytes(memory["peak_activation_bytes"])])
    print_table(["MB a rank", "forward", "backward", "gradient sync", "saved", "peak"], rows)


def detail(scheme):
    sent = busiest(scheme)["bytes_sent_by_collective"]
    print_table(["sent", "MB"], [[name, megabytes(count)] for name, count in
                                 sorted(sent.items(), key=lambda item: (item[0].startswith("backward"), item[0]))])
    print()
    print_table(["standing at the peak", "class", "MB"],
                [[tensor["name"], tensor["class"], megabytes(tensor["bytes"])]
                 for tensor in fullest(scheme)["standing_at_peak"]])


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    with open(sys.argv[1], encoding="utf-8") as file:
        report = json.load(file)
    if len(sys.argv) == 2:
        return summary(report)
    layouts = {scheme["layout"]: scheme for scheme in report["schemes"]}
    if sys.argv[2] not in layouts:
        sys.exit(f"{sys.argv[1]} has no layout '{sys.argv[2]}'; it has {', '.join(layouts)}")
    return detail(layouts[sys.argv[2]])


if __name__ == "__main__":
    main()
