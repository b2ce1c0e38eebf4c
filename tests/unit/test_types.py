"""What a type checker knows of the public functions."""

from __future__ import annotations

import inspect

import pytest
from mypy import api as mypy

import xattn
from xattn import distributed, keywords

OPTIONS = {
    "attention": keywords.Dense,
    "attention_varlen": keywords.Dense,
    "attention_paged": keywords.Paged,
}
CALLS = {
    "attention": "q, q, q",
    "attention_varlen": "q, q, q, q, q, 1, 1",
    "attention_paged": "q, q, q, q, q",
    "context_parallel": "q, q, q",
}


def as_written(kind: type) -> dict[str, str]:
    """The annotations of a TypedDict, those of its bases included."""
    return {name: a.__forward_arg__ for name, a in kind.__annotations__.items()}


def options_of(name: str) -> dict[str, str]:
    found = inspect.signature(getattr(xattn, name)).parameters.values()
    return {p.name: p.annotation for p in found if p.kind == p.KEYWORD_ONLY and p.name != "return_lse"}


@pytest.mark.parametrize("name", OPTIONS)
def test_overloads_have_every_option(name):
    assert as_written(OPTIONS[name]) == options_of(name)


def test_overloads_have_every_option_of_shards():
    wanted = {n: a for n, a in options_of("attention").items() if n not in distributed._REFUSED}
    assert as_written(keywords.Shards) == wanted


def test_the_result_follows_return_lse(tmp_path):
    """As users' checkers see it: strict, and without a plugin."""
    lines = ["import torch, xattn", "", "q = torch.zeros(1)", "flag = bool(q)"]
    wanted = []
    for name, arguments in CALLS.items():
        for option, kind in (
            ("", "torch._tensor.Tensor"),
            (", return_lse=False", "torch._tensor.Tensor"),
            (", return_lse=True", "tuple[torch._tensor.Tensor, torch._tensor.Tensor]"),
            (", return_lse=flag", "torch._tensor.Tensor | tuple[torch._tensor.Tensor, torch._tensor.Tensor]"),
            (", causal=True, softcap=30.0, return_lse=True", "tuple[torch._tensor.Tensor, torch._tensor.Tensor]"),
        ):
            lines.append(f"reveal_type(xattn.{name}({arguments}{option}))")
            wanted.append(f'{len(lines)}: note: Revealed type is "{kind}"')
        lines.append(f"xattn.{name}({arguments}, casual=True)")
        wanted.append(f'{len(lines)}: error: No overload variant of "{name}" matches argument types')
        lines.append(f'xattn.{name}({arguments}, causal="yes")')
        wanted.append(f'{len(lines)}: error: No overload variant of "{name}" matches argument types')
    path = tmp_path / "calls.py"
    path.write_text("\n".join(lines) + "\n")
    out, err, _ = mypy.run([str(path), "--strict", "--no-incremental", "--config-file=", "--cache-dir=/dev/null"])
    assert not err, err
    said = [line for line in out.splitlines() if line.startswith(str(path)) and "note: " not in line]
    said += [line for line in out.splitlines() if "Revealed type" in line]
    for line in wanted:
        assert any(f"calls.py:{line}" in s for s in said), (line, out)
