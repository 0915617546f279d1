"""What others make of the changes between two versions of weights, measured: bytes and times.

    python bench/peers/delta.py OLD NEW --width 2 [--rounds 3]

OLD and NEW are files of equally many bytes: elements of `--width` bytes, little-endian, and nothing
else. For each way to write down what changed there is a line on standard output:

    {"peer": "XOR + zstd-1", "changes": 1234, "bytes": 5678,
     "encode_s": 0.5, "decode_s": 0.25, "memcpy_s": 0.0625}

`encode_s` begins with the two versions and ends with the bytes to send, `decode_s` begins with
these and ends with the new version in the place of the old one; `memcpy_s` is a copy of the version
in the same rounds. Medians of `--rounds` rounds, one thread. In each round the version that was made
is compared with NEW; if it is another, the exit status is 1.

The ways:

- *XOR + zstd-1*: the two versions XORed, and that compressed.
- *int32 + value*: each change's place and its new value.
- *u16 gap + value + zstd-1*: how many elements lie before a change since the one before it, and its
  new value; gaps and values compressed separately. A gap of `FAR` or more takes further
  entries.
"""

import argparse
import json
import statistics
import sys
import time

import numpy as np
import zstandard

LEVEL = 1

#: An entry among the gaps that stands for so many unchanged elements and no change.
FAR = 0xFFFF

WORDS = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


def main():
    args = arguments()
    old, new = (np.fromfile(path, WORDS[args.width]) for path in (args.old, args.new))
    if old.size != new.size:
        sys.exit(f"{args.old} has {old.size} elements, {args.new} {new.size}")
    changes = int(np.count_nonzero(old != new))
    for name, way in WAYS.items():
        figures = measure(way, old, new, args.rounds)
        print(json.dumps({"peer": name, "changes": changes, **figures}), flush=True)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--width", type=int, choices=WORDS, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
    return args


def measure(way, old, new, rounds):
    """The figures of one way."""
    image = np.empty_like(old)
    encodes, decodes, memcpys = [], [], []
    for _ in range(rounds):
        began = time.perf_counter()
        np.copyto(image, old)
        copied = time.perf_counter()
        coded = way.encode(old, new)
        encoded = time.perf_counter()
        way.apply(coded, image)
        applied = time.perf_counter()
        if not np.array_equal(image, new):
            sys.exit(f"{way.__name__} has not made the version it was to make")
        memcpys.append(copied - began)
        encodes.append(encoded - copied)
        decodes.append(applied - encoded)
    return {
        "bytes": sum(len(part) for part in coded),
        "encode_s": statistics.median(encodes),
        "decode_s": statistics.median(decodes),
        "memcpy_s": statistics.median(memcpys),
    }


class Xor:
    """Both versions XORed, compressed."""

    @staticmethod
    def encode(old, new):
        return [compress(old ^ new)]

    @staticmethod
    def apply(coded, image):
        image ^= decompress(coded[0], image.dtype)


class Places:
    """Places as int32, and the new values."""

    @staticmethod
    def encode(old, new):
        if new.size > np.iinfo(np.int32).max:
            raise ValueError(f"{new.size} elements, more than an int32 counts")
        places = np.flatnonzero(old != new)
        return [bytes_of(places.astype("<i4")), bytes_of(new[places])]

    @staticmethod
    def apply(coded, image):
        places, values = coded
        image[np.frombuffer(places, "<i4")] = np.frombuffer(values, image.dtype)


class Gaps:
    """Gaps as u16, and the new values, each compressed."""

    @staticmethod
    def encode(old, new):
        places = np.flatnonzero(old != new)
        # Unchanged elements before each change.
        gaps = np.diff(places, prepend=-1) - 1
        far = gaps // FAR
        # A change's own entry is the last of its entries.
        last = np.cumsum(far + 1) - 1
        entries = np.full(last[-1] + 1 if last.size else 0, FAR, "<u2")
        entries[last] = gaps % FAR
        return [compress(entries), compress(new[places])]

    @staticmethod
    def apply(coded, image):
        entries = decompress(coded[0], np.dtype("<u2"))
        is_change = entries != FAR
        ends = np.cumsum(entries + is_change.astype(np.int64))
        image[ends[is_change] - 1] = decompress(coded[1], image.dtype)


#: Every way, by its name in the rows.
WAYS = {
    "XOR + zstd-1": Xor,
    "int32 + value": Places,
    "u16 gap + value + zstd-1": Gaps,
}


def bytes_of(array):
    """The memory of an array, without a copy."""
    return memoryview(array).cast("B") if array.size else b""


def compress(array):
    return zstandard.ZstdCompressor(level=LEVEL).compress(bytes_of(array))


def decompress(compressed, dtype):
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(compressed), dtype)


if __name__ == "__main__":
    main()
