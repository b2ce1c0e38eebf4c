"""The generated cases of tests/cases.py, through emulated backends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import cases
import pytest

# Every image is compiled by the host's compiler: head dimensions of three padded sizes, one of them with a ragged end.
HEAD_DIMS = [(16, 16), (64, 64), (72, 40)]


def check_all(found: Iterable[cases.Case], target: cases.Target) -> int:
    """Checks each, names the one that fails, and counts them."""
    done = 0
    for case in found:
        try:
            cases.check(cases.make(case, "cpu"), target)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
        done += 1
    return done


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["attention", "varlen", "paged"])
def test_generated_cases(target, kind):
    able, _ = cases.values_for(kind, target)
    able = able | {"head_dims": HEAD_DIMS, "heads": [(2, 1), (1, 3), (1, 12)] if kind == "paged" else [(2, 1), (1, 3)]}
    # test_backward.py and test_user_functions_in_kernels.py ask for these: each has images of its own.
    able |= {name: [""] for name in ("grads", "score_mod", "mask_mod")}
    base = cases._base(kind, target)
    assert base is not None
    assert check_all((replace(base, **row) for row in cases.pairwise(able)), target) > 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_generated_cases_of_fp8_caches(target):
    values = {"heads": [(2, 1), (1, 3), (1, 12)], "head_dims": [(16, 16), (64, 64), (48, 80)]}
    assert check_all(cases.of_fp8("paged", target, **values), target) > 40
