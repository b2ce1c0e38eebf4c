"""The command line: what it prints, how it ends, and that it needs nothing that may be absent."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import xattn
from xattn import cli, images, settings, show, support
from xattn.backends import REGISTRY
from xattn.device import from_arch

ROOT = str(Path(xattn.__file__).parent.parent)
Q = ("--q", "2,1024,32,128", "--kv", "2,1024,8,128")


def run(*args: str, stdout: int | None = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
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


def test_info_answers_one_question(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["info", "--matrix", "--images"])
    assert "--images: not allowed with argument --matrix" in capsys.readouterr().err


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


COMMANDS = [("info",), ("explain", *Q), ("check",), ("build", "--out", "never-made"), ("bench",), ("demo",)]


def test_the_commands_are_all_there():
    (commands,) = (a.choices for a in cli._parser()._actions if a.choices)
    assert sorted(commands) == sorted(c[0] for c in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])
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


# ---------------------------------------------------------------- info --images
@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A store with an image in the wheel, and in the cache one more and a broken file."""
    monkeypatch.setenv("XATTN_CACHE_DIR", str(tmp_path / "cache"))
    wheel, cache = tmp_path / "wheel", tmp_path / "cache" / "images"
    config = (("element", "bf16"), ("head_dim", 64), ("head_dim_v", 64), ("tile_m", 128), ("tile_n", 32))
    for folder, arch, compiler in ((wheel, "sm_80", "nvrtc 12.9"), (cache, "gfx942", "a clang"), (cache, "sm_90", "x")):
        spec = images.ImageSpec("arch/sm80/forward.cu", (*config, ("softcap", True)), arch)
        images.publish(images.Image(spec.key(), arch, "cubin", spec.name(), compiler, b"code"), folder)
    (broken,) = (cache / "sm_90").iterdir()
    broken.write_bytes(broken.read_bytes()[:-1])
    os.utime(broken, (0, 0))
    init = images.Store.__init__
    monkeypatch.setattr(images.Store, "__init__", lambda self: init(self, shipped=(wheel,)))
    return wheel, cache, broken


def test_info_images(stored, capsys):
    wheel, cache, broken = stored
    assert cli.main(["info", "--images"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[1]: line for line in lines if line.startswith(("  wheel ", "  cache "))}
    kernel = "cubin   arch/sm80/forward.cu: bf16, head_dim 64, tile 128x32, softcap"
    assert kernel in rows["sm_80"] and "nvrtc 12.9" in rows["sm_80"]
    assert rows["gfx942"].startswith("  cache ") and "a clang" in rows["gfx942"]
    assert "broken  3 of 4 bytes, or changed" in rows["sm_90"] and rows["sm_90"].endswith(broken.name)
    assert " d  " in rows["sm_90"] and " s  " in rows["sm_80"]
    assert lines[-2].startswith("wheel: 1 images, ") and lines[-2].endswith(f"in {wheel}")
    assert lines[-1].startswith("cache: 1 images, 1 broken, ") and lines[-1].endswith(f"in {cache}")
    assert broken.exists(), "listing must not remove"


def test_info_images_json(stored, capsys):
    wheel, cache, broken = stored
    assert cli.main(["info", "--images", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {place: (t["images"], t["broken"]) for place, t in answer["totals"].items()} == {
        "wheel": (1, 0),
        "cache": (1, 1),
    }
    by_arch = {Path(i["path"]).parent.name: i for i in answer["images"]}
    assert (by_arch["sm_80"]["place"], by_arch["sm_80"]["compiler"]) == ("wheel", "nvrtc 12.9")
    assert by_arch["sm_90"]["broken"].startswith(f"{broken}: 3 of 4 bytes") and by_arch["sm_90"]["age_seconds"] > 1e9
    assert sum(i["size"] for i in answer["images"]) == sum(t["size"] for t in answer["totals"].values())


def test_info_images_of_an_empty_store(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(images.Store, "files", lambda self: iter([]))
    assert cli.main(["info", "--images"]) == 0
    text = capsys.readouterr().out
    assert f"cache: 0 images, 0 B, in {tmp_path / 'images'}" in text and "kernel" not in text


@pytest.mark.parametrize(
    "value, words",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (5000 << 30, "5000.0 GiB"),
    ],
)
def test_sizes(value, words):
    assert show.size(value) == words


@pytest.mark.parametrize(
    "value, words", [(-1, "0 s"), (59.9, "59 s"), (60, "1 min"), (7199, "1 h"), (86400 * 2.5, "2 d")]
)
def test_ages(value, words):
    assert show.age(value) == words


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rich_draws_tables_on_a_terminal(monkeypatch):
    """Brackets in a name are no markup."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    show.table("devices", ["name"], [["Navi 31 [Radeon RX 7900]"], ["[bold]x[/bold]"]])
    text = screen.getvalue()
    assert "━" in text and "Navi 31 [Radeon RX 7900]" in text and "[bold]x[/bold]" in text


def test_rich_shows_progress_on_a_terminal(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    with show.progress("compiling", 2) as tell:
        tell("[bold]first[/bold]")
        tell("second [x]")
    text = screen.getvalue()
    assert "compiling" in text and "2/2" in text and "second [x]" in text and "[1/2]" not in text


def test_progress_is_lines_elsewhere(capsys):
    with show.progress("compiling", 10) as tell:
        tell("first [x]")
        tell("second")
    assert capsys.readouterr().out == "[ 1/10] first [x]\n[ 2/10] second\n"


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


MOST = 2**63 - 1
HUGE = {  # option: what is blamed
    ("--q", "999999999999999,999999,99,99"): "--q: got a tensor of (999999999999999, 999999, 99, 99); allowed: less",
    ("--q", f"{MOST},0,1,8"): "--q: got a tensor",
    ("--q", f"{MOST},1,1,1", "--kind", "varlen"): "--q: got a tensor",
    ("--q", "1,1,1,8", "--kv", f"1,{MOST},1,8"): "--kv: got a tensor",
    ("--q", "1,1,1,8", "--head-dim-v", f"{MOST}"): "--head-dim-v: got a tensor",
    ("--q", f"1,{2**40},1,8", "--mask", "added"): "--mask: got a tensor",
    ("--q", f"1,{2**40},1,8", "--mask", "bool", "--kind", "paged"): "--mask: got a tensor",
    ("--q", f"{2**59},1,1,8"): "--q: got a tensor",
    ("--q", "1,1,1,8", "--kind", "paged", "--page-size", f"{MOST}"): "--page-size: got a tensor",
    ("--q", f"1,{2**59},1,8", "--kind", "paged"): "--q: got a tensor",
}


@pytest.mark.parametrize("option", HUGE, ids=" ".join)
def test_huge_sizes(capsys, option):
    """The option that asks for more than a tensor can hold is named, in one line."""
    assert cli.main(["explain", "--device", "sm_90", *option]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"xattn explain: {HUGE[option]}"), captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("kind", ["attention", "varlen", "paged"])
@pytest.mark.parametrize("shape", [f"{2**33},5,2,8", f"1,{2**40},1,8", f"0,{2**40},1,8", "0,0,1,8"])
def test_large_sizes_are_answered(capsys, kind, shape):
    assert explained(capsys, "--q", shape, "--kind", kind, "--device", "sm_90")["backend"]


def test_only_digits_are_numbers(capsys):
    """Other characters that Python takes for digits, and numbers that no tensor has, are refused like words."""
    for text in ("²", "٣", "1_0", "+1", "99999999999999999999", "9" * 5000, ""):
        for option in ("--q", "--kv", "--page-size", "--head-dim-v", "--window"):
            given = {"--q": f"{text},1,1,1", "--kv": f"{text},1,1,1", "--window": f"{text or 'x'},"}.get(option, text)
            err = usage_error(capsys, "explain", *Q, f"{option}={given}")
            assert f"error: argument {option}: {given!r}: " in err and "Traceback" not in err
            assert len(text) < 20 or f"at most {MOST}" in err
        assert f"argument --jobs: {text!r}: " in usage_error(capsys, "build", "--out", "x", f"--jobs={text}")
        for option in ("--max-new-tokens", "--page-size"):
            assert f"argument {option}: {text!r}: " in usage_error(capsys, "demo", f"{option}={text}")
        assert cli.main(["check", f"--device={text}"]) == 2
        assert capsys.readouterr().err.startswith(f"xattn check: --device: got {text!r}; allowed: ")


@pytest.mark.parametrize("name", ["mps", "xpu:3", "hip", "hip:0", "xla", "vulkan"])
def test_accelerators_that_are_not_here(capsys, name):
    """An architecture need not be here, a device of torch must: nothing is known of its kernels."""
    assert cli.main(["explain", *Q, "--device", name]) == 2
    words = f"device: got {name!r}, which this torch ({torch.__version__}) does not have; allowed: a torch device"
    assert capsys.readouterr().err.startswith(f"xattn explain: {words}")
    for question in (xattn.capabilities, lambda device: xattn.supported(*torch.zeros(3, 1, 1, 1, 8), device=device)):
        for device in (name, torch.device(name)):
            with pytest.raises(ValueError, match=re.escape(words)):
                question(device)


def test_accelerators_that_are_here(monkeypatch):
    here = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: here)
    for name in ("xpu", "xpu:1"):
        assert str(xattn.capabilities(name).device).startswith("xpu")
    with pytest.raises(ValueError, match="device: got 'xpu:2', which this torch"):
        xattn.capabilities("xpu:2")


@pytest.mark.parametrize("name", ["sm_٩٠", "sm_²", "٩.٠", "gfx٩٤٢"])
def test_architectures_are_written_in_plain_digits(capsys, name):
    assert cli.main(["explain", *Q, "--device", name]) == 2
    assert capsys.readouterr().err.startswith(f"xattn explain: device: got {name!r}; allowed: ")
    assert cli.main(["build", "--arch", name, "--out", "/dev/null/x"]) == 2
    assert capsys.readouterr().err.startswith(f"xattn build: --arch: got {name!r}, ")


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


@pytest.mark.parametrize("kind", ["attention", "varlen"])
def test_a_page_size_is_of_paged_calls(capsys, kind):
    assert cli.main(["explain", *Q, "--kind", kind, "--page-size", "16"]) == 2
    assert f"--page-size: got 16 for --kind {kind}; allowed: --kind paged" in capsys.readouterr().err


def test_explain_needs_a_shape(capsys):
    assert "the following arguments are required: --q" in usage_error(capsys, "explain")


# ---------------------------------------------------------------- the program
@pytest.mark.parametrize("command", [(), ("info",), ("explain",), ("check",), ("build",), ("demo",)], ids=" ".join)
def test_help(capsys, command):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m xattn")
    if not command:
        assert all(name in text for name in ("info", "explain", "check", "build", "demo"))
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


# Words that print little (noticed at the end), much, by argparse, and what is wrong after all.
PRINTING = (
    ("info",),
    ("info", "--matrix", "--json"),
    ("info", "--images"),
    ("explain", *Q),
    ("--help",),
    ("--version",),
)
CLOSED = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
@pytest.mark.parametrize("how", ["", "-u"])
def test_an_output_that_is_full(words, how):
    full = os.open("/dev/full", os.O_WRONLY)
    done = run(*filter(None, [how]), "-m", "xattn", *words, stdout=full)
    os.close(full)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("xattn") and "No space left on device" in done.stderr


def test_a_file_that_fails_is_not_stdout(monkeypatch, capsys):
    def broken(*args):
        raise PermissionError(13, "Permission denied", "/a/file")

    monkeypatch.setattr(images.Store, "files", broken)
    assert cli.main(["info", "--images"]) == 2
    assert capsys.readouterr() == ("", "xattn info: [Errno 13] Permission denied: '/a/file'\n")


@pytest.mark.parametrize("words", [("info", "--json"), ("explain", *Q), ("--help",)], ids=" ".join)
def test_an_output_that_is_closed(words):
    done = run("-c", CLOSED, "-m", "xattn", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "xattn: stdout is closed; allowed: one that can be written to\n"


@pytest.mark.parametrize("closed", ["os.close(2)", "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)"])
def test_errors_that_nobody_hears(closed):
    """The status tells alone; what belongs on stderr does not go to stdout."""
    code = f"import os, sys; {closed}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    for words in (("explain", *Q, "--softcap", "-1"), ("explain", "--nosuch"), ("check", "--device", "x")):
        done = run("-c", code, "-m", "xattn", *words)
        assert (done.returncode, done.stdout) == (2, "")
