"""The command line: info, explain, demo. Tables are drawn by rich where it is installed, and plain otherwise."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from . import settings

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "fp8": "float8_e4m3fn"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0 done, 1 a check failed or nothing answers, 2 wrong usage."""
    parser = _parser()
    args, unknown = parser.parse_known_args(_joined(sys.argv[1:] if argv is None else argv))
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        settings.log_level()  # raises where the variable is wrong
        status = args.run(args)
        sys.stdout.flush()
        return status
    except (ValueError, TypeError) as error:
        print(f"xattn {args.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough; what is still buffered must not fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


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
    parser = argparse.ArgumentParser(
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
    info.add_argument(
        "--matrix", action="store_true", help="print the support matrix of all architectures, as Markdown or JSON"
    )
    info.set_defaults(run=_info, parser=info)

    explain = commands.add_parser(
        "explain",
        help="which backend answers a call on a device, present or not, and why",
        description=_explain.__doc__,
    )
    explain.add_argument("--kind", default="attention", choices=("attention", "varlen", "paged"))
    explain.add_argument(
        "--q", type=_shape, required=True, metavar="B,S,H,D", help="shape of q: batch, seqlen, heads, head_dim"
    )
    explain.add_argument("--kv", type=_shape, metavar="B,S,H,D", help="shape of k and v (default: that of q)")
    explain.add_argument("--head-dim-v", type=_positive, metavar="D", help="head dimension of v (default: that of k)")
    explain.add_argument("--dtype", default="bf16", choices=sorted(_DTYPES), help="dtype of q, k, v (default: bf16)")
    explain.add_argument("--dtype-kv", choices=sorted(_DTYPES), help="dtype of k and v where it differs")
    explain.add_argument("--causal", action="store_true")
    explain.add_argument(
        "--window", type=_window, metavar="LEFT,RIGHT", help="distances; a side left empty is unbounded: 1023,"
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
    explain.add_argument("--page-size", type=_positive, default=64, metavar="N", help="for --kind paged (default: 64)")
    explain.add_argument("--device", metavar="ARCH", help="sm_90, gfx942, cpu, ...: default is the best device here")
    explain.add_argument("--backend", help="ask this backend only")
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.set_defaults(run=_explain, parser=explain)

    from . import demo

    run_demo = commands.add_parser(
        "demo", help="a real language model answers a prompt through xattn, and checks itself"
    )
    demo.add_arguments(run_demo)
    run_demo.set_defaults(run=demo.run, parser=run_demo)
    return parser


# ---------------------------------------------------------------- info
def _info(args: argparse.Namespace) -> int:
    """The GPUs and the CPU of this machine as far as this process may see them, and for each who answers what. No
    device context is created."""
    from . import __version__, support
    from .device import survey

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
    _table("devices", columns, [_device_row(n, d) for n, d in enumerate(found.devices)])
    for note in found.notes:
        print(f"note: {note}")
    heads = ["bf16, causal, head_dim 128 unless said", *(f"{n}: {d.arch}" for n, d in enumerate(found.devices))]
    table = [
        [label, *(f"{c.backend} (native)" if c.native else c.backend or "no" for c in cells)] for label, cells in rows
    ]
    _table("who answers", heads, table)
    return 0


def _device_row(number: int, d: Any) -> list[str]:
    shared = f"{d.smem_bytes // 1024} KiB" if d.smem_bytes else ""
    memory = f"{d.memory / 2**30:.1f} GiB" if d.memory else ""
    return [str(number), d.arch, d.name, str(d.sm_count or ""), str(d.warp_size), shared, memory, d.driver, d.runtime]


def _torch_version() -> str:
    import torch

    return torch.__version__


# ---------------------------------------------------------------- explain
def _explain(args: argparse.Namespace) -> int:
    """Which backend answers a call, how, and why not the others: for this machine's devices or any other, without
    making the call."""
    import torch

    from . import api, fusion

    dtype, dtype_kv = (getattr(torch, _DTYPES[name]) for name in (args.dtype, args.dtype_kv or args.dtype))
    batch, seqlen_q, heads, head_dim = args.q
    shape = args.kv or args.q
    if shape[0] != batch:
        raise ValueError(f"--kv: got batch {shape[0]}; allowed: that of --q, {batch}")
    if args.grad and args.kind == "paged":
        raise ValueError("--grad: attention over a paged cache has no gradient")
    head_dim_v = shape[3] if args.head_dim_v is None else args.head_dim_v

    def empty(*dims: int, of: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
        return torch.empty(*dims, dtype=of, device="meta", requires_grad=grad)

    ints = torch.int32
    options: dict[str, Any] = {
        "causal": args.causal,
        "window": args.window,
        "softcap": args.softcap,
        "dropout_p": args.dropout,
    }
    options |= {"return_lse": args.lse, "deterministic": args.deterministic or None, "backend": args.backend}
    options["alibi_slopes"] = empty(heads) if args.alibi else None
    options["sinks"] = empty(heads) if args.sinks else None
    options["score_mod"] = (lambda s, b, h, i, j: s) if args.score_mod else None
    options["mask_mod"] = (lambda b, h, i, j: i >= j) if args.mask_mod else None
    options["epilogue"] = fusion.Epilogue(lambda o, b, h, i, d: o) if args.epilogue else None
    if args.mask:
        dims = (batch * seqlen_q, seqlen_q) if args.kind == "paged" else (1, 1, seqlen_q, shape[1])
        options["attn_mask"] = empty(*dims, of=torch.bool if args.mask == "bool" else dtype)
    if args.kind == "paged":
        pages = -(-shape[1] // args.page_size)
        k, v = (empty(shape[0] * pages, args.page_size, shape[2], d, of=dtype_kv) for d in (shape[3], head_dim_v))
        q = empty(batch, seqlen_q, heads, head_dim, of=dtype)
        call: tuple[Any, ...] = (q, k, v, empty(batch, pages, of=ints), empty(batch, of=ints))
    else:
        q = empty(batch, seqlen_q, heads, head_dim, of=dtype, grad=args.grad)
        k, v = (empty(*shape[:3], d, of=dtype_kv, grad=args.grad) for d in (shape[3], head_dim_v))
        call = (q, k, v)
        if args.kind == "varlen":
            packed = tuple(t.flatten(0, 1) for t in call)
            call = (*packed, empty(batch + 1, of=ints), empty(batch + 1, of=ints), seqlen_q, shape[1])
    plan = api.explain(*call, kind=args.kind, device=args.device, **options)
    print(json.dumps(plan.as_dict(), indent=1) if args.json else plan)
    return 0 if plan.backend else 1


def _shape(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) != 4 or not all(p.strip().isdigit() for p in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r}: four whole numbers separated by commas: batch,seqlen,heads,head_dim"
        )
    return tuple(map(int, parts))


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1")
    return int(text)


def _window(text: str) -> tuple[int | None, int | None]:
    parts = [p.strip() for p in text.split(",")]
    if len(parts) != 2 or not all(p.isdigit() or not p for p in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r}: two distances from 0 separated by a comma; a side without bound is left empty (None in Python)"
        )
    left, right = (int(p) if p else None for p in parts)
    return left, right


# ---------------------------------------------------------------- printing
def _table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        _plain_table(title, columns, rows)
        return
    if not sys.stdout.isatty():
        _plain_table(title, columns, rows)
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*map(Text, row))  # no markup: a name may hold brackets
    Console().print(table)


def _plain_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(str(row[n])) for row in [columns, *rows]) for n in range(len(columns))]
    print(f"\n{title}")
    for row in [columns, ["-" * w for w in widths], *rows]:
        print("  " + "  ".join(str(cell).ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
