"""The command line: what it prints, how it ends, and that it needs nothing that may be absent."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import xattn
from xattn import cli, settings, support
from xattn.backends import REGISTRY
from xattn.device import from_arch

ROOT = str(Path(xattn.__file__).parent.parent)
Q = ("--q", "2,1024,32,128", "--kv", "2,1024,8,128")


def run(*args: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own."""
    path = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": ""}
    return subprocess.run([sys.executable, *args], env=env, stdout=stdout, stderr=subprocess.PIPE, text=True)


def usage_error(capsys, *args: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    assert ended.value.code == 2
    return capsys.readouterr().err


def explained(capsys, *args: str) -> dict:
    """The JSON of ``explain``; whether a backend answers decides the exit status."""
    status = cli.main(["explain", *args, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert status == (0 if answer["backend"] else 1)
    return answer


# ---------------------------------------------------------------- info
def test_info(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"xattn {xattn.__version__}, torch {torch.__version__}" in text
    for device in xattn.devices():
        assert device.arch in text and device.name in text
    assert all(label in text for label, _ in support.ROWS)


def test_info_json(capsys):
    assert cli.main(["info", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["xattn"], answer["torch"]) == (xattn.__version__, torch.__version__)
    assert [(d["vendor"], d["arch"]) for d in answer["devices"]] == [(d.vendor, d.arch) for d in xattn.devices()]
    assert answer["devices"][-1]["vendor"] == "cpu"
    assert all(isinstance(note, str) for note in answer["notes"])
    assert list(answer["support"]) == [label for label, _ in support.ROWS]
    names = {b.name for b in REGISTRY}
    for cells in answer["support"].values():
        assert len(cells) == len(answer["devices"])
        assert all(set(c) == {"backend", "native"} and c["backend"] in names for c in cells)


def test_info_matrix(capsys):
    assert cli.main(["info", "--matrix"]) == 0
    assert capsys.readouterr().out == support.markdown() + "\n"


def test_info_matrix_json(capsys):
    assert cli.main(["info", "--matrix", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["archs"] == list(support.ARCHS) and list(answer["support"]) == [label for label, _ in support.ROWS]
    assert all(len(cells) == len(support.ARCHS) for cells in answer["support"].values())
    assert answer["support"]["bf16"][-1] == {"backend": "sdpa", "native": False}


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"xattn {xattn.__version__}\n"


@pytest.mark.parametrize("command", [("info",), ("explain", *Q), ("demo",)], ids=lambda c: c[0])
def test_unknown_options_print_the_usage_of_the_command(capsys, command):
    text = usage_error(capsys, *command, "--nosuch")
    assert text.startswith(f"usage: python -m xattn {command[0]} ") and "unrecognized arguments: --nosuch" in text


def test_a_wrong_log_level(monkeypatch):
    """One line, whoever starts it."""
    monkeypatch.setenv("XATTN_LOG_LEVEL", "LOUD")
    done = run("-m", "xattn", "info")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("xattn info: XATTN_LOG_LEVEL is 'LOUD'; allowed: DEBUG")
    done = run("-c", "import xattn; print(xattn.__version__)")
    assert (done.returncode, done.stdout) == (0, f"{xattn.__version__}\n")
    assert done.stderr.startswith("XATTN_LOG_LEVEL is 'LOUD'; allowed: DEBUG") and done.stderr.count("\n") == 1


def test_info_shows_devices_and_notes(monkeypatch, capsys):
    from xattn import device

    fake = device.Detection([from_arch("sm_90"), from_arch("gfx942")], ["the driver is too old"])
    monkeypatch.setattr(device, "survey", lambda: fake)
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert "note: the driver is too old" in text
    assert "0: sm_90" in text and "1: gfx942" in text
    assert "64 KiB" in text and "192.0 GiB" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rich_draws_tables_on_a_terminal(monkeypatch):
    """Brackets in a name are no markup."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    cli._table("devices", ["name"], [["Navi 31 [Radeon RX 7900]"], ["[bold]x[/bold]"]])
    text = screen.getvalue()
    assert "━" in text and "Navi 31 [Radeon RX 7900]" in text and "[bold]x[/bold]" in text


def test_without_rich():
    """Plain tables then, also on a terminal; and asking has created no device context."""
    code = (
        "import sys; sys.modules['rich'] = None; from xattn import cli; sys.stdout.isatty = lambda: True; "
        "cli.main(['info']); import torch; print(torch.cuda.is_initialized(), file=sys.stderr)"
    )
    done = run("-c", code)
    assert (done.returncode, done.stderr) == (0, "False\n")
    assert "who answers" in done.stdout and "----" in done.stdout and "━" not in done.stdout


# ---------------------------------------------------------------- explain
def test_explain_in_words(capsys):
    assert cli.main(["explain", *Q, "--causal", "--device", "gfx942"]) == 0
    text = capsys.readouterr().out
    assert "attention, bf16, head_dim 128, gqa 4, causal" in text
    assert "gfx942" in text and "rejected:" in text
    assert "sm90: vendor = amd: the device is of another vendor (allowed: nvidia)" in text


def test_explain_is_the_plan_of_the_call(capsys):
    q, kv = (torch.empty(2, 1024, n, 128, dtype=torch.bfloat16, device="meta") for n in (32, 8))
    for arch in support.ARCHS:
        plan = xattn.explain(q, kv, kv, causal=True, device=arch)
        assert explained(capsys, *Q, "--causal", "--device", arch) == json.loads(json.dumps(plan.as_dict()))
        assert cli.main(["explain", *Q, "--causal", "--device", arch]) == 0
        assert capsys.readouterr().out == f"{plan}\n"


@pytest.mark.parametrize("arch, vendor", [("sm_90", "nvidia"), ("gfx942", "amd"), ("cpu", "cpu"), ("sm_130", "nvidia")])
def test_explain_for_absent_devices(capsys, arch, vendor):
    answer = explained(capsys, *Q, "--device", arch)
    assert answer["device"]["vendor"] == vendor
    assert arch == "cpu" or answer["device"]["arch"] == arch
    assert answer["backend"]


@pytest.mark.parametrize("name", ["sm", "hopper", "gfx", "", "sm_90x", "9"])
def test_explain_for_a_bad_name(capsys, name):
    assert cli.main(["explain", *Q, "--device", name]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"xattn explain: device: got {name!r}; allowed: ")
    assert "architecture is" in captured.err and "sm_NN" in captured.err


@pytest.mark.parametrize("kind", ["attention", "varlen", "paged"])
def test_explain_kinds(capsys, kind):
    answer = explained(capsys, *Q, "--kind", kind, "--device", "sm_90")
    assert answer["problem"]["kind"] == kind
    assert answer["problem"]["page_size"] == (64 if kind == "paged" else 0)


OPTIONS = {  # option: what it changes in the problem
    ("--q", "2,1024,16,128"): {"gqa_ratio": 2},
    ("--kv", "2,1024,32,128"): {"gqa_ratio": 1},
    ("--head-dim-v", "64"): {"head_dim_v": 64},
    ("--dtype", "fp16"): {"dtype": "fp16", "dtype_kv": "fp16", "dtype_out": "fp16"},
    ("--dtype", "fp8"): {"dtype": "fp8_e4m3", "dtype_kv": "fp8_e4m3"},
    ("--dtype-kv", "fp8"): {"dtype_kv": "fp8_e4m3"},
    ("--causal",): {"causal": True},
    ("--window", "1023,"): {"window": True},
    ("--window", ",0"): {"window": True},
    ("--softcap", "30"): {"softcap": True},
    ("--alibi",): {"alibi_slopes": True},
    ("--sinks",): {"sinks": True},
    ("--mask", "bool"): {"attn_mask": "bool"},
    ("--mask", "added"): {"attn_mask": "additive"},
    ("--dropout", "0.1"): {"dropout": True},
    ("--score-mod",): {"score_mod": "score_mod"},
    ("--mask-mod",): {"mask_mod": "mask_mod"},
    ("--epilogue",): {"epilogue": "epilogue"},
    ("--grad",): {"grads": ["q", "k", "v"]},
    ("--grad", "--deterministic"): {"grads": ["q", "k", "v"], "deterministic": True},
    ("--lse",): {"return_lse": True},
    ("--kind", "paged", "--mask", "bool"): {
        "kind": "paged",
        "page_size": 64,
        "kv_layout": "NHD",
        "attn_mask": "tree",
    },
    ("--kind", "paged", "--page-size", "16"): {"kind": "paged", "page_size": 16, "kv_layout": "NHD"},
}


@pytest.mark.parametrize("option", OPTIONS, ids=" ".join)
def test_every_option_changes_the_problem(capsys, option):
    plain = explained(capsys, *Q, "--device", "sm_90")["problem"]
    assert explained(capsys, *Q, *option, "--device", "sm_90")["problem"] == plain | OPTIONS[option]


def test_all_options_are_tested():
    parser = next(a for a in cli._parser()._actions if hasattr(a, "choices") and a.choices).choices["explain"]
    offered = {s for action in parser._actions for s in action.option_strings if s.startswith("--")}
    tested = {word for option in OPTIONS for word in option if word.startswith("--")}
    assert offered - tested == {"--help", "--json", "--device", "--backend"}


@pytest.mark.parametrize("kind", ["varlen", "paged"])
@pytest.mark.parametrize("option", ["--causal", "--sinks", "--alibi", "--score-mod", "--epilogue", "--lse"])
def test_options_of_other_kinds(capsys, kind, option):
    plain = explained(capsys, *Q, "--kind", kind, "--device", "gfx942")["problem"]
    assert explained(capsys, *Q, "--kind", kind, option, "--device", "gfx942")["problem"] != plain


def test_a_backend_that_refuses(capsys):
    """Exit status 1, and every refusal is printed."""
    args = ["explain", *Q, "--sinks", "--lse", "--backend", "sdpa", "--device", "sm_90"]
    assert cli.main(args) == 1
    text = capsys.readouterr().out
    assert "no backend answers" in text
    assert "sdpa: sinks = given" in text and "sdpa: return_lse = given" in text
    answer = explained(capsys, *args[1:])
    assert answer["backend"] is None
    assert [r["field"] for r in answer["rejected"]["sdpa"]] == ["sinks", "return_lse"]
    assert list(answer["rejected"]) == ["sdpa"], "others were asked"


WRONG_VALUES = {
    ("--dropout", "1.5"): "dropout_p: got 1.5; allowed: a finite number from 0 to 1",
    ("--softcap", "-1"): "softcap: got -1",
    ("--softcap", "nan"): "softcap: got nan",
    ("--backend", "magic"): "backend: got 'magic'; allowed: ",
    ("--kv", "3,1024,8,128"): "--kv: got batch 3; allowed: that of --q, 2",
    ("--kv", "2,1024,5,128"): "q: got 32 heads; allowed: a multiple of the 5 heads of k",
    ("--kv", "2,1024,8,64"): "k: got shape",
    ("--kind", "paged", "--grad"): "--grad: attention over a paged cache has no gradient",
    ("--kind", "paged", "--mask", "added"): "attn_mask: got torch.bfloat16; allowed: torch.bool in paged calls",
    ("--kind", "varlen", "--kv", "3,1024,8,128"): "--kv: got batch 3",
}


@pytest.mark.parametrize("option", WRONG_VALUES, ids=" ".join)
def test_wrong_values(capsys, option):
    assert cli.main(["explain", *Q, *option]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"xattn explain: {WRONG_VALUES[option]}")
    assert captured.err.count("\n") == 1


WRONG_USAGE = {
    ("--q", "1,2,3"): "argument --q: '1,2,3': four whole numbers separated by commas: batch,seqlen,heads,head_dim",
    ("--q", "1,2,3,x"): "argument --q: '1,2,3,x'",
    ("--q", "1,2,-3,4"): "argument --q: '1,2,-3,4'",
    ("--kv", "1,2,3,4,5"): "argument --kv: '1,2,3,4,5'",
    ("--window", "5"): "argument --window: '5': two distances from 0 separated by a comma",
    ("--window=-1,0",): "argument --window: '-1,0': two distances from 0 separated by a comma; a side without bound",
    ("--window", "-1,0"): "left empty (None in Python)",
    ("--window", "1,2,3"): "argument --window: '1,2,3'",
    ("--page-size", "0"): "argument --page-size: '0': a whole number from 1",
    ("--head-dim-v", "0"): "argument --head-dim-v: '0': a whole number from 1",
    ("--dtype", "int4"): "argument --dtype: invalid choice",
    ("--mask", "tree"): "argument --mask: invalid choice",
    ("--kind", "ring"): "argument --kind: invalid choice",
}


@pytest.mark.parametrize("option", WRONG_USAGE, ids=" ".join)
def test_wrong_usage(capsys, option):
    assert WRONG_USAGE[option] in usage_error(capsys, "explain", *Q, *option)


def test_explain_needs_a_shape(capsys):
    assert "the following arguments are required: --q" in usage_error(capsys, "explain")


# ---------------------------------------------------------------- the program
@pytest.mark.parametrize("command", [(), ("info",), ("explain",), ("demo",)], ids=" ".join)
def test_help(capsys, command):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m xattn")
    if not command:
        assert all(name in text for name in ("info", "explain", "demo"))
        assert all(name in text and words in text for name, words in settings.VARIABLES.items())


def test_no_command(capsys):
    text = usage_error(capsys)
    assert "usage: python -m xattn" in text and "required: command" in text


def test_as_a_module():
    done = run("-m", "xattn", "explain", *Q, "--backend", "sdpa", "--sinks", "--json", "--device", "sm_90")
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout)["backend"] is None


def test_broken_pipe():
    """A reader that goes away (``| head``) is no error, also where that is noticed at the end only."""
    read, write = os.pipe()
    os.close(read)
    done = run("-m", "xattn", "info", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
