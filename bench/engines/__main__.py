"""vLLM's engines and extraction from sharded trainers: `cargo xtask bench engines`.

    PYTHONPATH=bench/common python bench/engines [--json] [--only TEXT]

The trainer and an ``LLM`` are on one host; the engine core is a process of its own. The baseline of
an update is a call of vLLM's own `load_weights` in that process, with vLLM's layerwise reload around
it and all tensors in memory. Updates and baseline take turns. Before each update 1.1 % of the bf16
elements change, most of them by one ULP, as in a step of reinforcement learning. Medians, warm.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback

import engines
import extraction
from rows import Printer


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures updates of engines, and extraction")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    args = parser.parse_args()
    show = Printer(args.json)
    failed = []
    for case in (*engines.CASES, *extraction.CASES):
        if args.only in case.name:
            try:
                for row in case.rows():
                    show(row)
            except Exception:
                # The others are measured all the same.
                traceback.print_exc()
                failed.append(case.name)
    if failed:
        print(f"no figures for {'; '.join(failed)}", file=sys.stderr, flush=True)
    # Threads of other packages do not all end when something has failed.
    sys.stdout.flush()
    os._exit(1 if failed else 0)


if __name__ == "__main__":
    main()
