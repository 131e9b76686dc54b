"""A text compressed by the next-byte probabilities of a small GPT, and decompressed on another machine.

    python examples/compress_text.py                                    # all steps, the last in a second process
    python examples/compress_text.py train model.npz
    python examples/compress_text.py compress model.npz text.txt text.code
    python examples/compress_text.py decompress model.npz text.code text.txt

The compressor computes the probabilities of whole pieces at once, with the fastest instructions. The decompressor knows
only the bytes so far and goes one by one, with other instructions and threads. A single bit of difference between the
two would turn all that follows into noise; there is none, so every probability becomes the same integer.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
import textwrap
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from small_gpt import GPT, Array, text

import cattn

TOTAL = 2**16  # of the frequencies, at most
HALF, QUARTER, FULL = 2**31, 2**30, 2**32


# ---- an arithmetic coder of integers ----
def ranges(logits: Array) -> Array:
    """Return 257 integers: byte b has those from the b-th to the next, in proportion to its probability."""
    probabilities = cattn.softmax(logits).astype(np.float64)
    frequencies = 1 + np.floor(probabilities * (TOTAL - 512)).astype(np.int64)
    return np.concatenate([[0], np.cumsum(frequencies)])


class Encoder:
    """Narrows an interval by the range of each byte, and writes the bits that its ends have in common."""

    def __init__(self) -> None:
        self.low, self.high, self.pending, self.bits = 0, FULL - 1, 0, list[int]()

    def _write(self, bit: int) -> None:
        self.bits += [bit, *[1 - bit] * self.pending]
        self.pending = 0

    def encode(self, edges: Array, byte: int) -> None:
        """Write one byte."""
        span, total = self.high - self.low + 1, int(edges[-1])
        self.high = self.low + span * int(edges[byte + 1]) // total - 1
        self.low += span * int(edges[byte]) // total
        while self.high < HALF or self.low >= HALF or (self.low >= QUARTER and self.high < HALF + QUARTER):
            if self.high < HALF or self.low >= HALF:
                self._write(int(self.low >= HALF))
                shift = HALF * (self.low >= HALF)
            else:  # around the middle: the next bit says on which side
                self.pending += 1
                shift = QUARTER
            self.low, self.high = 2 * (self.low - shift), 2 * (self.high - shift) + 1

    def finish(self) -> bytes:
        """Return all that was written."""
        self.pending += 1
        self._write(int(self.low >= QUARTER))
        return np.packbits(self.bits).tobytes()


class Decoder:
    """Follows the encoder's intervals."""

    def __init__(self, code: bytes) -> None:
        self._bits: Iterator[int] = iter(np.unpackbits(np.frombuffer(code, np.uint8)).tolist())
        self.low, self.high, self.value = 0, FULL - 1, 0
        for _ in range(32):
            self._read()

    def _read(self) -> None:
        self.value = 2 * self.value + next(self._bits, 0)

    def decode(self, edges: Array) -> int:
        """Read one byte."""
        span, total = self.high - self.low + 1, int(edges[-1])
        at = ((self.value - self.low + 1) * total - 1) // span
        byte = int(np.searchsorted(edges, at, side="right")) - 1
        self.high = self.low + span * int(edges[byte + 1]) // total - 1
        self.low += span * int(edges[byte]) // total
        while self.high < HALF or self.low >= HALF or (self.low >= QUARTER and self.high < HALF + QUARTER):
            shift = HALF * (self.low >= HALF) if self.high < HALF or self.low >= HALF else QUARTER
            self.low, self.high, self.value = 2 * (self.low - shift), 2 * (self.high - shift) + 1, self.value - shift
            self._read()
        return byte


# ---- texts ----
def compress(model: GPT, data: bytes) -> bytes:
    """Return the code of a text; the model sees a piece as long as its context at once."""
    encoder, before = Encoder(), 0
    for start in range(0, len(data), model.context):
        piece = data[start : start + model.context]
        logits = model([before, *piece[:-1]])
        for row, byte in zip(logits, piece, strict=True):
            encoder.encode(ranges(row), byte)
        before = piece[-1]
    return len(data).to_bytes(4, "big") + zlib.crc32(data).to_bytes(4, "big") + encoder.finish()


def decompress(model: GPT, code: bytes) -> bytes:
    """Return the text; the model sees one byte after the other."""
    length, checksum = int.from_bytes(code[:4], "big"), int.from_bytes(code[4:8], "big")
    decoder, data = Decoder(code[8:]), bytearray()
    while len(data) < length:
        if len(data) % model.context == 0:
            caches = model.new_caches()
        logits = model([data[-1] if data else 0], caches)[-1]
        data.append(decoder.decode(ranges(logits)))
    if zlib.crc32(data) != checksum:
        raise SystemExit("this is not the text that was compressed: a probability had other bits")
    return bytes(data)


def load(file: str) -> GPT:
    """Return the model of a file."""
    model = GPT()
    with np.load(file) as weights:
        model.weights = dict(weights)
    return model


def demonstrate(folder: Path, steps: int, data: bytes) -> int:
    """Train, compress here, decompress in a second process with the plainest instructions; return the code's size."""
    model, files = GPT(), [folder / "model.npz", folder / "text.code", folder / "text.txt"]
    model.train(text(), steps)
    np.savez(files[0], **model.weights)
    code = compress(load(str(files[0])), data)
    files[1].write_bytes(code)
    other = os.environ | {"CATTN_ISA": "scalar", "CATTN_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, "decompress", *map(str, files)], env=other, check=True)
    if files[2].read_bytes() != data:
        raise SystemExit("the text is another one")
    return len(code)


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            data = inspect.getsource(textwrap)[:4000].encode()  # the model was not trained on it
            with tempfile.TemporaryDirectory() as folder:
                size = demonstrate(Path(folder), 200, data)
            here = cattn.show_config(mode="dicts")["instruction_set"]
            print(f"{len(data)} bytes, {size} compressed (zlib: {len(zlib.compress(data, 9))})")
            print(f"compressed with {here}, decompressed by a second process with scalar: the same text")
        case ["train", model_file]:
            trained = GPT()
            trained.train(text(), 200)
            np.savez(model_file, **trained.weights)
        case ["compress", model_file, text_file, code_file]:
            Path(code_file).write_bytes(compress(load(model_file), Path(text_file).read_bytes()))
        case ["decompress", model_file, code_file, text_file]:
            Path(text_file).write_bytes(decompress(load(model_file), Path(code_file).read_bytes()))
        case _:
            sys.exit(__doc__)
