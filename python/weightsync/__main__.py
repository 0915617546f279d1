"""``python -m weightsync``."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys


def main(arguments: list[str] | None = None) -> int:
    """Runs the command that the arguments name, and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m weightsync",
        description="Moves a model's weights from the trainer to every worker that runs it.",
    )
    version = importlib.metadata.version("weightsync")
    parser.add_argument("--version", action="version", version=f"weightsync {version}")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine can do, and what to change",
        description="Says what this machine can do and what to change. The exit status is 0 if "
        "the schemes for one machine work here, else 1.",
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of text")
    chosen = parser.parse_args(arguments)

    from weightsync import doctor as weightsync_doctor

    return weightsync_doctor.main(to_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
