"""The command line: info, explain, check, bench, build, demo."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

from . import options, settings, show

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "fp8": "float8_e4m3fn"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0 done, 1 a check failed or nothing answers, 2 wrong usage, or the
    output cannot be written."""
    if sys.stderr is None:  # closed: what belongs there must not go to stdout
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        return _wrong("xattn: stdout is closed; allowed: one that can be written to")
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:  # also of what argparse has printed
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        _discard(sys.stdout)
        return 0
    except OSError as error:
        _discard(sys.stdout)
        return _wrong(f"xattn: stdout cannot be written to: {error.strerror or error}")
    finally:
        try:
            sys.stderr.flush()
        except OSError:  # nobody can be told: the status says it alone
            _discard(sys.stderr)


def _run(argv: Sequence[str]) -> int:
    parser = _parser()
    args, unknown = parser.parse_known_args(_joined(argv))
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        _check_settings()
        return args.run(args)
    except (ValueError, TypeError) as error:
        return _wrong(f"xattn {args.command}: {error}")
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stdout.flush()  # raises again where it was stdout
        return _wrong(f"xattn {args.command}: {error}")


def _wrong(text: str) -> int:
    """Exit status 2, and why."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)
    return 2


def _discard(stream: TextIO) -> None:
    """What is still buffered must not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _Parser(argparse.ArgumentParser):
    """One that raises where help cannot be written."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)


def _check_settings() -> None:
    """Raises where an environment variable is wrong, also one that the command does not need."""
    from . import build

    settings.check()
    build.check_settings()


def _joined(argv: Sequence[str]) -> list[str]:
    """ "--window -1,0" as one word: argparse would take the second for an option."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] == "--window":
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _parser() -> argparse.ArgumentParser:
    variables = "\n".join(f"  {name:<18}{text}" for name, text in settings.VARIABLES.items())
    parser = _Parser(
        prog="python -m xattn",
        description="One attention API for fleets that mix NVIDIA and AMD GPUs.",
        epilog=f"environment variables:\n{variables}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    from . import __version__

    parser.add_argument("--version", action="version", version=f"xattn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    info = commands.add_parser(
        "info", help="the devices of this machine, and what each can do", description=_info.__doc__
    )
    info.add_argument("--json", action="store_true", help="print JSON")
    only = info.add_mutually_exclusive_group()
    only.add_argument(
        "--matrix", action="store_true", help="print the support matrix of all architectures, as Markdown or JSON"
    )
    only.add_argument(
        "--images", action="store_true", help="list the kernel images of the wheel and of the user's cache"
    )
    info.set_defaults(run=_info)

    explain = commands.add_parser(
        "explain",
        help="which backend answers a call on a device, present or not, and why",
        description=_explain.__doc__,
    )
    explain.add_argument("--kind", default="attention", choices=("attention", "varlen", "paged"))
    explain.add_argument(
        "--q", type=options.shape, required=True, metavar="B,S,H,D", help="shape of q: batch, seqlen, heads, head_dim"
    )
    explain.add_argument("--kv", type=options.shape, metavar="B,S,H,D", help="shape of k and v (default: that of q)")
    explain.add_argument(
        "--head-dim-v", type=options.positive, metavar="D", help="head dimension of v (default: that of k)"
    )
    explain.add_argument("--dtype", default="bf16", choices=sorted(_DTYPES), help="dtype of q, k, v (default: bf16)")
    explain.add_argument("--dtype-kv", choices=sorted(_DTYPES), help="dtype of k and v where it differs")
    explain.add_argument("--causal", action="store_true")
    explain.add_argument(
        "--window", type=options.window, metavar="LEFT,RIGHT", help="distances; a side left empty is unbounded: 1023,"
    )
    explain.add_argument("--softcap", type=float, default=0.0)
    explain.add_argument("--alibi", action="store_true", help="with ALiBi slopes")
    explain.add_argument("--sinks", action="store_true", help="with attention sinks")
    explain.add_argument(
        "--mask",
        choices=("bool", "added"),
        help="with an attn_mask of (1, 1, seqlen_q, seqlen_k); a tree mask over the new tokens where paged",
    )
    explain.add_argument("--dropout", type=float, default=0.0, metavar="P")
    explain.add_argument("--score-mod", action="store_true", help="with a user's score_mod")
    explain.add_argument("--mask-mod", action="store_true", help="with a user's mask_mod")
    explain.add_argument("--epilogue", action="store_true", help="with a user's epilogue")
    explain.add_argument("--grad", action="store_true", help="with gradients of q, k, v")
    explain.add_argument("--deterministic", action="store_true", help="with a bitwise reproducible backward")
    explain.add_argument("--lse", action="store_true", help="with lse returned")
    explain.add_argument(
        "--page-size", type=options.positive, metavar="N", help="tokens of a page, for --kind paged (default: 64)"
    )
    explain.add_argument("--device", metavar="ARCH", help="sm_90, gfx942, cpu, ...: default is the best device here")
    explain.add_argument("--backend", help="ask this backend only")
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.set_defaults(run=_explain)

    from . import bench, build, check, demo

    run_check = commands.add_parser(
        "check", help="a self-test: small problems on one device, against float64", description=check.run.__doc__
    )
    check.add_arguments(run_check)
    run_check.set_defaults(run=check.run)
    run_build = commands.add_parser(
        "build", help="compile kernel images ahead of time into a folder", description=build.run.__doc__
    )
    build.add_arguments(run_build)
    run_bench = commands.add_parser("bench", help="how fast calls are on a device", description=bench.main.__doc__)
    bench.add_arguments(run_bench)
    run_bench.set_defaults(run=bench.main)
    run_demo = commands.add_parser(
        "demo", help="a real language model answers a prompt through xattn, and checks itself"
    )
    demo.add_arguments(run_demo)
    run_demo.set_defaults(run=demo.run)
    for command in commands.choices.values():
        command.set_defaults(parser=command)  # whose usage an error shows
    return parser


# ---------------------------------------------------------------- info
def _info(args: argparse.Namespace) -> int:
    """The GPUs and the CPU of this machine as far as this process may see them, and for each who answers what. No
    device context is created."""
    from . import __version__, support
    from .device import survey

    if args.images:
        return _list_images(args)
    if args.matrix:
        print(json.dumps(support.as_dict(), indent=1) if args.json else support.markdown())
        return 0
    found = survey()
    rows = support.matrix(found.devices)
    if args.json:
        answer = {
            "xattn": __version__,
            "torch": _torch_version(),
            "devices": [asdict(d) for d in found.devices],
            "notes": list(found.notes),
            "support": {label: [c.as_dict() for c in cells] for label, cells in rows},
        }
        print(json.dumps(answer, indent=1))
        return 0
    print(f"xattn {__version__}, torch {_torch_version()}")
    columns = ["device", "arch", "name", "SMs/CUs", "warp", "shared memory", "memory", "driver", "runtime"]
    show.table("devices", columns, [_device_row(n, d) for n, d in enumerate(found.devices)])
    for note in found.notes:
        print(f"note: {note}")
    heads = ["bf16, causal, head_dim 128 unless said", *(f"{n}: {d.arch}" for n, d in enumerate(found.devices))]
    table = [
        [label, *(f"{c.backend} (native)" if c.native else c.backend or "no" for c in cells)] for label, cells in rows
    ]
    show.table("who answers", heads, table)
    return 0


def _device_row(number: int, d: Any) -> list[str]:
    shared = f"{d.smem_bytes // 1024} KiB" if d.smem_bytes else ""
    memory = f"{d.memory / 2**30:.1f} GiB" if d.memory else ""
    return [str(number), d.arch, d.name, str(d.sm_count or ""), str(d.warp_size), shared, memory, d.driver, d.runtime]


def _list_images(args: argparse.Namespace) -> int:
    """``info --images``: every file of the store, broken ones too."""
    from .images import Store

    store, now = Store(), time.time()
    files = list(store.files())
    totals: dict[str, dict[str, Any]] = {
        place: {"folders": [str(f) for f in folders], "images": 0, "broken": 0, "size": 0}
        for place, folders in (("wheel", store.shipped), ("cache", (store.cache,)))
    }
    entries: list[dict[str, Any]] = []
    for f in files:
        totals[f.place]["size"] += f.size
        totals[f.place]["images" if f.image else "broken"] += 1
        entry = {"place": f.place, "path": str(f.path), "size": f.size, "age_seconds": now - f.modified}
        if f.image is None:
            entry["broken"] = f.fault
        else:
            entry |= {name: getattr(f.image, name) for name in ("arch", "kind", "name", "compiler", "key")}
        entries.append(entry)
    if args.json:
        print(json.dumps({"totals": totals, "images": entries}, indent=1))
        return 0
    columns = ["where", "arch", "kind", "kernel", "compiler", "size", "age", "file"]
    rows = []
    for f in files:
        if f.image is None:
            about = [f.path.parent.name, "broken", f.fault.removeprefix(f"{f.path}: "), ""]
        else:
            about = [f.image.arch, f.image.kind, f.image.words(), f.image.compiler]
        rows.append([f.place, *about, show.size(f.size), show.age(now - f.modified), f.path.name])
    if rows:
        show.table("images", columns, rows)
    for place, t in totals.items():
        broken = f", {t['broken']} broken" if t["broken"] else ""
        print(f"{place}: {t['images']} images{broken}, {show.size(t['size'])}, in {', '.join(t['folders'])}")
    return 0


def _torch_version() -> str:
    import torch

    return torch.__version__


# ---------------------------------------------------------------- explain
def _explain(args: argparse.Namespace) -> int:
    """Which backend answers a call, how, and why not the others: for this machine's devices or any other, without
    making the call."""
    import torch

    from . import fusion, questions

    dtype, dtype_kv = (getattr(torch, _DTYPES[name]) for name in (args.dtype, args.dtype_kv or args.dtype))
    batch, seqlen_q, heads, _ = args.q
    shape = args.kv or args.q
    if shape[0] != batch:
        raise ValueError(f"--kv: got batch {shape[0]}; allowed: that of --q, {batch}")
    if args.grad and args.kind == "paged":
        raise ValueError("--grad: attention over a paged cache has no gradient")
    if args.page_size and args.kind != "paged":
        raise ValueError(f"--page-size: got {args.page_size} for --kind {args.kind}; allowed: --kind paged")
    head_dim_v = shape[3] if args.head_dim_v is None else args.head_dim_v
    k_option = "--kv" if args.kv else "--q"
    v_option = "--head-dim-v" if args.head_dim_v else k_option

    def empty(option: str, *dims: int, of: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
        if math.prod(max(1, n) for n in dims) * of.itemsize > options.MOST:
            raise ValueError(f"{option}: got a tensor of {dims}; allowed: less than 2^63 bytes")
        return torch.empty(*dims, dtype=of, device="meta", requires_grad=grad)

    ints = torch.int32
    given: dict[str, Any] = {
        "causal": args.causal,
        "window": args.window,
        "softcap": args.softcap,
        "dropout_p": args.dropout,
    }
    given |= {"return_lse": args.lse, "deterministic": args.deterministic or None, "backend": args.backend}
    given["alibi_slopes"] = empty("--q", heads) if args.alibi else None
    given["sinks"] = empty("--q", heads) if args.sinks else None
    given["score_mod"] = (lambda s, b, h, i, j: s) if args.score_mod else None
    given["mask_mod"] = (lambda b, h, i, j: i >= j) if args.mask_mod else None
    given["epilogue"] = fusion.Epilogue(lambda o, b, h, i, d: o) if args.epilogue else None
    if args.mask:
        dims = (batch * seqlen_q, seqlen_q) if args.kind == "paged" else (1, 1, seqlen_q, shape[1])
        given["attn_mask"] = empty("--mask", *dims, of=torch.bool if args.mask == "bool" else dtype)
    if args.kind == "paged":
        page_size = args.page_size or 64
        pages = -(-shape[1] // page_size)
        if page_size > shape[1]:  # rounding up has made them large, if anything
            k_option = v_option = "--page-size"
        page = (batch * pages, page_size, shape[2])
        q = empty("--q", *args.q, of=dtype)
        k, v = empty(k_option, *page, shape[3], of=dtype_kv), empty(v_option, *page, head_dim_v, of=dtype_kv)
        call: tuple[Any, ...] = (q, k, v, empty(k_option, batch, pages, of=ints), empty("--q", batch, of=ints))
    else:
        q = empty("--q", *args.q, of=dtype, grad=args.grad)
        k = empty(k_option, *shape, of=dtype_kv, grad=args.grad)
        v = empty(v_option, *shape[:3], head_dim_v, of=dtype_kv, grad=args.grad)
        call = (q, k, v)
        if args.kind == "varlen":
            packed = tuple(t.flatten(0, 1) for t in call)
            offsets = empty("--q", batch + 1, of=ints)
            call = (*packed, offsets, offsets, seqlen_q, shape[1])
    plan = questions.explain(*call, kind=args.kind, device=args.device, **given)
    print(json.dumps(plan.as_dict(), indent=1) if args.json else plan)
    return 0 if plan.backend else 1
