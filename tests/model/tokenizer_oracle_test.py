"""The program's tokens against those of PyPI's `tokenizers`, on texts that no golden file holds. Skipped without it."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/golden"))
from tokenizer_texts import BY_HAND, NOVEL, random_texts  # noqa: E402

try:
    import tokenizers
except ImportError:
    tokenizers = None

ISOMER = Path(os.environ.get("ISOMER_PROGRAM", ROOT / "build/release/isomer"))
DEEPSEEK = Path(os.environ.get("ISOMER_DEEPSEEK_TOKENIZER", ROOT.parent / "shared/data/tokenizers/deepseek-v3"))
NUM_RANDOM = 20000 if os.environ.get("ISOMER_FULL_TESTS") == "1" else 600


def isomer(*arguments):
    return subprocess.run([ISOMER, "tokenizer", *map(str, arguments)], check=True, capture_output=True).stdout


@unittest.skipIf(tokenizers is None, "PyPI's tokenizers is not installed: pip install tokenizers")
class Oracle(unittest.TestCase):
    def compare(self, path, seed):
        """Encodes all texts with both, decodes what came out, compares."""
        reference = tokenizers.Tokenizer.from_file(str(path))
        texts = [text for text in BY_HAND + random_texts(NUM_RANDOM, seed) if text] + [NOVEL.read_text(encoding="utf-8")]
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, f"{i}.txt") for i in range(len(texts))]
            for file, text in zip(files, texts):
                file.write_bytes(text.encode())
            lines = isomer("encode", "--tokenizer", path, "--data", *files).decode().split("\n")[:-1]
            self.assertEqual(len(lines), len(texts))
            for text, line in zip(texts, lines):
                expected = reference.encode(text, add_special_tokens=False).ids
                self.assertEqual([int(word) for word in line.split()], expected, repr(text[:300]))
            ids = Path(folder, "ids")
            ids.write_text(lines[-1])
            decoded = isomer("decode", "--tokenizer", path, "--ids", ids).decode()
            self.assertEqual(decoded, reference.decode([int(word) for word in lines[-1].split()], skip_special_tokens=False))

    def test_small_tokenizers(self):
        for seed, path in enumerate(sorted((ROOT / "tests/golden/tokenizer").glob("*.json"))):
            with self.subTest(path.stem), tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "tokenizer.json")
                file.write_text(json.dumps(json.loads(path.read_text())["tokenizer"]))
                self.compare(file, seed + 1000)

    @unittest.skipUnless((DEEPSEEK / "tokenizer.json").exists(), f"no DeepSeek-V3 tokenizer at {DEEPSEEK}")
    def test_deepseek_v3(self):
        self.compare(DEEPSEEK / "tokenizer.json", 7)

    def test_training(self):
        """The same vocabulary and merges, tie for tie."""
        for pattern in ("llama3", "gpt2"):
            with self.subTest(pattern), tempfile.TemporaryDirectory() as folder:
                isomer("train", "--data", NOVEL, "--vocab-size", 1500, "--pattern", pattern, "--out", folder)
                mine = json.loads(Path(folder, "tokenizer.json").read_text())
                trained = tokenizers.Tokenizer(tokenizers.models.BPE())
                trained.pre_tokenizer = tokenizers.Tokenizer.from_str(json.dumps(mine)).pre_tokenizer
                trainer = tokenizers.trainers.BpeTrainer(
                    vocab_size=1500, min_frequency=2, special_tokens=["<|endoftext|>"], show_progress=False,
                    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
                trained.train_from_iterator([NOVEL.read_bytes().decode()], trainer)
                model = json.loads(trained.to_str())["model"]
                self.assertEqual(mine["model"]["merges"], model["merges"])
                self.assertEqual(mine["model"]["vocab"], model["vocab"])


if __name__ == "__main__":
    unittest.main()
