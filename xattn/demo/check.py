"""Compares an answer through xattn with the same model's eager attention."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from .steps import Answer, Progress, Runner


@dataclass
class Verdict:
    """``agreeing`` of ``total`` tokens are the same. ``close``: others, where eager's two best logits are within
    ``tolerance`` of each other, so that rounding decides; the rest are wrong. ``where``: index of the first wrong one.
    """

    method: str
    total: int
    agreeing: int
    close: int = 0
    tolerance: float | None = None
    where: int | None = None

    @property
    def passed(self) -> bool:
        return self.where is None


def compare(runner: Runner, prompt: Tensor, answer: Answer, eager: Answer, progress: Progress) -> Verdict:
    """On the CPU in float32 both must give the same greedy tokens. Otherwise rounding may part them, and all that
    follows a parting differs: there xattn goes on with eager's tokens, and each choice is compared by itself."""
    if prompt.device.type == "cpu" and runner.language_model.model.dtype == torch.float32:
        return same_tokens(eager.tokens, answer.tokens)
    ours = runner.generate(prompt, len(eager.tokens), forced=eager.tokens, progress=progress)
    gap = eager.best[:, 0] - eager.best[:, 1]
    return same_choices(eager.tokens, ours.tokens, gap, 2 * _rounding(runner, prompt, eager))


def replayed(answer: Answer, graphs: Answer, eager: Verdict) -> Verdict:
    """Whether a captured step makes the choices of the same step run by Python, after the same tokens. Keys are split
    in other ways, so rounding may part them where the two best logits are as close as ``eager``, the comparison of
    those choices with eager attention, allows."""
    gap = answer.best[:, 0] - answer.best[:, 1]
    verdict = same_choices(answer.tokens, graphs.tokens, gap, eager.tolerance or 0.0)
    verdict.method = "best next token with graphs, after each token without"
    return verdict


def same_tokens(eager: list[int], ours: list[int]) -> Verdict:
    """Token by token; a missing one is wrong."""
    total = max(len(eager), len(ours))
    same = [a == b for a, b in zip(eager, ours, strict=False)] + [False] * abs(len(eager) - len(ours))
    where = same.index(False) if False in same else None
    return Verdict("greedy tokens, one by one", total, sum(same), where=where)


def same_choices(eager: list[int], ours: list[int], gap: Tensor, tolerance: float) -> Verdict:
    """Choices after the same tokens. ``gap`` (tokens,): between eager's two best logits."""
    differ = [i for i, (a, b) in enumerate(zip(eager, ours, strict=True)) if a != b]
    wrong = [i for i in differ if float(gap[i]) >= tolerance]
    method = "best next token after each of eager's tokens"
    where = wrong[0] if wrong else None
    return Verdict(method, len(eager), len(eager) - len(differ), len(differ) - len(wrong), tolerance, where)


@torch.no_grad()
def _rounding(runner: Runner, prompt: Tensor, eager: Answer) -> float:
    """How much rounding moves the gap between the two best logits in eager attention itself: the largest difference to
    the same model in the next wider dtype, over all tokens. xattn rounds in other places, by as much: two gaps, its own
    and eager's, may be off by this, so a tolerance is twice this."""
    model = runner.language_model.model
    wider = torch.float64 if model.dtype == torch.float32 else torch.float32
    model.set_attn_implementation("eager")
    exact = copy.deepcopy(model).to(wider)
    tokens = torch.cat([prompt, prompt.new_tensor([eager.tokens[:-1]])], 1)
    logits = exact(tokens, use_cache=False, logits_to_keep=len(eager.tokens)).logits[0]
    best = logits.gather(1, eager.best_ids).float()
    return float(((best[:, 0] - best[:, 1]) - (eager.best[:, 0] - eager.best[:, 1])).abs().max())
