"""transformers' models through xattn, against the same models with their own eager attention; tiny, random weights."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

import xattn
from xattn.compat import transformers as compat
from xattn.compat.transformers import PagedCache

WINDOW = 5
# Large initial weights: attention then decides which token comes next.
SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 144,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW)),
    # Sinks, and a window in every other layer.
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1, rope_parameters=None)
    ),
    # Softcap, another scale, and a window in every other layer.
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=WINDOW, query_pre_attn_scalar=24)),
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    compat.register()


@pytest.fixture(scope="module", params=list(MODELS))
def model(request) -> Any:
    torch.manual_seed(11)
    return MODELS[request.param]().eval()


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(11)
    return MODELS["llama"]().eval()


def prompts(padded: bool) -> dict[str, torch.Tensor]:
    """Three prompts of 12 tokens, or of 8, 12 and 1 padded on the left."""
    ids = torch.randint(3, SIZES["vocab_size"], (3, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = mask[2, :11] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model: Any, implementation: str, inputs: dict[str, torch.Tensor], cache: Any = None, **options: Any):
    model.set_attn_implementation(implementation)
    torch.manual_seed(5)
    options = {"max_new_tokens": 16, "do_sample": False, **options}
    if cache is not None:
        options[cache_name(model)] = cache
    return model.generate(**inputs, **options)


def forward(model: Any, implementation: str, ids: torch.Tensor, mask: torch.Tensor | None = None, cache: Any = None):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=cache is not None, **{cache_name(model): cache}).logits


def cache_name(model: Any) -> str:
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def paged(model: Any, num_pages: int = 64, page_size: int = 7, **options: Any) -> PagedCache:
    return PagedCache(model.config, num_pages, page_size, **options)


# ---------------------------------------------------------------- generate
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"prefill_chunk_size": 5}, {"do_sample": True, "top_k": 8}],
    ids=["greedy", "beams", "chunked prefill", "sampling"],
)
def test_generate_equals_eager(model, padded, options):
    inputs = prompts(padded)
    expected = generate(model, "eager", inputs, **options)
    assert torch.equal(generate(model, "xattn", inputs, **options), expected)
    for layout in ("NHD", "HND"):
        assert torch.equal(generate(model, "xattn", inputs, paged(model, kv_layout=layout), **options), expected)


def test_a_single_prompt_without_a_mask(model):
    inputs = {"input_ids": prompts(False)["input_ids"][:1]}
    expected = generate(model, "eager", inputs)
    for cache in (None, DynamicCache(config=model.config), paged(model)):
        assert torch.equal(generate(model, "xattn", inputs, cache), expected)


def test_static_cache(llama):
    inputs = prompts(True)
    expected = generate(llama, "eager", inputs)
    options = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(generate(llama, "xattn", inputs, **options), expected)


def test_assisted_generation_crops(llama):
    torch.manual_seed(12)
    assistant = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    inputs = {name: t[:1] for name, t in prompts(False).items()}
    expected = generate(llama, "eager", inputs)
    cache = paged(llama)
    assert torch.equal(generate(llama, "xattn", inputs, cache, assistant_model=assistant), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1


def test_beams_share_pages(llama):
    ids = prompts(False)["input_ids"][:1]
    cache = paged(llama, num_pages=10, page_size=4)
    forward(llama, "xattn", ids, cache=cache)
    cache.batch_repeat_interleave(3)
    assert cache.batch_size == 3
    following = torch.tensor([[5], [6], [7]])
    logits = forward(llama, "xattn", following, cache=cache)
    expected = forward(llama, "eager", torch.cat([ids.expand(3, -1), following], 1))[:, -1:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    assert cache.pages.stats().shared == 4  # the prompt's three, and the one in which rows 0 and 1 went on
    following = torch.tensor([[8], [9], [10]])
    logits = forward(llama, "xattn", following, cache=cache)
    whole = torch.cat([ids.expand(3, -1), torch.tensor([[7, 8], [7, 9], [5, 10]])], 1)
    torch.testing.assert_close(logits, forward(llama, "eager", whole)[:, -1:], rtol=1e-4, atol=1e-4)
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.batch_size == 1 and cache.pages.stats().shared == 0


# ---------------------------------------------------------------- logits
@pytest.mark.parametrize("sides", ["left", "right", "inside"])
def test_logits_of_padded_batches(model, sides):
    ids = prompts(False)["input_ids"]
    mask = torch.ones_like(ids)
    if sides == "left":
        mask[0, :3] = mask[1, :9] = 0
    elif sides == "right":
        mask[0, 7:] = mask[2, 1:] = 0
    else:
        mask[1, 4:7] = 0
    expected = forward(model, "eager", ids, mask)
    real = mask.bool()
    torch.testing.assert_close(forward(model, "xattn", ids, mask)[real], expected[real], rtol=1e-4, atol=1e-4)
    if sides == "inside" and model.config.model_type != "llama":  # a hole counts in transformers' window
        with pytest.raises(xattn.UnsupportedError, match="attention_mask"):
            forward(model, "xattn", ids, mask, paged(model))
    else:
        logits = forward(model, "xattn", ids, mask, paged(model))
        torch.testing.assert_close(logits[real], expected[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
def test_paged_steps_of_any_length(model, padded):
    inputs = prompts(padded)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    expected = forward(model, "eager", ids, mask)
    cache, parts, start = paged(model, page_size=3), [], 0
    for end in (3, 4, 9, 12):
        seen = mask[:, :end] if padded else None
        parts.append(forward(model, "xattn", ids[:, start:end], seen, cache))
        assert cache.get_seq_length() == end
        start = end
    real = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], expected[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
def test_crop_and_reset(llama, padded):
    inputs = prompts(padded)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    seen = mask if padded else None
    expected = forward(llama, "eager", ids, seen)[:, -4:]
    cache = paged(llama, num_pages=12, page_size=5)
    for _ in range(2):
        forward(llama, "xattn", ids.flip(0), seen, cache)
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.pages.num_free_pages == 12
        forward(llama, "xattn", ids, seen, cache)
        cache.crop(-torch.tensor(4))
        cache.crop(0)
        assert cache.get_seq_length() == 8
        logits = forward(llama, "xattn", ids[:, -4:], seen, cache)
        real = mask[:, -4:].bool()
        torch.testing.assert_close(logits[real], expected[real], rtol=1e-4, atol=1e-4)
        cache.reset()


# ---------------------------------------------------------------- training
def test_gradients_equal_eager(model):
    inputs = prompts(True)
    mask = inputs["attention_mask"]
    # What a row of padding predicts is nothing: the first real token is no label either.
    labels = inputs["input_ids"].masked_fill(mask * torch.nn.functional.pad(mask, (1, 0))[:, :-1] == 0, -100)
    grads = []
    for implementation in ("eager", "xattn"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(**inputs, labels=labels, use_cache=False).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    assert grads[0].keys() == grads[1].keys()
    for name, expected in grads[0].items():
        torch.testing.assert_close(grads[1][name], expected, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_packed_position_ids(llama):
    ids = prompts(False)["input_ids"].reshape(1, -1)
    position_ids = torch.cat([torch.arange(n) for n in (20, 1, 15)])[None]
    logits = []
    for implementation in ("eager", "xattn"):
        llama.set_attn_implementation(implementation)
        with torch.no_grad():
            logits.append(llama(ids, position_ids=position_ids, use_cache=False).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- the attention function by itself
def heads(seqlen_q: int, seqlen_k: int, batch: int = 2) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    shapes = ((batch, 4, seqlen_q, 16), (batch, 2, seqlen_k, 16), (batch, 2, seqlen_k, 16))
    return tuple(torch.randn(*shape, generator=g) for shape in shapes)


def plain(q, k, v, seen, bias=0.0, softcap=None, sinks=None, scale=16**-0.5):
    """softmax(...) v with everything written out; seen broadcasts to (batch, heads, seqlen_q, seqlen_k)."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + bias).masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


def distance(seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    return torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - torch.arange(seqlen_k)


CAUSAL, ENCODER = SimpleNamespace(is_causal=True), SimpleNamespace(is_causal=False)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(9, 9), (4, 9), (1, 9)])
@pytest.mark.parametrize("window", [None, 1, 3, 9, 20])
@pytest.mark.parametrize("causal", [True, False])
def test_without_a_mask(seqlen_q, seqlen_k, window, causal):
    q, k, v = heads(seqlen_q, seqlen_k)
    out, weights = compat.attention_forward(
        CAUSAL if causal else ENCODER, q, k, v, None, scaling=0.3, sliding_window=window
    )
    d = distance(seqlen_q, seqlen_k)
    seen = d >= 0 if causal or seqlen_q == 1 else torch.ones_like(d, dtype=torch.bool)
    if window is not None and seqlen_k > window:
        seen = seen & (d.abs() < window)
        if causal:  # exactly so many keys, itself included
            assert seen.sum(1).max() == window
    assert weights is None
    torch.testing.assert_close(out, plain(q, k, v, seen, scale=0.3))


def test_a_mask_says_all():
    q, k, v = heads(5, 8)
    seen = torch.rand(2, 1, 5, 8, generator=torch.Generator().manual_seed(2)) < 0.6
    seen[..., 0] = True
    expected = plain(q, k, v, seen)
    longer = torch.nn.functional.pad(seen, (0, 3))  # as caches of fixed size give
    for mask in (seen, longer, torch.zeros(2, 1, 5, 8).masked_fill(~seen, float("-inf"))):
        out, _ = compat.attention_forward(CAUSAL, q, k, v, mask, sliding_window=2)
        torch.testing.assert_close(out, expected)


def test_softcap_sinks_position_bias_and_is_causal():
    q, k, v = heads(6, 6)
    d = distance(6, 6)
    everything = torch.ones_like(d, dtype=torch.bool)
    sinks, bias = torch.linspace(-1, 1, 4), torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(4))
    out, _ = compat.attention_forward(CAUSAL, q, k, v, None, softcap=2.0, s_aux=sinks)
    torch.testing.assert_close(out, plain(q, k, v, d >= 0, softcap=2.0, sinks=sinks))
    out, _ = compat.attention_forward(CAUSAL, q, k, v, None, is_causal=False)
    torch.testing.assert_close(out, plain(q, k, v, everything))
    for mask in (None, (d >= 0)[None, None], torch.zeros(1, 1, 6, 6).masked_fill(d < 0, float("-inf"))):
        out, _ = compat.attention_forward(CAUSAL, q, k, v, mask, position_bias=bias)
        torch.testing.assert_close(out, plain(q, k, v, d >= 0, bias))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences(bias, masked):
    q, k, v = heads(10, 10, batch=1)
    ends = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    owner = torch.searchsorted(ends[1:].contiguous(), torch.arange(10), right=True)
    d = distance(10, 10)
    added = torch.randn(1, 4, 10, 10, generator=torch.Generator().manual_seed(4)) if bias else None
    mask = (d >= 0)[None, None] if masked else None
    out, _ = compat.attention_forward(
        CAUSAL,
        q,
        k,
        v,
        mask,
        cu_seq_lens_q=ends,
        cu_seq_lens_k=ends,
        max_length_q=5,
        max_length_k=5,
        position_bias=added,
    )
    seen = (d >= 0) & (owner[:, None] == owner)
    expected = plain(q, k, v, seen, 0.0 if added is None else added)
    torch.testing.assert_close(out[:, :9], expected[:, :9])


def test_dropout_is_honoured():
    q, k, v = heads(6, 6)
    out, _ = compat.attention_forward(CAUSAL, q, k, v, None, dropout=1.0)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("output_attentions", True),
        ("head_mask", torch.ones(4)),
        ("indices", torch.zeros(1)),
        ("block_table", torch.zeros(1)),
        ("attention_mask", torch.ones(2, 6)),
        ("cu_seq_lens_q", torch.tensor([0, 6], dtype=torch.int32)),
    ],
)
def test_what_cannot_be_honoured_is_refused(name, value):
    options = {"attention_mask": None, name: value}
    with pytest.raises(ValueError, match=name):
        compat.attention_forward(CAUSAL, *heads(6, 6), **options)


def test_a_backend_that_is_not_there_is_told_at_once():
    with pytest.raises(ValueError, match="backend: got 'nope'; allowed: sm90, sm80"):
        compat.register("xattn_nope", backend="nope")


def test_a_backend_of_ones_own(llama):
    compat.register("xattn_reference", backend="reference")
    inputs = prompts(True)
    expected = generate(llama, "eager", inputs)
    assert torch.equal(generate(llama, "xattn_reference", inputs, paged(llama)), expected)
    compat.register("xattn_sm90", backend="sm90")
    with pytest.raises(xattn.UnsupportedError, match="sm90"):
        generate(llama, "xattn_sm90", inputs)


# ---------------------------------------------------------------- masks
def test_masks_are_made_only_where_they_say_something():
    padding = torch.ones(2, 9, dtype=torch.bool)
    padded = padding.clone()
    padded[0, :2] = False

    def made(q_length, kv_length, **options):
        return compat.attention_mask(2, q_length, kv_length, q_offset=9 - q_length, **options)

    for q_length in (1, 4, 9):
        assert made(q_length, 9) is None
        assert made(q_length, 9, attention_mask=padding) is None
        assert made(q_length, 9, local_size=9) is None
        options = {"mask_function": sliding_window_causal_mask_function(8), "local_size": 8}
        for given in (
            {"attention_mask": padded},
            options,
            {"allow_is_causal_skip": False},
            {"attention_mask": padding[:, :8]},
        ):
            expected = sdpa_mask(2, q_length, 9, q_offset=9 - q_length, **{**given, "allow_is_causal_skip": False})
            assert torch.equal(made(q_length, 9, **given), expected)
    assert made(4, 20).shape == (2, 1, 4, 20)  # a cache of fixed size


def test_masks_that_pages_cannot_say(llama):
    ids = prompts(False)["input_ids"]
    causal = torch.ones(12, 12, dtype=torch.bool).tril().expand(3, 1, 12, 12)
    expected = forward(llama, "eager", ids)
    torch.testing.assert_close(forward(llama, "xattn", ids, causal, paged(llama)), expected, rtol=1e-4, atol=1e-4)
    prefix = causal.clone()
    prefix[:, :, :3, :3] = True
    with pytest.raises(xattn.UnsupportedError, match="attention_mask"):
        forward(llama, "xattn", ids, prefix, paged(llama))
    with pytest.raises(ValueError, match="attention_mask"):
        forward(llama, "xattn", ids, torch.zeros(3, 1, 12, 12), paged(llama))


def test_padding_is_not_forgotten(llama):
    inputs, cache = prompts(True), paged(llama)
    forward(llama, "xattn", inputs["input_ids"], inputs["attention_mask"], cache)
    with pytest.raises(ValueError, match="attention_mask"):
        forward(llama, "xattn", torch.ones(3, 1, dtype=torch.int64), None, cache)


# ---------------------------------------------------------------- the cache's errors
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_pages_need_this_attention(llama, implementation):
    with pytest.raises((AttributeError, TypeError), match='attn_implementation="xattn"'):
        forward(llama, implementation, prompts(False)["input_ids"], cache=paged(llama))


def test_out_of_pages_leaves_the_cache_as_it_was(llama):
    ids, cache = prompts(False)["input_ids"], paged(llama, num_pages=6, page_size=4)
    forward(llama, "xattn", ids[:, :8], cache=cache)
    with pytest.raises(xattn.OutOfPagesError):
        forward(llama, "xattn", ids[:, 8:], cache=cache)
    assert cache.get_seq_length() == 8
    cache.batch_select_indices(torch.tensor([0]))
    logits = forward(llama, "xattn", ids[:1, 8:], cache=cache)
    torch.testing.assert_close(logits, forward(llama, "eager", ids[:1])[:, 8:], rtol=1e-4, atol=1e-4)


def test_a_forward_pass_that_ended_early_is_noticed(llama, monkeypatch):
    ids, cache = prompts(False)["input_ids"], paged(llama)
    forward(llama, "xattn", ids[:, :8], cache=cache)
    with monkeypatch.context() as m:
        m.setattr(llama.model.layers[1], "forward", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward(llama, "xattn", ids[:, 8:9], cache=cache)
    with pytest.raises(RuntimeError, match="reset"):
        forward(llama, "xattn", ids[:, 9:], cache=cache)


def test_bad_steps_and_bad_models(llama):
    ids, cache = prompts(False)["input_ids"], paged(llama)
    forward(llama, "xattn", ids, cache=cache)
    with pytest.raises(ValueError, match="sequences"):
        forward(llama, "xattn", ids[:2, :1], cache=cache)
    with pytest.raises(ValueError, match="gradient"):
        llama.set_attn_implementation("xattn")
        llama(ids, use_cache=True, **{cache_name(llama): paged(llama)})
    config = LlamaConfig(**SIZES)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        PagedCache(config, 4)


# ---------------------------------------------------------------- importing
def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def test_xattn_alone_does_not_import_transformers():
    assert _python("import sys, xattn; print('transformers' in sys.modules)").strip() == "False"


def test_transformers_missing_or_too_old():
    missing = "import sys; sys.modules['transformers'] = None; import xattn.compat.transformers"
    assert "needs transformers, which is not installed: pip install xattn[demo]" in _python(missing)
    old = "import transformers; transformers.__version__ = '4.57.1'; import xattn.compat.transformers"
    assert f"needs transformers {compat.OLDEST} or newer, not 4.57.1" in _python(old)
