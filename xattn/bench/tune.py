"""A table of configurations measured anew: which row is the fastest from which length on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .. import device, forward_call, selftest, show
from ..backends import sm90
from . import timing
from .cases import Case, quiet, subject

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
Figures = Mapping[int, Mapping[str, float]]  # TFLOP/s by length, then by row


def main(place: torch.device, out: Path, rounds: int, as_json: bool) -> int:
    """Measures every row of sm90's table on a GPU of Hopper, prints the figures and writes the proposal."""
    at = device.of(place)
    if at.arch != "sm_90":
        raise ValueError(f"--tune: got {at.arch}; allowed: sm_90, whose backend has a table of configurations")
    if not out.parent.is_dir():
        raise ValueError(f"--out: got {out}; allowed: a file in a folder that exists")
    table = [(d, causal) for d in sorted({row.largest for row in sm90.TILES}) for causal in (False, True)]
    proposal: list[dict[str, Any]] = []
    with quiet() if as_json else show.progress("timing", len(table) * len(LENGTHS)) as done:
        for head_dim, causal in table:
            figures = {}
            for n in LENGTHS:
                heads = max(1, 2048 // head_dim)
                case = Case(max(1, 16384 // n), n, heads, heads, head_dim, "bf16", causal)
                figures[n] = _figures(case, place, rounds)
                done(case.label())
            proposal += propose(head_dim, causal, figures)
    out.write_text(json.dumps({"device": at.name, "torch": torch.__version__, "rows": proposal}, indent=2) + "\n")
    if as_json:
        print(json.dumps(proposal, indent=2))
    else:
        columns = ["head_dim", "mask", "row", "fastest from", "now from", *map(str, LENGTHS)]
        show.table(f"{selftest.describe(place)}: TFLOP/s by length", columns, [_row(r) for r in proposal])
        print(f"written: {out}")
    return 0


def _figures(case: Case, place: torch.device, rounds: int) -> dict[str, float]:
    inputs = case.inputs(place)
    calls: dict[str, Callable[[], Any]] = {}
    for row in sm90.rows(case.head_dim, case.head_dim):
        sizes = row.sizes(case.head_dim, case.head_dim)
        calls[name(row)] = subject("sm90", inputs, forward_call.plan_config(sizes, inputs.problem()))
    return {n: case.flops() / us * 1e-6 for n, us in timing.medians(calls, place, rounds).items()}


def name(row: sm90.Tile) -> str:
    """A row in short."""
    return f"{row.num_warpgroups} warpgroups, {row.tile_n} keys"


def propose(head_dim: int, causal: bool, figures: Figures) -> list[dict[str, Any]]:
    """For each row: the least length from which on it is the fastest at every length measured, None where there is
    none. The last row of a head dimension serves what is left."""
    rows = sm90.rows(head_dim, head_dim)
    found = []
    for row in rows:
        least = None
        for n in sorted(figures, reverse=True):
            if figures[n][name(row)] < max(figures[n].values()):
                break
            least = n
        found.append(
            {
                "head_dim": head_dim,
                "causal": causal,
                "row": name(row),
                "least": 0 if row is rows[-1] else least,
                "now": row.least[causal],
                "figures": {str(n): round(figures[n][name(row)], 1) for n in sorted(figures)},
            }
        )
    return found


def _row(result: Mapping[str, Any]) -> list[str]:
    least, now = ("never" if result[n] is None else str(result[n]) for n in ("least", "now"))
    figures = [f"{x:.0f}" for x in result["figures"].values()]
    return [str(result["head_dim"]), "causal" if result["causal"] else "full", result["row"], least, now, *figures]
