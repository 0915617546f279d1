"""The command ``weightsync``, which ``python -m weightsync`` is as well."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from weightsync import _native


def main() -> int:
    """Runs the command that the process's arguments name, and returns the exit status."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["doctor"]:
        return _doctor(arguments[1:])
    # Ctrl-C ends the command as it ends any other. Python's handler would only set a flag, which
    # is not looked at while Rust runs.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A worker of `bench` must import this package, and not another in the current directory.
    isolated = "-I" if sys.flags.isolated else "-P"
    itself = [sys.executable, isolated, "-m", "weightsync"]
    return _native.command(arguments, itself)


def _doctor(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="weightsync doctor",
        description="Reports whether the schemes for one machine work here, their limits, and "
        "what to change. The exit status is 0 if they work, else 1.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    try:
        chosen = parser.parse_args(arguments)
    except SystemExit as end:
        # It has written its help, or what is wrong.
        return _written("", int(end.code or 0))

    from weightsync import doctor

    return _written(*doctor.main(to_json=chosen.json))


def _written(text: str, status: int) -> int:
    """Writes what is left to be written, and returns the exit status."""
    try:
        print(text, end="\n" if text else "", flush=True)
        return status
    except OSError as error:
        # Python writes what is left at its end, and would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            # The reader has closed the pipe early, as `head` does.
            return status
        print(f"weightsync: standard output cannot be written: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
