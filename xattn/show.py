"""What commands print: tables and progress, drawn by rich where it is installed and the output is a terminal, plain
otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table with a title above it."""
    if not _is_drawn():
        _plain_table(title, columns, rows)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=title, title_justify="left")
    for column in columns:
        drawn.add_column(column)
    for row in rows:
        drawn.add_row(*map(Text, row))  # no markup: a name may hold brackets
    Console().print(drawn)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[str], Any]]:
    """Gives a function that tells of one more step done, in words: a bar that moves, or a line for each step."""
    if not _is_drawn():
        done = iter(range(1, total + 1))
        width = len(str(total))
        yield lambda text: print(f"[{next(done):>{width}}/{total}] {text}", flush=True)
        return
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.fields[what]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}")) as bar:
        task = bar.add_task("", total=total, what=what)
        yield lambda text: bar.update(task, advance=1, description=escape(text))


def size(count: int) -> str:
    """Bytes for people: "64.2 KiB"."""
    number = float(count)
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{count} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def age(seconds: float) -> str:
    """How long ago, in the largest unit that fits: "3 h"."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def _is_drawn() -> bool:
    if not sys.stdout.isatty():
        return False
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


def _plain_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(str(row[n])) for row in [columns, *rows]) for n in range(len(columns))]
    print(f"\n{title}")
    for row in [columns, ["-" * w for w in widths], *rows]:
        print("  " + "  ".join(str(cell).ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
