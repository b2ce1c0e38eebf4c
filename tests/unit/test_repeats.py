"""Calls that come again: what belongs to the question, what is kept, and who must take the long way. By a stand-in for
the launch, on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from xattn import forward_call, repeats
from xattn.images import Image
from xattn.inputs import Inputs
from xattn.kernel_call import Call, Shape
from xattn.launch_params import ForwardParams


def qkv(b=2, s=5, h=4, d=16, dtype=torch.bfloat16):
    return tuple(torch.randn(b, s, h, d).to(dtype) for _ in range(3))


def dense(**changes) -> Inputs:
    q, k, v = qkv()
    return replace(Inputs("attention", q, k, v), **changes)


def packed(**changes) -> Inputs:
    q, k, v = (t[0] for t in qkv())
    cu = torch.tensor([0, 2, 5])
    given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 3, "max_seqlen_k": 3}
    return replace(Inputs("varlen", q, k, v, **given), **changes)


@pytest.fixture(autouse=True)
def fresh():
    repeats.forget()
    yield
    repeats.forget()


def launch(x: Inputs, **more) -> list:
    """Makes the call for the first time; returns the list in which later launches are noted."""
    noted: list[list[torch.Tensor]] = []

    def prepared(inputs):
        noted.append(inputs)
        return [torch.zeros(1)]

    forward = forward_call.describe(x, 64, 1, more.get("direct", lambda t: t))
    image = Image("k", "sm_80", "cubin", "n", "c", b"")
    call = Call(
        image, "f", x.q.device, Shape((1, 1, 1), (1, 1, 1), 0), ForwardParams(), forward.slots(), forward.outputs
    )
    repeats.launch_first(x, call, forward.tensors, prepared)
    noted.clear()
    return noted


def ask(x: Inputs):
    tensors = repeats.asked(x)
    return repeats.answer(x.kind, tensors, tuple(getattr(x, name) for name in repeats.OPTIONS))


@pytest.mark.parametrize("make", [dense, packed])
def test_the_same_question_of_other_tensors(make):
    noted = launch(make(causal=True))
    other = make(causal=True)
    assert ask(other) is not None
    assert [t.data_ptr() for t in noted[0][:3]] == [t.data_ptr() for t in (other.q, other.k, other.v)]


EVERYTHING = {
    "attn_mask": torch.ones(5, 5, dtype=torch.bool),
    "alibi_slopes": torch.rand(4),
    "sinks": torch.rand(4),
    "seqused_k": torch.tensor([3, 4]),
}


@pytest.mark.parametrize("make", [dense, packed])
def test_every_tensor_is_handed_over_in_the_order_of_the_slots(make):
    given = EVERYTHING if make is dense else EVERYTHING | {"attn_mask": torch.ones(3, 3, dtype=torch.bool)}
    x = make(**given)
    noted = launch(x)
    assert ask(x) is not None
    forward = forward_call.describe(x, 64, 1, lambda t: t)
    assert [t.data_ptr() for t in noted[0]] == [t.data_ptr() for t in forward.tensors.values()]
    names = {"mask": "attn_mask", "alibi": "alibi_slopes"}
    offsets = {getattr(ForwardParams, name).offset: names.get(name, name) for name, _ in ForwardParams._fields_}
    assert [offsets[n] for n in forward.slots()] == list(forward.tensors)


CHANGES = [
    {"causal": True},
    {"window_left": 3},
    {"window_right": 0},
    {"softmax_scale": 0.3},
    {"softcap": 2.0},
    {"return_lse": True},
    {"backend": "sm80"},
    {"sinks": torch.zeros(4)},
    {"alibi_slopes": torch.zeros(4)},
    {"alibi_slopes": torch.zeros(2, 4)},
    {"seqused_k": torch.tensor([1, 2])},
    {"seqused_k": torch.tensor([1, 2], dtype=torch.int32)},
    {"attn_mask": torch.zeros(5, 5)},
    {"attn_mask": torch.zeros(5, 5, dtype=torch.bool)},
    {"attn_mask": torch.zeros(1, 5)},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: next(iter(c)))
def test_another_question_is_not_answered(change):
    launch(dense())
    assert ask(dense()) is not None
    assert ask(dense(**change)) is None
    launch(dense(**change))
    assert ask(dense(**change)) is not None


@pytest.mark.parametrize(
    "other",
    [
        lambda t: t[:, :4],
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.half(),
    ],
    ids=["shape", "strides", "dtype"],
)
@pytest.mark.parametrize("name", "qkv")
def test_other_tensors_are_another_question(name, other):
    x = dense()
    launch(x)
    assert ask(replace(x, **{name: other(getattr(x, name))})) is None


def test_max_seqlen_belongs_to_the_question():
    launch(packed())
    assert ask(packed(max_seqlen_q=4)) is None and ask(packed(max_seqlen_k=4)) is None and ask(packed()) is not None


def test_what_was_copied_or_is_more_than_one_launch_is_not_kept():
    launch(dense(), direct=lambda t: t.clone())
    assert ask(dense()) is None
    launch(dense(sinks=torch.zeros(4, dtype=torch.float64)))
    assert ask(dense(sinks=torch.zeros(4, dtype=torch.float64))) is None
    launch(dense(dropout_p=0.5, dropout_rng=torch.zeros(2, dtype=torch.int64)))
    assert ask(dense()) is None


def test_states_in_which_the_long_way_is_taken(monkeypatch):
    x = dense()
    launch(x)
    leaf = replace(x, q=x.q.clone().requires_grad_())
    assert ask(leaf) is None
    with torch.no_grad():
        assert ask(leaf) is not None
    assert ask(replace(x, q=torch.nn.Parameter(x.q))) is None
    with FlopCounterMode(display=False):
        assert ask(x) is None
    assert torch.vmap(lambda _: torch.tensor(ask(x) is None))(torch.zeros(2)).all()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.float16)
    assert ask(x) is None
    monkeypatch.undo()
    monkeypatch.setenv("XATTN_VALIDATE", "device")
    assert ask(x) is None


def test_tensors_without_strides_and_what_cannot_be_hashed(monkeypatch):
    x = dense()
    launch(x)
    assert ask(replace(x, q=x.q.to_sparse())) is None
    assert ask(replace(x, window_left=[3])) is None


def test_the_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(repeats, "_MOST", 3)
    for n in range(8):
        launch(dense(softmax_scale=float(n + 1)))
        assert len(repeats._known) <= 3
        assert ask(dense(softmax_scale=float(n + 1))) is not None
