"""Packed sequences on every target."""

from __future__ import annotations

import cases


@cases.parametrize("varlen")
def test_case(target, case):
    cases.check(cases.make(case, target.device), target)
