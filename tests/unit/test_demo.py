"""The demo, on a tiny model with a tokenizer of a few words that the tests save: what it prints, checks and refuses."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import recorded
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from xattn import dispatch
from xattn.__main__ import main
from xattn.compat import transformers_cache
from xattn.demo import DemoError, check, model, steps

WORDS = "<pad> <end> <user> why is the sky blue red green light scatters in air and water it does not".split()
CHAT = "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}it {% endif %}"


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=72,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def tiny_tokenizer(chat: bool) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>")
    tokenizer.chat_template = CHAT if chat else None
    return tokenizer


@pytest.fixture(scope="module", params=[True, False], ids=["chat", "plain"])
def folder(request, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model().save_pretrained(place)
    tiny_tokenizer(request.param).save_pretrained(place)
    return place


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XATTN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def demo(*options: Any) -> int:
    return main(["demo", "--device", "cpu", "--prompt", "why is the sky blue", *map(str, options)])


# ---------------------------------------------------------------- a run
def test_a_run(folder, capsys):
    assert demo("--model", folder, "--max-new-tokens", 9, "--page-size", 4) == 0
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line for line in printed.splitlines()}
    assert "cores" in lines["device"]
    assert "tiny: 2 layers, 9 query heads, 3 kv heads" in lines["model"] and "float32" in lines["model"]
    for step in ("prefill", "decode"):
        assert "tokens/s, served by sdpa (fallback, gather pages to dense)" in lines[step]
    assert lines["xattn"].count("#") > 0 and "for comparison" in lines["eager"]
    assert "tokens equal to eager attention" in lines["check"] and "FAILED" not in lines["check"]
    assert {"prompt", "answer"} <= lines.keys()


def test_json(folder, capsys):
    assert demo("--model", folder, "--max-new-tokens", 6, "--json", "--offline") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["check"]["passed"] and data["check"]["agreeing"] == data["check"]["total"] <= 6
    assert data["device"]["torch"] == "cpu" and data["model"]["dtype"] == "float32"
    assert data["prefill"]["tokens"] == data["prompt"]["tokens"] in (5, 7)
    assert data["decode"]["plans"][0]["calls"] == 2 * data["decode"]["tokens"]
    assert data["decode"]["plans"][0]["backend"] == "sdpa" and data["decode"]["tokens_per_second"] > 0
    assert set(data["answer"].split()) <= set(WORDS)


def test_a_backend_of_ones_own(folder, capsys):
    planned = dispatch.cached_plan
    assert demo("--model", folder, "--max-new-tokens", 4, "--backend", "reference") == 0
    assert "served by reference" in capsys.readouterr().out
    assert dispatch.cached_plan is planned
    assert demo("--model", folder, "--backend", "sm90") == 2
    assert "sm90" in capsys.readouterr().err
    assert demo("--model", folder, "--backend", "nobody") == 2


@pytest.mark.parametrize("option", ["--page-size", "--max-new-tokens"])
@pytest.mark.parametrize("value", [2**45, 2**63 - 1])
def test_a_cache_that_the_memory_does_not_hold(folder, capsys, option, value):
    assert demo("--model", folder, option, value) == 2
    assert capsys.readouterr().err.startswith("xattn demo: --page-size, --max-new-tokens: ")


def test_low_precision_is_compared_choice_by_choice(folder, capsys):
    assert demo("--model", folder, "--max-new-tokens", 12, "--dtype", "bf16", "--json") == 0
    verdict = json.loads(capsys.readouterr().out)["check"]
    assert verdict["tolerance"] > 0 and verdict["agreeing"] + verdict["close"] == verdict["total"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_wrong_attention_is_found(folder, capsys, monkeypatch, dtype):
    right = transformers_cache.attention_paged

    def wrong(q, *args, **options):
        return right(-q, *args, **options)

    monkeypatch.setattr(transformers_cache, "attention_paged", wrong)
    assert demo("--model", folder, "--max-new-tokens", 40, "--dtype", dtype) == 1
    assert "check    FAILED" in capsys.readouterr().out


# ---------------------------------------------------------------- verdicts
def test_same_tokens():
    assert check.same_tokens([1, 2, 3], [1, 2, 3]).passed
    verdict = check.same_tokens([1, 2, 3], [1, 4, 3])
    assert (verdict.passed, verdict.agreeing, verdict.total, verdict.where) == (False, 2, 3, 1)
    verdict = check.same_tokens([1, 2, 3], [1, 2])
    assert (verdict.passed, verdict.agreeing, verdict.total, verdict.where) == (False, 2, 3, 2)


def test_same_choices():
    gap = torch.tensor([1.0, 0.1, 1.0])
    verdict = check.same_choices([1, 2, 3], [1, 4, 3], gap, tolerance=0.2)
    assert (verdict.passed, verdict.agreeing, verdict.close, verdict.where) == (True, 2, 1, None)
    verdict = check.same_choices([1, 2, 3], [1, 4, 5], gap, tolerance=0.2)
    assert (verdict.passed, verdict.agreeing, verdict.close, verdict.where) == (False, 1, 1, 2)


# ---------------------------------------------------------------- what is missing, in one sentence
def refused(capsys) -> str:
    message = capsys.readouterr().err
    assert message.startswith("xattn demo: ") and message.count("\n") == 1
    return message


def test_missing_packages(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "transformers" else found(name, *a)
    )
    assert demo() == 2
    assert "transformers must be installed: pip install 'xattn[demo]'" in refused(capsys)


def test_missing_models(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(model, "PACKAGE", "no_such_package")
    assert demo() == 2
    assert "--model DIR" in refused(capsys)
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        assert demo("--model", path) == 2
        assert str(path) in refused(capsys)


@pytest.mark.parametrize("config", ["{", "{}", "[]", '{"model_type": "nosuch"}', '{"model_type": "llama"}'])
def test_folders_that_hold_no_model(tmp_path, capsys, config):
    (tmp_path / "config.json").write_text(config)
    assert demo("--model", tmp_path) == 2
    assert f"--model {tmp_path} cannot be loaded: " in refused(capsys)


# ---------------------------------------------------------------- ci/demo
CI_DEMO = Path(__file__).parents[2] / "ci" / "demo"


def ci_demo(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {n: x for n, x in os.environ.items() if n not in ("PYTHON", "XATTN_VENV", "PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(["bash", CI_DEMO, *options], env=kept | env, capture_output=True, text=True, timeout=250)


def stand_in(place: Path, has_torch: bool) -> str:
    """A "python" that says how it was called; it can only answer what ci/demo asks it."""
    place.parent.mkdir(parents=True)
    place.write_text(
        f"""#!/bin/bash
case "$*" in
    *sys.executable*) echo "$0" ;;
    *'"torch"'*) exit {0 if has_torch else 1} ;;
    *demo*) echo "$0 $*" ;;
esac
"""
    )
    place.chmod(0o755)
    return str(place)


def test_offline_takes_the_environment_that_is_there(tmp_path):
    ours = stand_in(tmp_path / "venv" / "bin" / "python", has_torch=True)
    done = ci_demo("--offline", "--json", XATTN_VENV=str(tmp_path / "venv"))
    assert (done.returncode, done.stdout) == (0, f"{ours} -m xattn demo --json\n"), done.stderr
    named = stand_in(tmp_path / "other" / "python", has_torch=True)
    done = ci_demo("--offline", XATTN_VENV=str(tmp_path / "venv"), PYTHON=named)
    assert done.stdout == f"{named} -m xattn demo\n"


def test_offline_without_torch(tmp_path):
    named = stand_in(tmp_path / "bare" / "python", has_torch=False)
    done = ci_demo("--offline", XATTN_VENV=str(tmp_path / "nothing"), PYTHON=named)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"error: {named} has no torch: run ci/demo once without --offline")


def test_help_says_where_the_model_is(capsys):
    assert "models/SmolLM2-135M-... of the cache folder" in ci_demo("--help").stdout
    with pytest.raises(SystemExit):
        demo("--help")
    assert "~/.cache/xattn/models/" in " ".join(capsys.readouterr().out.split())


def test_missing_devices(folder, capsys):
    assert demo("--model", folder, "--device", "cuda:77") == 2
    assert "--device cuda:77" in refused(capsys)
    with pytest.raises(SystemExit):
        demo("--max-new-tokens", "0")


# ---------------------------------------------------------------- GGUF files are converted once
@pytest.fixture
def gguf(monkeypatch, tmp_path) -> Path:
    """A file that counts as GGUF: reading it gives the tiny model."""
    place = tmp_path / "download"
    place.mkdir()
    (place / "Tiny.Q4.gguf").write_bytes(b"GGUF")
    load = model._from_pretrained

    def read(source: Path, dtype: torch.dtype, **options: Any) -> Any:
        if "gguf_file" not in options:
            return load(source, dtype, **options)
        return tiny_model(), tiny_tokenizer(False)

    monkeypatch.setattr(model, "_from_pretrained", read)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: True if n in ("gguf", "accelerate") else find(n, *a))
    return place


def test_conversion_happens_once(gguf, own_cache, capsys):
    assert demo("--model", gguf, "--max-new-tokens", 3) == 0
    assert "note     converting Tiny.Q4.gguf, once" in capsys.readouterr().out
    assert demo("--model", gguf / "Tiny.Q4.gguf", "--max-new-tokens", 3) == 0
    assert "converting" not in capsys.readouterr().out
    assert own_cache.stat().st_mode & 0o777 == 0o700
    (converted,) = (own_cache / "models").iterdir()
    assert converted.name.startswith("Tiny.Q4-") and (converted / "config.json").is_file()
    (gguf / "Tiny.Q4.gguf").write_bytes(b"GGUF, another")
    assert demo("--model", gguf, "--max-new-tokens", 3) == 0
    assert "converting" in capsys.readouterr().out


def test_a_killed_conversion_leaves_nothing_behind(gguf, own_cache, monkeypatch, capsys):
    save = LlamaForCausalLM.save_pretrained

    def killed(self: Any, place: Any, *args: Any, **options: Any) -> None:
        save(self, place, *args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(LlamaForCausalLM, "save_pretrained", killed)
        assert demo("--model", gguf) == 130
    assert list((own_cache / "models").iterdir()) == []
    # What a killed process could not take away goes a day later.
    old, new = (own_cache / "models" / f"{age}.partial" for age in ("old", "new"))
    old.mkdir()
    new.mkdir()
    os.utime(old, times=(time.time() - 2 * 24 * 3600,) * 2)
    assert demo("--model", gguf, "--max-new-tokens", 3) == 0
    assert not old.exists() and new.exists()


def test_a_cache_that_cannot_be_written(gguf, own_cache, capsys):
    own_cache.write_text("a file where the folder should be")
    assert demo("--model", gguf, "--max-new-tokens", 3) == 0
    assert "note     the converted model is not kept" in capsys.readouterr().out


def test_gguf_needs_its_packages(gguf, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n in ("gguf", "accelerate") else find(n, *a))
    assert demo("--model", gguf) == 2
    assert "accelerate and gguf must be installed: pip install 'xattn[demo]'" in refused(capsys)


def test_two_conversions_at_once(tmp_path):
    folder = tmp_path / "model"

    def write(place: Path) -> None:
        (place / "config.json").write_text("{}")
        folder.mkdir()  # the other was first
        (folder / "config.json").write_text("{}")

    model._publish(folder, write)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_prompt_needs_tokens():
    tiny = model.LanguageModel("tiny", tiny_model(), tiny_tokenizer(False), 0.0)
    with pytest.raises(DemoError, match="no tokens"):
        tiny.encode("")


# ---------------------------------------------------------------- graphs
@pytest.fixture
def graphs(monkeypatch):
    """A CPU that passes for a device with graphs."""
    monkeypatch.setattr(steps, "CAPTURES", {"cpu": recorded.capture})


def test_decoding_with_graphs(folder, capsys, graphs):
    assert demo("--model", folder, "--max-new-tokens", 9, "--page-size", 4, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    found, decode = data["graphs"], data["decode"]
    assert found["tokens"] == decode["tokens"] and found["tokens_per_second"] > 0 and found["times_without"] > 0
    assert found["check"]["passed"] and found["check"]["agreeing"] == found["check"]["total"] == decode["tokens"] + 1
    assert [p["backend"] for p in found["plans"]] == ["sdpa"]
    assert demo("--model", folder, "--max-new-tokens", 9) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("graphs")]
    assert any("times the tokens/s of decode without graphs" in line and "the same" in line for line in printed)


def test_a_replay_runs_nothing_of_the_model(folder, capsys, graphs, monkeypatch):
    runs = {}
    for name, captures in (("without", {}), ("with", {"cpu": recorded.capture})):
        monkeypatch.setattr(steps, "CAPTURES", captures)
        real, count = LlamaForCausalLM.forward, [0]

        @functools.wraps(real)
        def counted(self, *args, real=real, count=count, **kwargs):
            count[0] += 1
            return real(self, *args, **kwargs)

        with monkeypatch.context() as m:
            m.setattr(LlamaForCausalLM, "forward", counted)
            assert demo("--model", folder, "--max-new-tokens", 9, "--json") == 0
        runs[name] = count[0]
        assert json.loads(capsys.readouterr().out)["decode"]["tokens"] > 1
    assert runs["with"] == runs["without"] + 2, "the prompt, and the capture"


def test_without_graphs_nothing_is_said_of_them(folder, capsys):
    assert demo("--model", folder, "--max-new-tokens", 4, "--json") == 0
    assert "graphs" not in json.loads(capsys.readouterr().out)


def test_a_wrong_replay_is_found(folder, capsys, monkeypatch):
    def capture(forward, device):
        replay, logits = recorded.capture(forward, device)

        def wrong() -> None:
            replay()
            logits.neg_()

        return wrong, logits

    monkeypatch.setattr(steps, "CAPTURES", {"cpu": capture})
    assert demo("--model", folder, "--max-new-tokens", 9) == 1
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("graphs ") and "FAILED" in line for line in printed)
    assert not any(line.startswith("check ") and "FAILED" in line for line in printed)


def test_a_model_that_cannot_be_captured(folder, capsys, monkeypatch):
    def capture(forward, device):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(steps, "CAPTURES", {"cpu": capture})
    assert demo("--model", folder, "--max-new-tokens", 4, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert "graphs" not in data and data["check"]["passed"]
    assert data["notes"] == [
        "decoding without graphs only, as the step cannot be captured: operation not permitted when stream is capturing"
    ]


@pytest.mark.parametrize("metadata, wanted", [("2.13.0", "2.13.0"), ("2.13.0+cpu", "2.13.0+cpu"), (None, "2.13.0")])
def test_torch_is_held_to_what_pip_knows_it_as(tmp_path, metadata, wanted):
    """Its own version says what it was built for, which the release that an index offers may not."""
    site, place = tmp_path / "site", tmp_path / "venv" / "bin" / "python"
    place.parent.mkdir(parents=True)
    if metadata:
        (site / f"torch-{metadata}.dist-info").mkdir(parents=True)
        (site / f"torch-{metadata}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {metadata}\n")
    place.write_text(f'#!/bin/bash\nPYTHONPATH="{site}" exec "{sys.executable}" -S "$@"\n')
    place.chmod(0o755)
    script = f'. "{CI_DEMO.parent}/common.sh"; TORCH_VERSION=2.13.0+cu130; torch_release'
    env = os.environ | {"XATTN_VENV": str(tmp_path / "venv")}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout == f"{wanted}\n", done.stderr
