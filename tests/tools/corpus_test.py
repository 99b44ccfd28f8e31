"""tools/corpus.py: the readers on small files made here; the packages themselves where they lie in build/corpus."""
import hashlib
import struct
import sys
import tempfile
import unittest
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import corpus  # noqa: E402


def r_string(text, levels):
    data = text.encode("latin-1" if levels & 4 else "utf-8")
    return struct.pack(">ii", levels << 12 | 9, len(data)) + data


def r_file(body):
    return b"X\n" + struct.pack(">iiii", 3, 0x40201, 0x30500, 5) + b"UTF-8" + body


def r_names(names):
    """The attribute list that names a vector's elements."""
    symbol = struct.pack(">i", 1) + r_string("names", 0x40)
    strings = b"".join(r_string(name, 0x40) for name in names)
    return struct.pack(">i", 0x402) + symbol + struct.pack(">ii", 16, len(names)) + strings + struct.pack(">i", 254)


def write_novels(folder, novels):
    """A lazy-load database: zlib-compressed character vectors, and an index of where they are."""
    data, entries = b"", b""
    for lines in novels.values():
        vector = r_file(struct.pack(">ii", 16, len(lines)) + b"".join(r_string(line, 0x8) for line in lines))
        chunk = struct.pack(">I", len(vector)) + zlib.compress(vector)
        entries += struct.pack(">iiii", 13, 2, len(data), len(chunk))
        data += chunk
    variables = struct.pack(">ii", 0x213, len(novels)) + entries + r_names(list(novels))
    index = r_file(struct.pack(">ii", 0x213, 1) + variables + r_names(["variables"]))
    Path(folder, "Rdata.rdb").write_bytes(data)
    Path(folder, "Rdata.rdx").write_bytes(zlib.compress(index))
    return str(Path(folder, "Rdata"))


class RReader(unittest.TestCase):
    def test_lazy_load_data(self):
        with tempfile.TemporaryDirectory() as folder:
            base = write_novels(folder, {"emma": ["Chapter 1", "", "née"], "other": []})
            self.assertEqual(corpus.novel_lines(base, "emma"), ["Chapter 1", "", "née"])
            self.assertEqual(corpus.novel_lines(base, "other"), [])
            with self.assertRaisesRegex(corpus.CorpusError, "no persuasion; it has emma, other"):
                corpus.novel_lines(base, "persuasion")

    def test_encodings(self):
        for levels, text in ((0x40, "plain"), (0x8, "é€"), (0x4, "é")):
            self.assertEqual(corpus.RReader(r_file(r_string(text, levels)), "f").value(), text)

    def test_hostile_files(self):
        for data in (b"", b"X\n", b"A\n12345678", r_file(b""), r_file(struct.pack(">ii", 16, 2 ** 31 - 1)),
                     r_file(struct.pack(">ii", 9, 100) + b"short"), r_file(struct.pack(">ii", 77, 1))):
            with self.assertRaises(corpus.CorpusError):
                corpus.RReader(data, "f").value()


class Sword(unittest.TestCase):
    def test_blocks_in_order_and_sizes_checked(self):
        blocks = [b"<p/>one ", b"two \xc3\xa9"]
        packed = [zlib.compress(block) for block in blocks]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "ot.bzz").write_bytes(b"".join(packed))
            index = [struct.pack("<III", 0, len(packed[0]), 8), struct.pack("<III", len(packed[0]), len(packed[1]), 6)]
            Path(folder, "ot.bzs").write_bytes(b"".join(index))
            self.assertEqual(corpus.sword_markup(folder, "ot", "b"), "<p/>one two é")
            Path(folder, "ot.bzs").write_bytes(struct.pack("<III", 0, len(packed[0]), 7))
            with self.assertRaisesRegex(corpus.CorpusError, "8 bytes where 7"):
                corpus.sword_markup(folder, "ot", "b")


class Text(unittest.TestCase):
    def test_osis(self):
        markup = ('<div canonical="true" osisID="Gen" sID="g" type="book"/> <title type="main">Genesis</title> '
                  '<div sID="p1" type="x-p"/><chapter n="1" osisID="Gen.1" sID="Gen.1"/><w lemma="strong:H1">In</w> the '
                  'beginning, God<note placement="foot"><reference>1:1 </reference>Elohim</note><w>created</w> light'
                  '<note>x</note>.  &amp; so \u201con\u201d\u2014<div eID="p1" type="x-p"/> <chapter eID="Gen.1"/> '
                  '<lg sID="l"/><l level="1" sID="a"/>a verse,<l eID="a"/> <l level="2" sID="b"/>and one<l eID="b"/>')
        self.assertEqual(corpus.clean(corpus.osis_text(markup, "Chapter {}")),
                         "Genesis\n\nChapter 1\n\nIn the beginning, God created light. & so \"on\"--\n\na verse,\n\n"
                         "and one")

    def test_novels_have_a_line_a_paragraph(self):
        lines = ["EMMA", "", "Emma Woodhouse, handsome,", "clever, and rich", "", "", "   verse", "   verse", "last"]
        self.assertEqual(corpus.clean(corpus.novel_text(lines)),
                         "EMMA\n\nEmma Woodhouse, handsome, clever, and rich\n\nverse\nverse last")

    def test_books_are_apart(self):
        self.assertEqual(corpus.clean("\n<|endoftext|>\n a \n\n\n\nb<|endoftext|>\n \n<|endoftext|>c"),
                         "a\n\nb\n<|endoftext|>\nc")


class Committed(unittest.TestCase):
    def test_sums_are_of_what_was_made(self):
        for name, digest in corpus.SHA256.items():
            path = ROOT / "build" / "corpus" / name
            if not path.is_file():
                self.skipTest(f"{path} is not there; tools/corpus.py makes it")
            self.assertEqual(hashlib.sha256(path.read_bytes()).hexdigest(), digest)


if __name__ == "__main__":
    unittest.main()
