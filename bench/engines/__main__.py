"""vLLM's engines and extraction from sharded trainers: `cargo xtask bench engines`.

    PYTHONPATH=bench/common python bench/engines [--json] [--only TEXT]

The trainer and an ``LLM`` are on one host; the engine core is a process of its own. The baseline of
an update is a call of vLLM's own `load_weights` in that process, with vLLM's layerwise reload around
it and all tensors in memory. Updates and baseline take turns. Before each update 1.1 % of the bf16
elements change, most of them by one ULP, as in a step of reinforcement learning. Medians, warm.
"""

from __future__ import annotations

import argparse

import engines
import extraction
from rows import show_all


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures updates of engines, and extraction")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    args = parser.parse_args()
    show_all([*engines.CASES, *extraction.CASES], args.only, args.json)


if __name__ == "__main__":
    main()
