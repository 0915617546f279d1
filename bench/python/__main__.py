"""Python to Python: `cargo xtask bench python`.

    python bench/python --weightsync PATH [--json] [--only TEXT]

One process is the trainer, others are the workers. A send is timed from its call to its return,
which is when the version is live on every worker; the source is memory of the trainer's own and is
written again before each send, outside the timed part. Ways to send take turns in one run, each
with workers of its own, and with a memcpy of the same bytes between them. Medians, warm; the first
send is a row of its own. Workers do nothing with a version but hold it, unless a row says that
they read it. After the rounds each worker is asked whether it has the last values.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cases
from rows import show_all


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures weightsync from Python")
    parser.add_argument(
        "--weightsync", type=Path, required=True, help="the command line, for Rust's figures"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    args = parser.parse_args()
    show_all(cases.cases(args.weightsync), args.only, args.json)


if __name__ == "__main__":
    main()
