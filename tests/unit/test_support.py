"""The support matrix: the README holds what the planner says, and no machine changes it; and it names what is there."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest

import xattn
from xattn import cli, support
from xattn.backends import REGISTRY, base
from xattn.device import Device, from_arch

README = Path(__file__).parents[2] / "README.md"
START, END = "<!-- matrix -->", "<!-- /matrix -->"


def test_readme_holds_the_matrix():
    text = README.read_text()
    assert text.count(START) == text.count(END) == 1
    held = text.split(START)[1].split(END)[0].strip()
    how = f"README.md is not up to date: put what `python -m xattn info --matrix` prints between {START} and {END}"
    assert held == support.markdown(), how


def test_every_cell_names_a_backend():
    native = {b.name: b.native for b in REGISTRY}
    rows = support.matrix([from_arch(arch) for arch in support.ARCHS])
    assert [label for label, _ in rows] == [label for label, _ in support.ROWS]
    for label, cells in rows:
        assert len(cells) == len(support.ARCHS)
        for arch, cell in zip(support.ARCHS, cells, strict=True):
            assert cell.backend in native, f"{label} on {arch}: nobody answers"
            assert cell.native == native[cell.backend], f"{label} on {arch}"


def test_labels_and_problems_are_all_different():
    labels, problems = zip(*support.ROWS, strict=True)
    assert len(set(labels)) == len(labels)
    assert len(set(problems)) == len(problems)


def test_matrix_is_the_same_on_any_machine(monkeypatch):
    """Neither what is installed, nor the environment, nor the devices that are there change it."""
    before = support.markdown()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    monkeypatch.setattr("xattn.capability.find_spec", lambda name, package=None: None)
    monkeypatch.setattr("xattn.device.detect", lambda: pytest.fail("asked for the devices of this machine"))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert support.markdown() == before


def test_a_backend_given_up_here_does_not_change_what_is_said_of_others(monkeypatch):
    before, here = support.markdown(), replace(from_arch("sm_90"), index=0)
    window = dict(support.ROWS)["window"]
    answers = dict(_first_cells(here))["window"].backend
    monkeypatch.setattr(base, "_unavailable", {(answers, window, here): "does not work here"})
    assert support.markdown() == before
    assert dict(_first_cells(here))["window"].backend != answers


def _first_cells(device: Device):
    return [(label, cells[0]) for label, cells in support.matrix([device])]


def test_unknown_devices_are_answered():
    for device in (from_arch("sm_130"), from_arch("gfx1300"), Device("other", "mps")):
        assert all(cell.backend for _, cell in _first_cells(device)), device


def test_markdown_form():
    lines = support.markdown().splitlines()
    assert len({line.count("|") for line in lines}) == 1, "rows of different widths"
    assert lines[0].split(" | ")[1:] == [*support.ARCHS[:-1], f"{support.ARCHS[-1]} |"]
    assert str(support.Cell("sm90", True)) == "**sm90**"
    assert str(support.Cell("sdpa", False)) == "sdpa"
    assert str(support.Cell("", False)) == "no"


def test_window_is_answered_by_flex_on_gpus_without_natives():
    """A sample of the table, written out: what the fallbacks answer, in the order in which they are asked."""
    rows = dict(_first_cells(from_arch("gfx1300")))
    wanted = {"bf16": "sdpa", "window": "flex", "softcap": "flex", "sinks": "reference", "lse": "reference"}
    assert {label: rows[label].backend for label in wanted} == wanted


def test_readme_names_what_is_there():
    """Every function, class and command; what comes later is said to, and is not there."""
    text = README.read_text()
    absent = [n for later in re.findall(r"Later: (.*?)\.", text, re.DOTALL) for n in re.findall(r"`(\w+)`", later)]
    assert not [n for n in absent if hasattr(xattn, n) or importlib.util.find_spec(f"xattn.compat.{n}")]
    named = set(re.findall(r"\bxattn\.(\w+)", text))
    assert len(named) > 5 and all(hasattr(xattn, n) for n in named), named
    parser = next(a for a in cli._parser()._actions if hasattr(a, "choices") and a.choices)
    commands = set(re.findall(r"python -m xattn (\w+)", text))
    assert commands == set(parser.choices), commands
