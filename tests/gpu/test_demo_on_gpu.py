"""The demo on a tiny model: decoding with a CUDA graph gives the same tokens, and no Python of the model runs in a
replay; training agrees with eager attention."""

from __future__ import annotations

import json

import pytest
import torch
from unit.test_compat_transformers import MODELS, forward, paged
from unit.test_decode_graph import FIRST, TOKENS
from unit.test_demo import tiny_model, tiny_tokenizer
from unit.test_demo_train import save_model

from xattn.__main__ import main
from xattn.compat import transformers as compat
from xattn.compat.transformers import DecodeGraph


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_equal_those_without_a_graph(name, dtype):
    compat.register()
    torch.manual_seed(11)
    model, tokens = MODELS[name]().eval().to("cuda", dtype), TOKENS.cuda()
    caches = [paged(model) for _ in range(2)]
    for cache in caches:
        forward(model, "xattn", tokens[:, :FIRST], cache=cache)
    graph = DecodeGraph(model, caches[0], max_length=40)
    for n in range(FIRST, 40):
        if n == 30:
            for cache in caches:
                cache.reorder_cache(torch.tensor([2, 0, 1]))
        want = forward(model, "xattn", tokens[:, n : n + 1], cache=caches[1])[:, -1]
        got, scale = graph(tokens[:, n]), want.float().abs().max()
        error = (got.float() - want.float()).abs().max()
        assert error <= (1e-4 if dtype == torch.float32 else 4e-2) * scale, n


def test_the_demo(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XATTN_CACHE_DIR", str(tmp_path / "cache"))
    tiny_model().save_pretrained(tmp_path / "tiny")
    tiny_tokenizer(True).save_pretrained(tmp_path / "tiny")
    options = ["--model", str(tmp_path / "tiny"), "--max-new-tokens", "24", "--prompt", "why is the sky blue", "--json"]
    assert main(["demo", *options]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["notes"] == [] or all("captured" not in note for note in data["notes"]), data["notes"]
    found = data["graphs"]
    assert found["check"]["passed"] and found["tokens"] == data["decode"]["tokens"]
    print(f"{found['times_without']:.2f} times the tokens/s of decode without graphs")
    assert found["times_without"] > 1


@pytest.mark.parametrize("dtype, backend", [("bf16", None), ("bf16", "sm80"), ("fp32", None)])
def test_training(tmp_path, capsys, monkeypatch, dtype, backend):
    monkeypatch.setenv("XATTN_CACHE_DIR", str(tmp_path / "cache"))
    options = ["--model", str(save_model(tmp_path / "tiny", head_dim=64)), "--dtype", dtype, "--json"]
    options += ["--steps", "6", "--batch-size", "4", "--seqlen", "200", "--out", str(tmp_path / "curves.png")]
    options += [] if backend is None else ["--backend", backend]
    assert main(["demo", "--train", *options]) == 0
    data = json.loads(capsys.readouterr().out)
    ours, eager = data["xattn"], data["eager"]
    assert ours["losses"][-1] < ours["losses"][0] and 0 < ours["peak_bytes"] < eager["peak_bytes"]
    if backend is not None:
        assert [p["backend"] for p in ours["forward"]["plans"]] == [backend]
        assert [p["backend"] for p in ours["backward"]["plans"]] == [backend]
