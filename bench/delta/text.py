"""Text that is on every machine with Python: the sources of its standard library."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

#: Folders that are no part of it, or not of every installation.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}

#: Words, runs of spaces, and what stands between.
PIECES = re.compile(r"\w+|[^\S\n]+|\n|[^\w\s]")


@cache
def sources() -> dict[str, str]:
    """The text of each module."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {path.relative_to(root): path for path in root.rglob("*.py")}
    return {
        ".".join(name.with_suffix("").parts): path.read_text(errors="replace")
        for name, path in sorted(files.items())
        if not LEFT_OUT.intersection(name.parts)
    }


class Vocabulary:
    """The most frequent pieces of the text, and bytes for all others."""

    BYTES = 256

    def __init__(self, text: str, size: int) -> None:
        pieces = Counter(piece for piece in PIECES.findall(text) if len(piece.encode()) > 1)
        # Of equally frequent ones the alphabet decides.
        ranked = sorted(pieces, key=lambda piece: (-pieces[piece], piece))
        frequent = ranked[: size - self.BYTES]
        self._ids = {piece: self.BYTES + rank for rank, piece in enumerate(frequent)}

    def tokens(self, text: str) -> torch.Tensor:
        """A text as numbers below the size."""
        ids: list[int] = []
        for piece in PIECES.findall(text):
            known = self._ids.get(piece)
            ids.extend(piece.encode(errors="replace") if known is None else [known])
        return torch.tensor(ids)


def explained() -> Iterator[tuple[str, str]]:
    """The full name of everything that has a docstring, as words, and the docstring's first
    paragraph."""
    for module, text in sources().items():
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        for name, node in _within(module, tree):
            paragraph = (ast.get_docstring(node) or "").split("\n\n")[0].split()
            if len(paragraph) > 3:
                yield " ".join(re.split(r"[._]+", name)), " ".join(paragraph)


def _within(
    name: str, node: ast.AST
) -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        yield name, node
    for child in getattr(node, "body", []):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from _within(f"{name}.{child.name}", child)
