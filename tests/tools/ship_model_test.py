"""tools/ship_model.py on a run made up here."""
import argparse
import json
import struct
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import ship_model  # noqa: E402


def write_safetensors(path, tensors):
    """tensors: {name: (dtype, shape, bytes)}"""
    header, data = {}, b""
    for name, (dtype, shape, part) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


class ShipModel(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = Path(holder.name)
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (self.folder / name).write_text("{}")

    def copy(self, tensors):
        write_safetensors(self.folder / "model.safetensors", tensors)
        ship_model.copy(argparse.Namespace(run=self.folder, out=self.folder / "out"))
        header, data = ship_model.read_safetensors(self.folder / "out" / "model.safetensors")
        return {name: (info["dtype"], bytes(data[slice(*info["data_offsets"])])) for name, info in header.items()
                if name != "__metadata__"}

    def test_rounds_to_nearest_even_and_keeps_the_rest(self):
        # 1 + 2^-8 lies between two bfloat16 values, 1 and 1 + 2^-7: ties go to the even one.
        values = struct.pack("<4f", 1 + 2 ** -8, 1 + 3 * 2 ** -8, -1.003907, 0)
        bias = struct.pack("<f", 1.00001)
        result = self.copy({"a": ("F32", [2, 2], values), "x.e_score_correction_bias": ("F32", [1], bias),
                            "b": ("BF16", [1], b"\x01\x02")})
        self.assertEqual(result["a"], ("BF16", struct.pack("<4H", 0x3f80, 0x3f82, 0xbf81, 0)))
        self.assertEqual(result["x.e_score_correction_bias"], ("F32", bias))
        self.assertEqual(result["b"], ("BF16", b"\x01\x02"))

    def test_refuses_infinities_and_large_models(self):
        with self.assertRaisesRegex(ship_model.ShipError, "infinities"):
            self.copy({"a": ("F32", [1], struct.pack("<f", float("inf")))})
        with self.assertRaisesRegex(ship_model.ShipError, "at most"):
            self.copy({"a": ("BF16", [3_000_001], bytes(6_000_002))})

    def check(self, model_bits):
        out = self.folder / "out"
        out.mkdir(exist_ok=True)
        lines = [{"step": s, "tokens": 8 * s, "loss": 4 - s / 1000, "learning_rate": 1e-3} for s in range(1, 1001)]
        lines[499]["eval_bits_per_byte"] = 2.5
        (self.folder / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
        (self.folder / "run.json").write_text('{"steps": 1000, "config": {}}')
        perplexity = {"bits_per_byte": model_bits, "nats_per_token": 2, "perplexity": 7.4, "tokens_scored": 10,
                      "bytes_scored": 30, "window": 8, "overlap": 0, "mode": "prefill"}
        models = [{"name": "5-gram of bytes", "bits_per_byte": 2.0, "perplexity": 4},
                  {"name": "bigram of tokens", "bits_per_byte": 2.2, "perplexity": 90}]
        (self.folder / "p.json").write_text(json.dumps(perplexity))
        (self.folder / "n.json").write_text(json.dumps({"models": models}))
        ship_model.check(argparse.Namespace(run=self.folder, model=out, perplexity=self.folder / "p.json",
                                            ngram=self.folder / "n.json"))

    def test_evaluation_and_curve(self):
        self.check(1.9)
        evaluation = json.loads((self.folder / "out" / "evaluation.json").read_text())
        self.assertEqual(evaluation["model"]["bits_per_byte"], 1.9)
        self.assertEqual(evaluation["training"], {"steps": 1000})
        rows = (self.folder / "out" / "loss.csv").read_text().splitlines()
        self.assertEqual(rows[1], "2,16,3.9985,0.001,")
        self.assertIn("500,4000,3.5005,0.001,2.50000", rows)
        self.assertTrue(rows[-1].startswith("1000,8000,"))
        self.assertLess(len(rows), 1000)

    def test_refuses_a_model_that_an_ngram_beats(self):
        for bits in (2.0, 2.1):
            with self.assertRaisesRegex(ship_model.ShipError, "no better than the 5-gram of bytes"):
                self.check(bits)


if __name__ == "__main__":
    unittest.main()
