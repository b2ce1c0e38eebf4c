"""Dense attention on every target: a pairwise sample of what it admits, random combinations, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import cases
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st


@cases.parametrize("attention")
def test_case(target, case):
    cases.check(cases.make(case, target.device), target)


@pytest.mark.parametrize("kind", cases.VALUES)
@pytest.mark.parametrize("target", cases.targets(), ids=str)
@settings(max_examples=30, phases=[Phase.generate])
@given(data=st.data())
def test_any_combination(target, kind, data):
    able, _ = cases.values_for(kind, target)
    row = data.draw(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in able.items()}))
    cases.check(cases.make(replace(cases.BASE[kind], **row), target.device), target)
