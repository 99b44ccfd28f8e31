#!/usr/bin/env python3
"""Runs the tests of one or more build folders and ends with the line `N passed, N failed` (and `, N skipped`)."""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Outcome:
    passed: int = 0
    skipped: int = 0
    failures: list = field(default_factory=list)  # [(name, message)]

    def add(self, other):
        self.passed += other.passed
        self.skipped += other.skipped
        self.failures += other.failures

    def __str__(self):
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{self.passed} passed, {len(self.failures)} failed{skipped}"


def environment(full):
    """The environment of a test: sanitizers take their options from it, other builds ignore them."""
    env = dict(os.environ)
    env["ASAN_OPTIONS"] = "detect_leaks=1:strict_string_checks=1:" + env.get("ASAN_OPTIONS", "")
    env["LSAN_OPTIONS"] = f"suppressions={ROOT}/tools/lsan.supp:print_suppressions=0:" + env.get("LSAN_OPTIONS", "")
    env["UBSAN_OPTIONS"] = "print_stacktrace=1:" + env.get("UBSAN_OPTIONS", "")
    env["TSAN_OPTIONS"] = f"suppressions={ROOT}/tools/tsan.supp:print_suppressions=0:" + env.get("TSAN_OPTIONS", "")
    if full:
        env["ISOMER_FULL_TESTS"] = "1"
    return env


def run(command, env, log, timeout_s):
    """Runs a command without input; its output goes to `log`. Returns the exit code, None if it ran out of time."""
    with open(log, "wb") as output:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Ranks that a test launched as processes must not outlive it.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def describe_exit(code, timeout_s):
    if code is None:
        return f"did not end within {timeout_s} s"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def tail(log, num_lines=60):
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])


def from_report(report):
    """The outcome that a GoogleTest JSON report tells."""
    outcome = Outcome()
    for suite in report["testsuites"]:
        for test in suite["testsuite"]:
            name = f"{suite['name']}.{test['name']}"
            if test.get("failures"):
                outcome.failures.append((name, "\n".join(f["failure"] for f in test["failures"])))
            elif test["result"] == "SKIPPED":
                outcome.skipped += 1
            elif test["status"] == "RUN":
                outcome.passed += 1
    return outcome


def from_log(text):
    """The outcome of a GoogleTest run that ended before its report: what its log tells, and the test it ended in."""
    outcome = Outcome()
    outcome.passed = len(re.findall(r"^\[       OK \] ", text, re.MULTILINE))
    outcome.skipped = len(re.findall(r"^\[  SKIPPED \] .* \(\d+ ms\)$", text, re.MULTILINE))
    for name in re.findall(r"^\[  FAILED  \] (\S+?),? .*\(\d+ ms\)$", text, re.MULTILINE):
        outcome.failures.append((name, "see the log"))
    return outcome


def run_gtest(command, env, log, timeout_s):
    report = log.with_suffix(".json")
    report.unlink(missing_ok=True)
    code = run(command, env | {"GTEST_OUTPUT": f"json:{report}"}, log, timeout_s)
    if report.exists():
        outcome = from_report(json.loads(report.read_text()))
        # GoogleTest's own codes are 0 and 1; a sanitizer that complains after the last test shows in the code alone.
        if code != (1 if outcome.failures else 0):
            outcome.failures.append(("after the last test", f"{describe_exit(code, timeout_s)}\n{tail(log)}"))
        return outcome
    text = log.read_text(errors="replace")
    outcome = from_log(text)
    started = re.findall(r"^\[ RUN      \] (\S+)", text, re.MULTILINE)
    ended = re.findall(r"^\[ (?:      OK|  FAILED | SKIPPED) \] (\S+?),? ", text, re.MULTILINE)
    where = started[-1] if started and started[-1] not in ended else "no test"
    outcome.failures.append((where, f"{describe_exit(code, timeout_s)}\n{tail(log)}"))
    return outcome


def run_other(command, env, log, timeout_s):
    """A test of any other kind counts as one, by its exit code."""
    code = run(command, env, log, timeout_s)
    if code == 0:
        return Outcome(passed=1)
    return Outcome(failures=[(Path(command[0]).name, f"{describe_exit(code, timeout_s)}\n{tail(log)}")])


def not_built(*_):
    return Outcome(failures=[("no test", "its executable was not built")])


def run_unittest(folder, env, log, timeout_s):
    command = [sys.executable, "-m", "unittest", "discover", "-v", "-s", str(folder), "-p", "*_test.py"]
    code = run(command, env, log, timeout_s)
    text = log.read_text(errors="replace")
    outcome = Outcome(failures=[(name, tail(log)) for name in re.findall(r"^(?:FAIL|ERROR): (.+)$", text, re.MULTILINE)])
    outcome.skipped = sum(int(n) for n in re.findall(r"skipped=(\d+)", text))
    ran = re.search(r"^Ran (\d+) tests? in", text, re.MULTILINE)
    if ran:
        outcome.passed = max(0, int(ran[1]) - outcome.skipped - len(outcome.failures))
    if code != 0 and not outcome.failures:
        outcome.failures.append((folder.name, f"{describe_exit(code, timeout_s)}\n{tail(log)}"))
    return outcome


def ctest_commands(build):
    """(name, command) of each test that CMake knows in this build folder; what a former build left is not among them."""
    listing = subprocess.run(["ctest", "--test-dir", build, "--show-only=json-v1"], capture_output=True, check=True)
    return [(test["name"], test.get("command", [])) for test in json.loads(listing.stdout)["tests"]]


def suites_of(build):
    """(name, function that runs it, what to run): the tests of a build folder, and with release those of the tools."""
    for name, command in ctest_commands(build):
        if not command:
            yield name, not_built, None
            continue
        is_gtest = re.fullmatch(r"isomer_\w+_tests", Path(command[0]).name)
        # ThreadSanitizer needs its memory layout, which some kernels' address randomisation breaks.
        if build.name == "tsan" and shutil.which("setarch"):
            if subprocess.run(["setarch", "-R", "true"], capture_output=True).returncode == 0:
                command = ["setarch", "-R", *command]
        yield name, run_gtest if is_gtest else run_other, command
    if build.name == "release":
        for folder in sorted({path.parent for path in (ROOT / "tests").rglob("*_test.py")}):
            yield f"python-{folder.name}", run_unittest, folder


def run_build(build, full, timeout_s):
    """Runs all tests of a build folder, printing a line for each suite and what failed."""
    logs = build / "test-logs"
    logs.mkdir(exist_ok=True)
    total = Outcome()
    for name, runner, what in suites_of(build):
        start = time.monotonic()
        outcome = runner(what, environment(full and build.name == "release"), logs / f"{name}.log", timeout_s)
        print(f"{build.name}/{name}: {outcome} ({time.monotonic() - start:.1f} s)", flush=True)
        for test, message in outcome.failures:
            print(f"--- FAILED {build.name}/{name}: {test}\n{message}\n", flush=True)
        outcome.failures = [(f"{build.name}/{name}: {test}", message) for test, message in outcome.failures]
        total.add(outcome)
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("builds", nargs="+", type=Path, help="build folders, such as build/release")
    parser.add_argument("--full", action="store_true", help="whole grids in release (ISOMER_FULL_TESTS=1)")
    parser.add_argument("--timeout", type=float, help="seconds for one executable (600; sanitizers, --full: 3600)")
    arguments = parser.parse_args()

    total = Outcome()
    for build in arguments.builds:
        patient = arguments.full or build.name != "release"
        total.add(run_build(build.resolve(), arguments.full, arguments.timeout or (3600 if patient else 600)))
    for name, _ in total.failures:
        print(f"FAILED {name}")
    if not (total.passed or total.failures):
        print("no test ran")
    print(total)
    return 0 if total.passed and not total.failures else 1


if __name__ == "__main__":
    sys.exit(main())
