"""What only a GPU can show of the fallback backends: streams, graphs, no synchronisation, the status word, large
shapes."""

import warnings

import pytest
import torch

import xattn

BACKENDS = ("reference", "sdpa")
CUDA = torch.device("cuda")


pytestmark = pytest.mark.usefixtures("quiet")


def qkv(b=2, sq=65, sk=97, h=4, hk=2, d=64, dtype=torch.bfloat16, grad=False):
    shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, d))
    return tuple(torch.randn(s, device=CUDA, dtype=dtype).requires_grad_(grad) for s in shapes)


def paged(dtype=torch.bfloat16):
    q = torch.randn(3, 2, 4, 64, device=CUDA, dtype=dtype)
    k, v = (torch.randn(11, 16, 2, 64, device=CUDA, dtype=dtype) for _ in range(2))
    table = torch.tensor([[0, 1, 2], [3, 4, -7], [5, 99, 99]], device=CUDA, dtype=torch.int32)
    return q, k, v, table, torch.tensor([40, 17, 3], device=CUDA, dtype=torch.int32)


def varlen(dtype=torch.bfloat16):
    cu_q, cu_k = (torch.tensor(x, device=CUDA, dtype=torch.int32) for x in ([0, 5, 5, 40], [0, 9, 30, 70]))
    q = torch.randn(44, 4, 64, device=CUDA, dtype=dtype)
    k, v = (torch.randn(80, 2, 64, device=CUDA, dtype=dtype) for _ in range(2))
    return q, k, v, cu_q, cu_k, 64, 64


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_call_synchronises(backend, unsynchronised):
    dense, packed, cache = qkv(grad=True), varlen(), paged()
    used = torch.tensor([97, 5], device=CUDA)
    new = torch.randn(3, 2, 2, 64, device=CUDA, dtype=torch.bfloat16)

    def calls():
        out = xattn.attention(*dense, causal=True, window=(30, None), seqused_k=used, backend=backend)
        torch.autograd.grad(out, dense, torch.ones_like(out))
        xattn.attention_varlen(*packed, causal=True, backend=backend)
        xattn.attention_paged(*cache, causal=True, k_new=new, v_new=new, backend=backend)
        if backend == "reference":
            xattn.attention(*(t.detach() for t in dense), dropout_p=0.1, k_scale=0.5, return_lse=True)

    calls()
    with unsynchronised():
        calls()


@pytest.mark.parametrize("backend", BACKENDS)
def test_current_stream(backend):
    q, k, v = qkv(b=4, sq=2048, sk=2048)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what follows on another stream would read before this is written
        q2 = q * 2
        out = xattn.attention(q2, k, v, causal=True, backend=backend)
    torch.cuda.current_stream().wait_stream(stream)
    want = xattn.attention((q * 2), k, v, causal=True, backend=backend)
    assert torch.equal(out, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_replays_with_other_contents(backend):
    q, k, v, table, lengths = paged()
    xattn.attention_paged(q, k, v, table, lengths, causal=True, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = xattn.attention_paged(q, k, v, table, lengths, causal=True, backend=backend)
    for new in ([1, 2, 3], [48, 16, 5], [0, 17, 1]):
        lengths.copy_(torch.tensor(new))
        q.normal_()
        graph.replay()
        want = xattn.attention_paged(q, k, v, table, lengths, causal=True, backend=backend)
        assert torch.equal(out, want)


def test_dropout_in_a_graph_draws_anew_and_backward_shares_the_mask():
    q, k, v = qkv(sq=64, sk=64, grad=True, dtype=torch.float32)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            out = xattn.attention(q, k, v, dropout_p=0.5)
            torch.autograd.grad(out.sum(), v)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = xattn.attention(q, k, v, dropout_p=0.5)
        (dv,) = torch.autograd.grad(out.sum(), v)
    results = []
    for _ in range(3):
        graph.replay()
        results.append((out.clone(), dv.clone()))
        # out is linear in v: sum(out) = <dv, v> holds only if both used one mask
        torch.testing.assert_close(
            results[-1][0].sum().double(), (results[-1][1] * v).sum().double(), rtol=1e-3, atol=1e-2
        )
    assert not torch.equal(results[0][0], results[1][0]) and not torch.equal(results[1][0], results[2][0])


def test_bad_values_set_the_status_and_harm_nothing():
    q, k, v, table, lengths = paged()
    guard = k.clone()
    table[0, 1] = 1 << 30
    out = xattn.attention_paged(q, k, v, table, lengths, causal=True)
    assert torch.isfinite(out).all()
    with pytest.raises(xattn.DeviceValueError, match="page_table"):
        xattn.check_errors()
    xattn.check_errors()  # cleared
    table[0, 1] = 1
    lengths[0] = 47
    new = torch.randn(3, 4, 2, 64, device=CUDA, dtype=torch.bfloat16)
    xattn.attention_paged(
        torch.randn(3, 4, 4, 64, device=CUDA, dtype=torch.bfloat16), k, v, table, lengths, k_new=new, v_new=new
    )
    with pytest.raises(xattn.DeviceValueError, match="no room"):
        xattn.check_errors()
    assert torch.equal(k[2, 15], new[0, 0])  # the one with room
    untouched = [p for p in range(11) if p not in (2, 4, 5)]
    assert torch.equal(k[untouched], guard[untouched])
    cu = torch.tensor([0, 50, 20, 1 << 30], device=CUDA, dtype=torch.int32)
    args = varlen()
    out = xattn.attention_varlen(args[0], args[1], args[2], cu, cu, 64, 64)
    assert torch.isfinite(out).all()
    with pytest.raises(xattn.DeviceValueError, match="cu_seqlens"):
        xattn.check_errors()


def test_validate_device_raises_at_the_call(monkeypatch):
    monkeypatch.setenv("XATTN_VALIDATE", "device")
    q, k, v, table, lengths = paged()
    lengths[1] = -4
    with pytest.raises(xattn.DeviceValueError, match="seqlens_k"):
        xattn.attention_paged(q, k, v, table, lengths)


def test_fallback_warns_once_per_problem():
    q, k, v = qkv(d=24, h=2, dtype=torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            xattn.attention(q, k, v, causal=True)
        xattn.attention(q, k, v, causal=True, backend="sdpa")
    found = [w for w in caught if issubclass(w.category, xattn.FallbackWarning)]
    assert len(found) == 1 and "sm90" in str(found[0].message)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_index_arithmetic(backend):
    """An explicit mask of more than 2^32 elements, and batches beyond the grid's limit, forward and backward."""
    s = 73728
    q, k, v = (torch.randn(1, s, 1, 16, device=CUDA, dtype=torch.float16) for _ in range(3))
    mask = torch.ones(s, s, dtype=torch.bool, device=CUDA)
    mask[:, s // 2 :] = False
    out = xattn.attention(q, k, v, attn_mask=mask, backend=backend)
    want = xattn.attention(q[:, -64:], k[:, : s // 2], v[:, : s // 2], backend="reference")
    torch.testing.assert_close(out[:, -64:], want, rtol=2e-3, atol=2e-3)
    del mask
    q, k, v = (torch.randn(65536, 4, 8, 64, device=CUDA, dtype=torch.float16) for _ in range(3))
    out = xattn.attention(q, k, v, backend=backend)
    want = xattn.attention(q[-3:], k[-3:], v[-3:], backend="reference")
    torch.testing.assert_close(out[-3:], want, rtol=2e-3, atol=2e-3)
    q, k, v = (torch.randn(8300, 1, 16, 128, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    grads = torch.autograd.grad(xattn.attention(q, k, v, backend=backend).sum(), (q, k, v))
    assert all(torch.isfinite(g).all() for g in grads) and torch.equal(grads[2], torch.ones_like(v))


def _options(**options):
    return options


FLEX_CASES = {
    "window": _options(causal=True, window=(31, None)),
    "window right": _options(window=(7, 9)),
    "softcap": _options(softcap=5.0, causal=True),
    "alibi": _options(alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4])),
    "score_mod": _options(score_mod=lambda s, b, h, i, j: s + 0.01 * (j - i)),
    "mask_mod": _options(mask_mod=lambda b, h, i, j: (j % 3 != 1) & (i + b != 2)),
    "all": _options(
        causal=True,
        window=(50, None),
        softcap=5.0,
        alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4]),
        seqused_k=torch.tensor([0, 90]),
        score_mod=lambda s, b, h, i, j: s * 0.5,
        mask_mod=lambda b, h, i, j: j % 5 != 1,
    ),
}


@pytest.mark.parametrize("name", FLEX_CASES)
def test_flex_agrees_with_the_reference(name):
    kwargs = {n: x.to(CUDA) if isinstance(x, torch.Tensor) else x for n, x in FLEX_CASES[name].items()}
    q, k, v = qkv(grad=True)
    assert xattn.explain(q, k, v, backend="flex", **kwargs).backend == "flex"
    results = {}
    for backend in ("flex", "reference"):
        out, lse = xattn.attention(q, k, v, return_lse=True, backend=backend, **kwargs)
        grads = torch.autograd.grad(
            (out, lse[lse > -1e30]), (q, k, v), (torch.ones_like(out), torch.ones_like(lse[lse > -1e30]))
        )
        results[backend] = (out, lse, *grads)
    for got, want in zip(*results.values(), strict=True):
        torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)


def test_flex_captured_tensor_and_new_numbers_do_not_recompile():
    table = torch.randn(4, device=CUDA)
    q, k, v = qkv()
    for left in (3, 17, 40):
        got = xattn.attention(q, k, v, window=(left, 0), score_mod=lambda s, b, h, i, j: s + table[h], backend="flex")
        want = xattn.attention(
            q, k, v, window=(left, 0), score_mod=lambda s, b, h, i, j: s + table[h], backend="reference"
        )
        torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)
        table.add_(1.0)
