"""Real versions of real models, for `cargo xtask bench delta`.

    python bench/delta FOLDER [--only TEXT]

A transformer language model is trained on Python's own sources, as they are on every machine, and
then on at several learning rates; all-MiniLM-L6-v2 is fine-tuned on the docstrings in them. Pairs of
consecutive versions, as a trainer would publish them, are written into FOLDER, a safetensors file
for each version, and `pairs.json` says what they are:

    [{"case": "transformer bf16, lr 1e-06, step 10 to 11", "old": FILE, "new": FILE}, …]

It is written last: a folder that has it is complete. Everything is seeded and runs in one thread, so
the same machine with the same Python makes the same bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import minilm
import torch
import transformer
from versions import Versions


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes pairs of versions of real models")
    parser.add_argument("folder", type=Path, help="where to; it must not have any yet")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    versions = Versions(args.folder)
    for model in (transformer, minilm):
        if args.only in model.NAME:
            model.make(versions)
    versions.finish()


if __name__ == "__main__":
    main()
