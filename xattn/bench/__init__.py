"""`python -m xattn bench`: how fast calls are on a device, by backend and configuration; `--tune` measures a table of
configurations anew."""

from __future__ import annotations

import argparse
import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import torch

from .. import dispatch, options, selftest, show
from ..backends import REGISTRY
from ..device import of as device_of
from . import timing, tune
from .cases import DTYPES, Case, Subject, quiet, subject

_SIZES = "--batch, --seqlen, --heads, --head-dim"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; several values of one give every combination."""
    several: dict[str, Any] = {"nargs": "+", "type": _count, "metavar": "N"}
    parser.add_argument("--batch", **several, help="default: as many sequences as make 16384 tokens, 256 on a CPU")
    parser.add_argument("--seqlen", **several, help="of q and k (default: 512 2048 8192; 128 on a CPU)")
    parser.add_argument("--heads", **several, help="of q (default: 2048 / head_dim; 2 on a CPU)")
    parser.add_argument("--heads-kv", **several, help="of k and v (default: as q)")
    parser.add_argument("--head-dim", **several, help="default: 64 128 256; 64 on a CPU")
    parser.add_argument("--dtype", nargs="+", choices=sorted(DTYPES), help="default: bf16")
    parser.add_argument("--mask", nargs="+", choices=("full", "causal"), help="default: both")
    parser.add_argument("--backend", nargs="+", help="default: the one that the plan chooses, and sdpa")
    parser.add_argument(
        "--set", nargs="+", metavar="NAME=VALUE", default=[], help="values of the configuration, as plans print them"
    )
    parser.add_argument("--rounds", type=_count, metavar="N", default=5, help="in random order, medians (default: 5)")
    parser.add_argument("--device", metavar="N|cpu", help="torch's number of a GPU, or cpu (default: the first GPU)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--tune", action="store_true", help="measure every row of the device's table, propose a table")
    parser.add_argument("--out", metavar="FILE", help="with --tune: where the proposal goes (default: tiles.json)")


def main(args: argparse.Namespace) -> int:
    """Times calls by each backend: medians of calls in random order, on a GPU replayed from graphs behind a flush of
    the L2 cache. Exit status 1: nothing could be timed."""
    place = selftest.device_of(args.device)
    settings = _settings(args.set)
    names = [b.name for b in REGISTRY]
    for name in args.backend or ():
        if name not in names:
            raise ValueError(f"--backend: got {name!r}; allowed: {', '.join(names)}")
    if args.out and not args.tune:
        raise ValueError("--out: got a file without --tune")
    if args.tune:
        given = vars(args)
        for name in ("batch", "seqlen", "heads", "heads_kv", "head_dim", "dtype", "mask", "backend", "set"):
            if given[name]:
                raise ValueError(f"--{name.replace('_', '-')}: got a value with --tune, which measures its own calls")
        return tune.main(place, Path(args.out or "tiles.json"), args.rounds, args.json)
    cases = _cases(args, place)
    results = []
    with quiet() if args.json else show.progress("timing", len(cases)) as done:
        for case in cases:
            found = measure(case, place, args.backend, settings, args.rounds)
            results += found
            done(case.label())
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        columns = ["call", "backend", "us", "TFLOP/s", "configuration"]
        show.table(f"{selftest.describe(place)}, torch {torch.__version__}", columns, [_row(r) for r in results])
    return 0 if any("us" in r for r in results) else 1


def measure(
    case: Case, place: torch.device, backends: list[str] | None, settings: dict[str, Any], rounds: int
) -> list[dict[str, Any]]:
    """One result for each backend: what it is, and "us" and "TFLOP/s", or "fault"."""
    results: dict[str, dict[str, Any]] = {}
    subjects: dict[str, Subject] = {}
    try:
        inputs = case.inputs(place)
    except RuntimeError as error:  # the memory does not hold them
        fault = str(error).splitlines()[0]
        return [{"call": case.label(), "backend": name, "fault": fault} for name in backends or ("none",)]
    problem, size, device = inputs.problem(), inputs.size_bucket(), device_of(place)
    if backends is None:
        first = dispatch.plan(problem, size, device).backend
        backends = list(dict.fromkeys(n for n in (first, "sdpa") if n))
    for name in backends:
        result = results[name] = {"call": case.label(), "backend": name}
        plan = dispatch.plan(problem, size, device, backend=name)
        if not plan.backend:
            result["fault"] = "; ".join(str(r) for _, refusals in plan.rejected for r in refusals)
            continue
        try:
            config = _with(plan.config, settings)
            call = subject(name, inputs, config)
            call()  # what cannot be compiled, loaded or launched is told beside the others' times
        except (RuntimeError, ValueError) as error:
            result["fault"] = str(error).partition("\n")[0]
            continue
        subjects[name], result["configuration"] = call, dict(config)
    for name, us in timing.medians(subjects, place, rounds).items():
        results[name] |= {"us": round(us, 2), "TFLOP/s": round(case.flops() / us * 1e-6, 3)}
    return list(results.values())


def _with(config: tuple[tuple[str, Any], ...], settings: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    unknown = settings.keys() - dict(config).keys()
    if unknown:
        names = ", ".join(n for n, _ in config) or "nothing to set"
        raise ValueError(f"--set: it has no {', '.join(sorted(unknown))}; it has {names}")
    return tuple((n, settings.get(n, value)) for n, value in config)


def _settings(given: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals or not value:
            raise ValueError(f"--set: got {text!r}; allowed: NAME=VALUE")
        words: dict[str, Any] = {"true": True, "false": False}
        number = int(value) if value.isascii() and value.isdigit() else value
        settings[name] = words.get(value.lower(), number)
    return settings


def _cases(args: argparse.Namespace, place: torch.device) -> list[Case]:
    gpu = place.type == "cuda"
    dims = args.head_dim or ([64, 128, 256] if gpu else [64])
    lengths = args.seqlen or ([512, 2048, 8192] if gpu else [128])
    cases = []
    for dtype, d, mask, n in product(args.dtype or ["bf16"], dims, args.mask or ["full", "causal"], lengths):
        for heads in args.heads or [max(1, 2048 // d) if gpu else 2]:
            for heads_kv in args.heads_kv or [heads]:
                if heads % heads_kv:
                    raise ValueError(f"--heads-kv: got {heads_kv}; allowed: divisors of {heads}, the heads of q")
                for batch in args.batch or [max(1, (16384 if gpu else 256) // n)]:
                    shape = (batch, n, heads, d)
                    if math.prod(shape) * torch.float32.itemsize > options.MOST:
                        raise ValueError(f"{_SIZES}: got a tensor of {shape}; allowed: less than 2^63 bytes")
                    cases.append(Case(batch, n, heads, heads_kv, d, dtype, mask == "causal"))
    return cases


def _row(result: dict[str, Any]) -> list[str]:
    if "fault" in result:
        return [result["call"], result["backend"], "", "", result["fault"]]
    config = ", ".join(f"{n} {v}" for n, v in result["configuration"].items() if n != "measured")
    return [result["call"], result["backend"], f"{result['us']:.1f}", f"{result['TFLOP/s']:.3g}", config]


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a number from 1 to 2147483647")
    return int(text)
