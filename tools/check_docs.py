#!/usr/bin/env python3
"""Runs the commands that the documentation shows and holds their output against what stands below them.

    python3 tools/check_docs.py [--isomer build/release/isomer] [--update] [FILE...]

A ```console block is checked if each of its `$ ` lines is a dry run or reads the JSON of one, since only those give the
same output on every machine. The commands of a file run in one scratch folder, in order. --update writes what the
commands print now.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def documents():
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def local_links(text):
    """Targets of links to files of the repository, as written."""
    return LINK.findall(text)


def steps_of(block):
    """[(command, output)] of a block's text."""
    steps = []
    for line in block.splitlines():
        if line.startswith("$ "):
            steps.append((line[2:], []))
        elif steps:
            steps[-1][1].append(line)
    return [(command, "\n".join(output).rstrip()) for command, output in steps]


def is_repeatable(command):
    return "--dry-run" in command or command.startswith("python3 examples/accounts.py")


def run(command, folder, isomer):
    """What a command prints, standard error after standard output."""
    with tempfile.TemporaryDirectory() as tools:
        Path(tools, "isomer").symlink_to(isomer)
        env = dict(os.environ, PATH=f"{tools}:{os.environ['PATH']}")
        done = subprocess.run(["bash", "-c", command], cwd=folder, env=env, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=300, check=False)
    return (done.stdout + done.stderr).rstrip()


def refreshed(document, isomer):
    """The document's text with the output that its commands give now, and the commands whose output has changed."""
    changed = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "examples").symlink_to(ROOT / "examples")

        def replace(match):
            steps = steps_of(match[1])
            if not steps or not all(is_repeatable(command) for command, _ in steps):
                return match[0]
            lines = []
            for command, expected in steps:
                found = run(command, folder, isomer)
                if found != expected:
                    changed.append(command)
                lines += [f"$ {command}", *([found] if found else [])]
            return "```console\n" + "\n".join(lines) + "\n```"

        text = BLOCK.sub(replace, document.read_text(encoding="utf-8"))
    return text, changed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isomer", type=Path, default=ROOT / "build/release/isomer")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("files", nargs="*", type=Path)
    arguments = parser.parse_args()
    if not arguments.isomer.exists():
        sys.exit(f"{arguments.isomer} does not exist: build it with ./dev build, or name another with --isomer")

    stale = False
    for document in arguments.files or documents():
        text, changed = refreshed(document, arguments.isomer.resolve())
        for command in changed:
            stale = True
            print(f"{os.path.relpath(document, ROOT)}: the output has changed: {command}", file=sys.stderr)
        if changed and arguments.update:
            document.write_text(text, encoding="utf-8")
    if stale and not arguments.update:
        print("python3 tools/check_docs.py --update writes it anew", file=sys.stderr)
    return 1 if stale and not arguments.update else 0


if __name__ == "__main__":
    sys.exit(main())
