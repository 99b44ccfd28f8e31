#!/usr/bin/env python3
"""Makes the text that models/tiny-mla is trained on: train.txt and held-out.txt, from Debian packages.

usage: tools/corpus.py [--out build/corpus] [--packages FOLDER] [--any-version]

Public-domain English. Five novels by Jane Austen (r-cran-janeaustenr), the World English Bible (sword-text-web) and
Spurgeon's Treasury of David (sword-comm-tdavid) to train on; a sixth novel, Persuasion, is held out.

A package's files are read where it is installed, else its .deb in FOLDER, else `apt-get download` fetches it. The
texts are UTF-8 with one paragraph, line of verse or heading a line, blank lines between paragraphs and a line
<|endoftext|> between books; quotation marks, dashes and spaces that have an exact counterpart in ASCII are mapped to
it (an em dash is --, as in the novels). Footnotes and cross-references of the Bible are left out. The files' SHA-256
sums must be the committed ones; --any-version says them instead, for packages of another release.
"""

import argparse
import bz2
import hashlib
import html
import lzma
import os
import pathlib
import re
import struct
import subprocess
import sys
import zlib

PACKAGES = {"r-cran-janeaustenr": "1.0.0-1", "sword-text-web": "426.0-1", "sword-comm-tdavid": "2.1-1"}
NOVELS_TO_TRAIN = ["emma", "mansfieldpark", "northangerabbey", "prideprejudice", "sensesensibility"]
NOVEL_HELD_OUT = "persuasion"
SEPARATOR = "<|endoftext|>"
SHA256 = {
    "train.txt": "dfee425aad1617884418141983c5e973f16446da0706c159394298191942734b",
    "held-out.txt": "ea05f5bd05c12e0b8a04e80ff9f65cb37920658ac47d07a58f615733f93664d2",
}

FOOTNOTE = "\x01"  # where one was; often nothing else stands between two words

NOVELS_PATH = "usr/lib/R/site-library/janeaustenr/data/Rdata"
BIBLE_PATH = "usr/share/sword/modules/texts/ztext/engWEB2015eb"
COMMENTARY_PATH = "usr/share/sword/modules/comments/zcom/tdavid"

ASCII = str.maketrans({
    "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "\u2013": "-", "\u2010": "-",
    "\u2011": "-", "\u2026": "...", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200a": " ", "\ufeff": "",
    "\u200b": "", "\u00ad": "",
})
# The commentary keeps a few letters of code page 437 as control characters: interdi\x97 is interdiù.
ASCII.update({code: bytes([code]).decode("cp437") for code in range(0x80, 0xa0)})


class CorpusError(Exception):
    """Something outside is not as it should be; the message says what and what to do."""


class RReader:
    """Reads R's XDR serialisation as far as lazy-load data needs it: vectors, pair lists, attributes."""

    def __init__(self, data, name):
        if data[:2] != b"X\n":
            raise CorpusError(f"{name}: begins with {data[:2]!r}, not R's XDR serialisation")
        self.data, self.name, self.at, self.references = data, name, 2, []
        version = self.integers(3)[0]
        if version == 3:  # a native encoding follows
            self.take(self.integers(1)[0])
        elif version != 2:
            raise CorpusError(f"{name}: serialisation version {version}; 2 and 3 are read")

    def take(self, count):
        if count < 0 or self.at + count > len(self.data):
            raise CorpusError(f"{self.name}: {count} bytes at {self.at} are more than the {len(self.data)} there are")
        self.at += count
        return self.data[self.at - count:self.at]

    def integers(self, count):
        return struct.unpack(f">{count}i", self.take(4 * count))

    def value(self):
        flags, = self.integers(1)
        kind, has_attributes, has_tag = flags & 0xff, flags & 0x200, flags & 0x400
        if kind in (254, 253, 242, 241, 251):  # NULL, the environments, the missing argument
            return None
        if kind == 255:  # a reference to a symbol met before
            return self.references[((flags >> 8) or self.integers(1)[0]) - 1]
        if kind == 1:
            self.references.append(self.value())
            return self.references[-1]
        if kind == 2:
            return self.pairs(has_attributes, has_tag)
        if kind == 9:
            return self.characters(flags)
        result = self.vector(kind)
        if has_attributes:
            names = (self.value() or {}).get("names")
            if kind == 19 and names:
                return dict(zip(names, result))
        return result

    def pairs(self, has_attributes, has_tag):
        result = {}
        while True:
            if has_attributes:
                self.value()
            tag = self.value() if has_tag else len(result)
            result[tag] = self.value()
            flags, = self.integers(1)
            if flags & 0xff != 2:
                if flags & 0xff != 254:
                    raise CorpusError(f"{self.name}: a pair list ends in type {flags & 0xff}")
                return result
            has_attributes, has_tag = flags & 0x200, flags & 0x400

    def characters(self, flags):
        length, = self.integers(1)
        if length < 0:
            return None
        levels = flags >> 12
        return self.take(length).decode("latin-1" if levels & 4 else "utf-8")

    def vector(self, kind):
        count, = self.integers(1)
        if kind in (10, 13):
            return list(self.integers(count))
        if kind == 14:
            return list(struct.unpack(f">{count}d", self.take(8 * count)))
        if kind in (16, 19):
            return [self.value() for _ in range(count)]
        raise CorpusError(f"{self.name}: R type {kind} at byte {self.at} is none that lazy-load data of text holds")


def unpacked_r_object(chunk, name):
    """One object of an .rdb: its length, perhaps a letter for the compression, and compressed bytes."""
    length, = struct.unpack(">I", chunk[:4])
    letter = chunk[4:5]
    if letter == b"2":
        data = bz2.decompress(chunk[5:])
    elif letter == b"Z":
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
        data = lzma.decompress(chunk[5:], format=lzma.FORMAT_RAW, filters=filters)
    elif letter in (b"0", b"1"):
        data = chunk[5:] if letter == b"0" else zlib.decompress(chunk[5:])
    else:
        data = zlib.decompress(chunk[4:])
    if len(data) != length:
        raise CorpusError(f"{name}: {len(data)} bytes unpacked where {length} are promised")
    return data


def novel_lines(base, name):
    """The lines of a novel in the lazy-load database BASE.rdx, BASE.rdb."""
    index = RReader(zlib.decompress(pathlib.Path(base + ".rdx").read_bytes(), zlib.MAX_WBITS | 32), base + ".rdx")
    variables = index.value()["variables"]
    if name not in variables:
        raise CorpusError(f"{base}.rdx has no {name}; it has {', '.join(variables)}")
    offset, size = variables[name]
    data = pathlib.Path(base + ".rdb").read_bytes()
    return RReader(unpacked_r_object(data[offset:offset + size], name), name).value()


def novel_text(lines):
    """Wrapped lines to one line a paragraph; indented lines (verse, signatures) stay lines."""
    text = "\n".join(line.rstrip() for line in lines)
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


def sword_markup(folder, testament, kind):
    """The mark-up of a SWORD zText/zCom module: blocks in the order of the block index."""
    index = pathlib.Path(folder, f"{testament}.{kind}zs").read_bytes()
    packed = pathlib.Path(folder, f"{testament}.{kind}zz").read_bytes()
    result = []
    for offset, packed_size, size in struct.iter_unpack("<III", index):
        block = zlib.decompress(packed[offset:offset + packed_size])
        if len(block) != size:
            raise CorpusError(f"{folder}/{testament}: a block of {len(block)} bytes where {size} are promised")
        result.append(block.decode("utf-8"))
    return "".join(result)


def osis_text(markup, chapter_heading):
    """OSIS mark-up to plain text; chapter_heading is a format of the chapter's number, or empty for none."""
    text = re.sub(r"\s+", " ", markup)
    text = re.sub(r"<note\b.*?</note>", FOOTNOTE, text)
    text = re.sub(r'<div [^>]*type="(?:book|front)"[^>]*>', f"\n\n{SEPARATOR}\n\n", text)
    if chapter_heading:
        text = re.sub(r'<chapter (?=[^>]*sID)[^>]*\bn="(\d+)"[^>]*>',
                      lambda match: "\n\n" + chapter_heading.format(match[1]) + "\n\n", text)
    text = re.sub(r'</?title\b[^>]*>|<div [^>]*type="x-p"[^>]*>|</?list\b[^>]*>|<lg\b[^>]*>', "\n\n", text)
    text = re.sub(r"<l\b[^>]*>|</?item\b[^>]*>|<lb\b[^>]*>|</?speaker\b[^>]*>", "\n", text)
    text = html.unescape(re.sub(r"</?[a-zA-Z][^>]*>", "", text))
    return re.sub(FOOTNOTE + r"+(?=[\s,.;:?!)\u2019\u201d]|$)", "", text).replace(FOOTNOTE, " ")


def clean(text):
    """ASCII where it is exact, no space at the ends of lines or doubled, at most one blank line, one book a part."""
    text = re.sub(r"[ \t]+", " ", text.replace("\r", "").translate(ASCII))
    text = re.sub(r" *\n *", "\n", text)
    parts = [re.sub(r"\n{3,}", "\n\n", part).strip() for part in text.split(SEPARATOR)]
    return f"\n{SEPARATOR}\n".join(part for part in parts if part)


def package_root(name, folder):
    """Where a package's files lie: / where it is installed, else extracted below FOLDER."""
    marker = {"r-cran-janeaustenr": NOVELS_PATH + ".rdx", "sword-text-web": BIBLE_PATH + "/ot.bzs",
              "sword-comm-tdavid": COMMENTARY_PATH + "/ot.czs"}[name]
    for root in (pathlib.Path("/"), folder / "packages"):
        if (root / marker).is_file():
            return root
    archives = sorted(folder.glob(name + "_*.deb"))
    if not archives:
        done = subprocess.run(["apt-get", "download", name], cwd=folder, capture_output=True, text=True, check=False)
        archives = sorted(folder.glob(name + "_*.deb"))
        if done.returncode != 0 or not archives:
            raise CorpusError(f"apt-get download {name} failed: {done.stderr.strip()}\n"
                              f"Put {name}_{PACKAGES[name]}_all.deb in {folder}, or install the package.")
    subprocess.run(["dpkg-deb", "-x", archives[-1], folder / "packages"], check=True)
    if not (folder / "packages" / marker).is_file():
        raise CorpusError(f"{archives[-1]} holds no {marker}; version {PACKAGES[name]} does")
    return folder / "packages"


def texts(folder):
    """Both texts, by file name."""
    novels = str(package_root("r-cran-janeaustenr", folder) / NOVELS_PATH)
    bible = package_root("sword-text-web", folder) / BIBLE_PATH
    commentary = package_root("sword-comm-tdavid", folder) / COMMENTARY_PATH
    works = [novel_text(novel_lines(novels, name)) for name in NOVELS_TO_TRAIN]
    works += [osis_text(sword_markup(bible, testament, "b"), "Chapter {}") for testament in ("ot", "nt")]
    works.append(osis_text(sword_markup(commentary, "ot", "c"), ""))
    return {"train.txt": clean(f"\n{SEPARATOR}\n".join(works)) + "\n",
            "held-out.txt": clean(novel_text(novel_lines(novels, NOVEL_HELD_OUT))) + "\n"}


def write_checked(path, text, any_version):
    data = text.encode("utf-8")
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256[path.name] and not any_version:
        raise CorpusError(f"{path.name} has SHA-256 {digest}, not {SHA256[path.name]}: the packages differ from "
                          f"{PACKAGES}. --any-version writes it anyway; results are then not the committed ones.")
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(data)
    os.replace(unfinished, path)
    print(f"{path}: {len(data)} bytes, SHA-256 {digest}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/corpus"))
    parser.add_argument("--packages", type=pathlib.Path, help="where .deb files lie or are put (default: --out)")
    parser.add_argument("--any-version", action="store_true", help="say the sums instead of checking them")
    arguments = parser.parse_args()
    folder = arguments.packages or arguments.out
    for needed in (arguments.out, folder):
        needed.mkdir(parents=True, exist_ok=True)
    try:
        for name, text in texts(folder).items():
            write_checked(arguments.out / name, text, arguments.any_version)
    except (CorpusError, zlib.error, struct.error, UnicodeDecodeError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"corpus.py: {error}")


if __name__ == "__main__":
    main()
