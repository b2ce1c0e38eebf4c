"""The command ``check``: the self-test of a device, as tables, or as a report that can be sent to somebody else."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from . import __version__, device, selftest, show
from .selftest import Finding, Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="N|cpu", help="torch's number of a GPU, or cpu (default: the first GPU)")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="print JSON, or write it into FILE beside the tables: versions, device, environment, and of each problem "
        "who answered, its error, what was allowed, its time and, where it failed, the traceback",
    )


def run(args: argparse.Namespace) -> int:
    """A self-test: what is there, and small problems on one device, each compared with the float64 reference. An error
    may be twice that of a plain torch computation in the same dtype, plus one rounding. Exit status 1: something
    FAILED."""
    place = selftest.device_of(args.device)
    target = Path(args.json) if args.json not in (None, "-") else None
    if target is not None:
        target.touch()  # a file that cannot be written to is an error before an hour of problems, not behind it
    printing = args.json != "-"
    start = time.perf_counter()
    findings, results = selftest.environment(), []
    if printing:
        show.table("environment", ["what", "state", ""], [[f.what, f.state, f.text] for f in findings])
        print(f"\ndevice under test: {selftest.describe(place)}")
    for case in selftest.CASES:
        results.append(selftest.run(case, place))
    findings.append(selftest.kernel_status(place))
    answer = report(place, findings, results, time.perf_counter() - start)
    text = json.dumps(answer, indent=1)
    if not printing:
        print(text)
        return 1 if answer["failed"] else 0
    columns = ["problem", "backend", "config", "error", "allowed", "first ms", "us", ""]
    show.table("problems", columns, [_row(r) for r in results])
    for r in results:
        if r.fault:
            print(f"\n{r.label}: {r.fault}")
    status = findings[-1]
    if status.state == selftest.FAILED:
        print(f"\n{status.what}: {status.text}")
    failed = ", ".join(answer["failed"])
    print(f"\n{len(results)} problems on {place}: " + (f"FAILED: {failed}" if failed else "all ok"))
    if target is not None:
        target.write_text(text + "\n")
        print(f"the report is in {target}")
    return 1 if failed else 0


def report(
    place: torch.device, findings: Sequence[Finding], results: Sequence[Result], seconds: float
) -> dict[str, Any]:
    """Everything that somebody without this machine wants to know, as JSON has it."""
    failed = [r.label for r in results if not r.ok]
    failed += [f.what for f in findings if f.state == selftest.FAILED]
    return {
        "device": str(place),
        "ok": not failed,
        "failed": failed,
        "seconds": seconds,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {
            "xattn": __version__,
            **device.versions_of_torch(torch),
            "python": sys.version.split()[0],
            "platform": platform.platform(),
        },
        "hardware": asdict(device.of(place)),
        "environment": [asdict(f) for f in findings],
        "problems": [asdict(r) for r in results],
    }


def _row(r: Result) -> list[str]:
    config = ", ".join(f"{name} {value}" for name, value in r.config)
    backend = f"{r.backend} (native)" if r.native else r.backend
    numbers = [f"{n:.2e}" if n is not None else "" for n in (r.error, r.allowed)]
    times = [f"{r.first_ms:.1f}" if r.first_ms is not None else "", f"{r.us:.0f}" if r.us is not None else ""]
    return [r.label, backend, config, *numbers, *times, "ok" if r.ok else "FAILED"]
