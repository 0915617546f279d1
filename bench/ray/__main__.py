"""Actors of Ray and groups of torch.distributed: `cargo xtask bench ray`.

    PYTHONPATH=bench/common:bench/python python bench/ray [--json] [--only TEXT]

As `bench python`: ways to send take turns in one run, and medians are shown. A send ends when every
worker has the weights in its model. All workers are on this host. The workers of gloo receive into
one tensor, and load nothing.
"""

from __future__ import annotations

import argparse

import actors
import groups
from rows import show_all


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures Ray's actors and process groups")
    # Only the group that compares with Rust needs it.
    parser.add_argument("--weightsync", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    args = parser.parse_args()
    show_all([*actors.CASES, *groups.CASES], args.only, args.json)


if __name__ == "__main__":
    main()
