"""Training in the demo, on a tiny model that knows the words of its text: what it prints, checks, draws and refuses."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from xattn import dispatch, options
from xattn.__main__ import main
from xattn.compat import transformers as compat
from xattn.demo import curves, model, train

LAYERS, STEPS = 2, 4


def save_model(place: Path, head_dim: int = 8) -> Path:
    words = ["<pad>", *dict.fromkeys(train.read_text().split())]
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=72,
        head_dim=head_dim,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(place)
    tokens = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokens.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>").save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def demo(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    sizes = ["--steps", STEPS, "--batch-size", 3, "--seqlen", 24, "--learning-rate", 0.01]

    def run(*given: Any) -> int:
        return main(["demo", "--train", "--device", "cpu", *map(str, ["--model", folder, *sizes, *given])])

    return run


# ---------------------------------------------------------------- a run
def test_a_run(demo, capsys, tmp_path):
    assert demo("--out", "curves.png", "--offline") == 0
    printed = capsys.readouterr().out.splitlines()
    lines = {line.split()[0]: line for line in printed}
    assert f"{STEPS} steps of 3 x 24 of" in lines["train"]
    for name in ("xattn", "eager"):
        assert "steps/s" in lines[name] and "tokens/s" in lines[name] and "MiB kept for the backward" in lines[name]
        assert any(line.startswith(name) and f"] {STEPS} of {STEPS}" in line for line in printed)
    for name in ("forward", "backward"):
        assert f"served by sdpa (fallback), {LAYERS * STEPS} calls" in lines[name]
    assert "FAILED" not in lines["check"] and "losses of 4 steps within" in lines["check"]
    assert lines["drawn"].split() == ["drawn", "curves.png"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("dtype, wider", [("fp32", "float32"), ("bf16", "bfloat16")])
def test_json(demo, capsys, tmp_path, dtype, wider):
    assert demo("--json", "--dtype", dtype) == 0
    data = json.loads(capsys.readouterr().out)
    ours, eager, check = data["xattn"], data["eager"], data["check"]
    assert data["settings"]["dtype"] == wider and data["model"]["dtype"] == "float32"
    assert len(ours["losses"]) == len(eager["losses"]) == len(ours["seconds"]) == STEPS
    assert ours["losses"] != eager["losses"], "eager attention was run twice"
    assert ours["losses"][-1] < ours["losses"][0], "nothing was learned"
    assert check["passed"] and 0 < check["farthest"] <= check["tolerance"]
    assert ours["kept_for_backward_bytes"] < eager["kept_for_backward_bytes"]
    assert ours["tokens_per_second"] == pytest.approx(3 * 24 * ours["steps_per_second"])
    kinds = ours["gradient_errors"].keys()
    assert kinds == eager["gradient_errors"].keys() and check["worst"] in kinds
    assert {"model.embed_tokens.weight", "model.layers.*.self_attn.k_proj.weight"} <= kinds
    assert "peak_bytes" not in ours
    assert data["drawn"] == "xattn-training.png" and (tmp_path / "xattn-training.png").stat().st_size > 10_000


def test_equal_runs_are_equal(demo, capsys):
    found = []
    for _ in range(2):
        assert demo("--json", "--backend", "reference") == 0
        found.append(json.loads(capsys.readouterr().out)["xattn"])
    assert found[0]["losses"] == found[1]["losses"]
    assert [p["backend"] for p in found[0]["backward"]["plans"]] == ["reference"]


def test_one_step(demo, capsys):
    assert demo("--json", "--steps", 1) == 0
    assert json.loads(capsys.readouterr().out)["xattn"]["steps_per_second"] > 0


def test_what_patches_is_undone(demo):
    planned = dispatch.cached_plan
    assert demo("--steps", 1) == 0
    assert dispatch.cached_plan is planned


# ---------------------------------------------------------------- wrong attention is found
class _Half(torch.autograd.Function):
    """The identity, with half of its gradient."""

    @staticmethod
    def forward(ctx, t):
        return t.view_as(t)

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


WRONG = {
    "scores": lambda q, k, v: (-q, k, v),
    "gradient of q": lambda q, k, v: (_Half.apply(q), k, v),
    "gradient of k": lambda q, k, v: (q, _Half.apply(k), v),
    "gradient of v": lambda q, k, v: (q, k, _Half.apply(v)),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_attention_is_found(demo, capsys, monkeypatch, name, dtype):
    right = compat.attention
    monkeypatch.setattr(compat, "attention", lambda *qkv, **given: right(*WRONG[name](*qkv), **given))
    assert demo("--dtype", dtype) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("check"))
    assert line.startswith("check    FAILED") and "self_attn" in line


def test_what_agrees():
    eager = train.Run(losses=[4.0, 2.0], errors={"a": 1e-3, "b": 1e-5})
    same = curves.compare(eager, eager, torch.float32)
    assert same.passed and same.farthest == 0
    apart = curves.compare(replace(eager, losses=[4.0, 2.1]), eager, torch.float32)
    assert not apart.passed and apart.gradients_agree and (apart.where, round(apart.farthest, 6)) == (1, 0.05)
    wrong = curves.compare(replace(eager, errors={"a": 1.9e-3, "b": 3e-5}), eager, torch.float32)
    assert not wrong.passed and wrong.losses_agree and wrong.worst == "b"
    for nan in (replace(eager, losses=[4.0, math.nan]), replace(eager, errors={"a": math.nan, "b": 0.0})):
        assert not curves.compare(nan, eager, torch.float32).passed
        assert not curves.compare(nan, nan, torch.float32).passed


def test_losses_that_are_no_numbers(demo, capsys):
    def wrong(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    assert demo("--learning-rate", 1e30, "--json") == 1
    data = json.loads(capsys.readouterr().out, parse_constant=wrong)
    assert data["xattn"]["losses"][-1] is None and data["check"]["farthest"] is None and not data["check"]["passed"]
    assert demo("--learning-rate", 1e30) == 1
    assert f"FAILED: a loss of step {data['check']['where'] + 1} is no finite number" in capsys.readouterr().out


def test_a_model_that_does_not_ask_xattn(demo, capsys, monkeypatch):
    choose = LlamaForCausalLM.set_attn_implementation
    monkeypatch.setattr(LlamaForCausalLM, "set_attn_implementation", lambda self, name: choose(self, "eager"))
    assert demo() == 2
    assert "LlamaForCausalLM called no attention of xattn" in complaint(capsys)


def test_a_full_disk_loses_no_result(demo, capsys, monkeypatch):
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(curves, "draw", full)
    assert demo("--json") == 2
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert data["check"]["passed"] and "drawn" not in data and "No space left" in printed.err


# ---------------------------------------------------------------- what is refused, before anything is loaded
@pytest.fixture
def nothing_is_loaded(monkeypatch):
    def load(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(model, "load", load)


def refused(capsys) -> str:
    captured = capsys.readouterr()
    assert captured.err.startswith("xattn demo: ") and captured.err.count("\n") == 1 and not captured.out
    return captured.err


@pytest.mark.parametrize(
    "given, words",
    [
        (["--prompt", "why"], "--prompt: got a value with --train"),
        (["--max-new-tokens", 64], "--max-new-tokens: got a value with --train"),
        (["--page-size", 64], "--page-size: got a value with --train"),
        (["--dtype", "fp16"], "allowed: bf16, fp32"),
        (["--backend", "nobody"], "backend: got 'nobody'"),
        (["--out", "curves.pdf"], "allowed: a name that ends in .png"),
        (["--out", "nowhere/curves.png"], "whose folder is not there"),
        (["--out", "folder.png"], "which is a folder"),
    ],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, list) else "",
)
def test_bad_input(demo, capsys, tmp_path, nothing_is_loaded, given, words):
    (tmp_path / "folder.png").mkdir()
    assert demo(*given) == 2
    assert words in refused(capsys)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="POSIX only")
def test_a_file_that_cannot_be_written(demo, capsys, nothing_is_loaded, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *a: False)  # root may write everywhere
    assert demo() == 2
    assert "which cannot be written" in refused(capsys)


@pytest.mark.parametrize("option", ["--steps", "--batch-size", "--seqlen", "--learning-rate"])
@pytest.mark.parametrize("value", ["0", "-1", "x", "1e999", "nan", ""])
def test_bad_numbers(demo, capsys, nothing_is_loaded, option, value):
    with pytest.raises(SystemExit) as stopped:
        demo(f"{option}={value}")
    assert stopped.value.code == 2 and option in capsys.readouterr().err


def test_positive_floats():
    assert options.positive_float("2e-4") == 2e-4
    with pytest.raises(Exception, match="finite number above 0"):
        options.positive_float("1_0")


@pytest.mark.parametrize(
    "option, value", [("--steps", 3), ("--batch-size", 1), ("--seqlen", 9), ("--learning-rate", 1), ("--out", "a.png")]
)
def test_options_of_training_alone(capsys, nothing_is_loaded, option, value):
    assert main(["demo", "--device", "cpu", option, str(value)]) == 2
    assert f"{option}: got a value without --train" in refused(capsys)


def test_missing_matplotlib(demo, capsys, nothing_is_loaded, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "matplotlib" else find(n, *a))
    assert demo() == 2
    assert "matplotlib must be installed: pip install 'xattn[demo]'" in refused(capsys)


def complaint(capsys) -> str:
    message = capsys.readouterr().err
    assert message.startswith("xattn demo: ") and message.count("\n") == 1
    return message


def test_sizes_that_the_text_the_model_or_the_memory_have_not(demo, capsys):
    assert demo("--seqlen", 2**40) == 2
    assert "tokens of the text" in complaint(capsys)
    assert demo("--seqlen", 257) == 2
    assert "at most the 256 tokens that the model has positions for" in complaint(capsys)
    for batch in (2**33, 2**62):
        assert demo("--batch-size", batch) == 2
        assert "--batch-size, --seqlen: got a batch whose logits need" in complaint(capsys)


def test_memory_that_runs_out(demo, capsys, monkeypatch):
    def on_a_gpu(*args: Any) -> None:
        raise torch.OutOfMemoryError("out of memory\nand more")

    def on_a_cpu(*args: Any) -> None:
        torch.empty(2**60, dtype=torch.uint8)

    def something_else(*args: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(train.Trainer, "compute_exact", on_a_gpu)
    assert demo() == 2
    assert complaint(capsys) == "xattn demo: --batch-size, --seqlen: out of memory\n"
    monkeypatch.setattr(train.Trainer, "compute_exact", on_a_cpu)
    assert demo() == 2
    message = complaint(capsys)
    assert message.startswith("xattn demo: --batch-size, --seqlen: ") and "memory" in message
    monkeypatch.setattr(train.Trainer, "compute_exact", something_else)
    with pytest.raises(RuntimeError, match="something else"):
        demo()


def test_help_says_what_is_allowed(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert f"losses within {curves.TOLERANCES[torch.float32]:.2%}" in printed
    assert f"{curves.TOLERANCES[torch.bfloat16]:.0%} in bf16" in printed


def test_without_rich(demo, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert demo() == 0
    assert f"] {STEPS} of {STEPS}" in capsys.readouterr().out
