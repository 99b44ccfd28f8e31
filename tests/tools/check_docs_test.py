"""The numbers in the documentation are those that its commands print."""

import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import check_docs  # noqa: E402

ISOMER = ROOT / "build/release/isomer"


class CheckDocs(unittest.TestCase):
    @unittest.skipUnless(ISOMER.exists(), "no release build")
    def test_documents_say_what_the_program_prints(self):
        for document in check_docs.documents():
            with self.subTest(document=str(document.relative_to(ROOT))):
                changed = check_docs.refreshed(document, ISOMER)[1]
                self.assertEqual(changed, [], "python3 tools/check_docs.py --update writes the output anew")

    def test_local_links_lead_somewhere(self):
        planned = {"docs/performance.md", "docs/claims.md"}
        for document in [*check_docs.documents(), ROOT / "CONTRIBUTING.md"]:
            for target in check_docs.local_links(document.read_text(encoding="utf-8")):
                path = (document.parent / target).resolve()
                if str(path.relative_to(ROOT)) in planned:
                    continue
                self.assertTrue(path.exists(), f"{document.relative_to(ROOT)} links to {target}")

    def refreshed(self, text):
        """What becomes of a document under a program that prints its arguments."""
        with tempfile.TemporaryDirectory() as folder:
            program, document = Path(folder, "program"), Path(folder, "a.md")
            program.write_text('#!/bin/sh\necho "ran $*"\n', encoding="utf-8")
            program.chmod(0o755)
            document.write_text(text, encoding="utf-8")
            return check_docs.refreshed(document, program)

    def test_stale_output_is_found_and_replaced(self):
        text, changed = self.refreshed("before\n```console\n$ isomer a --dry-run\nold\n```\nafter\n")
        self.assertEqual(changed, ["isomer a --dry-run"])
        self.assertEqual(text, "before\n```console\n$ isomer a --dry-run\nran a --dry-run\n```\nafter\n")

    def test_fresh_output_stays(self):
        fresh = "```console\n$ isomer a --dry-run\nran a --dry-run\n$ isomer b --dry-run\nran b --dry-run\n```\n"
        self.assertEqual(self.refreshed(fresh), (fresh, []))

    def test_what_depends_on_the_machine_is_left_alone(self):
        timed = "```console\n$ isomer a\nold\n```\n"
        self.assertEqual(self.refreshed(timed), (timed, []))


if __name__ == "__main__":
    unittest.main()
