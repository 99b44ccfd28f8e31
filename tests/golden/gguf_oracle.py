"""GGUF files in NumPy: a writer, a reader, and every supported type back into float32. Written from the format's
description (github.com/ggml-org/ggml, docs/gguf.md) and its block layouts; shares no code with Isomer."""

import struct

import numpy as np

# Type -> (number in the file, elements of a block, bytes of a block).
TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144), "Q6_K": (14, 256, 210), "BF16": (30, 1, 2),
}
NAME_OF = {number: name for name, (number, _, _) in TYPES.items()}
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9


def halves(raw):
    """Little-endian float16 in the last axis' pairs of bytes, as float32."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def six_bit_pairs(packed):
    """12 bytes a block -> eight scales and eight minima."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=1)
    minima = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def dequantise(kind, raw, count):
    """`count` elements of bytes `raw` as float32, one rounding an operation."""
    _, elements, size = TYPES[kind]
    blocks = np.frombuffer(raw, np.uint8)[: count // elements * size].reshape(-1, size)
    if kind == "F32":
        return np.frombuffer(raw, "<f4", count).astype(np.float32)
    if kind == "F16":
        return np.frombuffer(raw, "<f2", count).astype(np.float32)
    if kind == "BF16":
        return (np.frombuffer(raw, "<u2", count).astype(np.uint32) << 16).view(np.float32)
    if kind == "Q8_0":
        return (halves(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)).ravel()
    if kind in ("Q4_0", "Q4_1"):
        data = blocks[:, size - 16:]
        q = np.concatenate([data & 15, data >> 4], axis=1).astype(np.float32)
        d = halves(blocks[:, :2])
        return ((q - np.float32(8)) * d if kind == "Q4_0" else q * d + halves(blocks[:, 2:4])).ravel()
    if kind == "Q4_K":
        scales, minima = six_bit_pairs(blocks[:, 4:16])
        steps, offsets = halves(blocks[:, :2]) * scales, halves(blocks[:, 2:4]) * minima
        data = blocks[:, 16:].reshape(-1, 4, 32)
        q = np.stack([data & 15, data >> 4], axis=2).reshape(-1, 8, 32).astype(np.float32)
        return (steps[:, :, None] * q - offsets[:, :, None]).ravel()
    if kind == "Q6_K":
        low = blocks[:, :128].reshape(-1, 2, 2, 32)  # half, place in it, byte
        high = blocks[:, 128:192].reshape(-1, 2, 32)
        q = np.empty((len(blocks), 2, 4, 32), np.int32)
        for quarter in range(4):
            bits = low[:, :, quarter % 2] >> (4 * (quarter // 2)) & 15
            q[:, :, quarter] = bits | (high >> (2 * quarter) & 3) << 4
        scale = halves(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
        return (scale[:, :, None] * (q.reshape(-1, 16, 16) - 32).astype(np.float32)).ravel()
    raise ValueError(f"no type {kind}")


def random_blocks(kind, shape, rng, step=0.02):
    """Bytes of a tensor whose blocks hold every bit pattern, with scales near `step`."""
    _, elements, size = TYPES[kind]
    count = int(np.prod(shape))
    if elements == 1:
        values = (rng.standard_normal(count) * 8 * step).astype(np.float32)
        if kind == "BF16":
            return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        return values.astype({"F32": "<f4", "F16": "<f2"}[kind]).tobytes()
    blocks = rng.integers(0, 256, (count // elements, size), dtype=np.uint8)
    half = lambda scale, mean=0.0: (mean + scale * rng.uniform(0.5, 1.5, len(blocks))).astype("<f2").view(np.uint8).reshape(-1, 2)
    if kind in ("Q4_0", "Q4_1", "Q4_K"):
        blocks[:, 0:2] = half(step / (64 if kind == "Q4_K" else 1))
    if kind == "Q8_0":
        blocks[:, 0:2] = half(step / 16)
    if kind == "Q4_1":
        blocks[:, 2:4] = half(-8 * step)
    if kind == "Q4_K":
        blocks[:, 2:4] = half(step / 8)
    if kind == "Q6_K":
        blocks[:, 208:210] = half(step / 256)
    return blocks.tobytes()


def text_bytes(text):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(value):
    """Type number and value: int -> u32, float -> f32, list of int -> i32."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, (str, bytes)):
        return struct.pack("<I", TEXT) + text_bytes(value)
    if value and isinstance(value[0], int):
        return struct.pack(f"<IIQ{len(value)}i", ARRAY, 5, len(value), *value)
    return struct.pack("<IIQ", ARRAY, TEXT, len(value)) + b"".join(text_bytes(item) for item in value)


def write(metadata, tensors, alignment=32, version=3):
    """A file's bytes; tensors: name -> (type, shape with the slowest axis first, bytes)."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    out += b"".join(text_bytes(key) + value_bytes(value) for key, value in metadata.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        data += bytes(-len(data) % alignment)
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        out += text_bytes(name) + sizes + struct.pack("<IQ", TYPES[kind][0], len(data))
        data += raw
    return out + bytes(-len(out) % alignment) + data


def read(raw):
    """(metadata, {name: float32 array}) of a file's bytes. For files that are known to be well."""
    at = 8

    def take(code):
        nonlocal at
        value = struct.unpack_from("<" + code, raw, at)[0]
        at += struct.calcsize("<" + code)
        return value

    def text():
        nonlocal at
        length = take("Q")
        at += length
        return raw[at - length:at].decode()

    def value(kind):
        if kind == TEXT:
            return text()
        if kind == ARRAY:
            of, size = take("I"), take("Q")
            return [value(of) for _ in range(size)]
        return take(SCALARS[kind])

    num_tensors, num_metadata = take("Q"), take("Q")
    metadata = {}
    for _ in range(num_metadata):
        key = text()
        metadata[key] = value(take("I"))
    table = []
    for _ in range(num_tensors):
        name = text()
        shape = [take("Q") for _ in range(take("I"))][::-1]
        table.append((name, shape, NAME_OF[take("I")], take("Q")))
    begin = at + -at % metadata.get("general.alignment", 32)
    tensors = {}
    for name, shape, kind, offset in table:
        count = int(np.prod(shape))
        tensors[name] = dequantise(kind, raw[begin + offset:], count).reshape(shape)
    return metadata, tensors
