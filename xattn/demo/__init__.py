"""The demonstration: a real language model answers a prompt through xattn, and is checked against eager attention.

``model`` finds and loads the model, ``steps`` runs it, ``check`` compares, ``report`` prints. With --train the model
is fine-tuned instead: ``train`` runs that, ``curves`` compares and draws, ``train_report`` prints.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import FallbackWarning, UnsupportedError
from .arguments import DTYPES, DemoError, add_arguments, complete
from .report import Report

__all__ = ["DemoError", "NotCaptured", "add_arguments", "run"]

if TYPE_CHECKING:
    from torch import Tensor

    from .steps import Answer, Runner


class NotCaptured(Exception):
    """Why the model's step cannot be captured in a graph."""


def run(args: argparse.Namespace) -> int:
    """Runs the demo with the options of ``add_arguments``; returns the exit status."""
    try:
        complete(args)
        return _train(args) if args.train else _answer(args)
    except MemoryError as error:
        sizes = "--batch-size, --seqlen" if args.train else "--page-size, --max-new-tokens"
        print(f"xattn demo: {sizes}: {error}", file=sys.stderr)
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


def _answer(args: argparse.Namespace) -> int:
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


def _train(args: argparse.Namespace) -> int:
    try:
        import torch

        from .. import dispatch
        from . import curves, model, train
        from .train_report import TrainReport
    except ImportError as error:
        raise DemoError(f"{error}: pip install --upgrade 'xattn[demo]'") from error

    dispatch.check_name(args.backend)
    report = TrainReport(quiet=args.json)
    device = model.device(args.device)
    dtype = model.dtype(DTYPES.get(args.dtype or ""), device)
    report.device(device)
    language_model = model.load(args.model, device, torch.float32, report)
    report.model(language_model)
    settings = train.Settings(args.steps, args.batch_size, args.seqlen, args.learning_rate, dtype)
    trainer = train.Trainer(language_model, train.read_text(), settings, args.backend)
    report.settings(settings, train.TEXT, len(trainer.tokens))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # the report says it, once
        try:
            trainer.compute_exact(report.progress)
            ours = trainer.run(eager=False, progress=report.progress)
            report.run("xattn", ours, settings.tokens)
            report.served(ours)
            eager = trainer.run(eager=True, progress=report.progress)
        except RuntimeError as error:
            if not train.is_out_of_memory(error):
                raise
            raise MemoryError(str(error).splitlines()[0]) from error
    report.run("eager", eager, settings.tokens)
    agreement = curves.compare(ours, eager, dtype)
    try:
        curves.draw(Path(args.out), report.title(), ours, eager, agreement)
        report.drawn(Path(args.out))
    finally:  # what was found out is not lost with a disk that is full
        report.agreement(agreement)
        if args.json:
            print(json.dumps(report.data, indent=1))
    return 0 if agreement.passed else 1
