"""Which configuration of Hopper's kernel a call gets: a table, chosen by head dimension, length and mask."""

from __future__ import annotations

from dataclasses import replace

import pytest

from xattn import dispatch, wgmma_backward
from xattn.backends import sm90
from xattn.device import from_arch
from xattn.problem import Problem, SizeBucket

HOPPER = from_arch("sm_90")


def chosen(problem: Problem, seqlen_q: int, seqlen_k: int | None = None) -> tuple[int, int]:
    """(num_warpgroups, tile_n) of the plan."""
    size = SizeBucket.of(2, 16, seqlen_q, seqlen_q if seqlen_k is None else seqlen_k)
    config = dict(dispatch.cached_plan(problem, size, HOPPER, "sm90").config)
    return config["num_warpgroups"], config["tile_n"]


@pytest.mark.parametrize(
    "head_dim, causal, seqlen, wanted",
    [
        (64, False, 256, (2, 128)),
        (64, False, 512, (3, 128)),
        (64, True, 1024, (2, 128)),
        (64, True, 2048, (3, 128)),
        (128, False, 2048, (2, 128)),
        (128, True, 8192, (2, 128)),
        (72, False, 8192, (2, 128)),
        (256, True, 8192, (2, 64)),
        (192, False, 512, (2, 112)),
    ],
)
def test_by_head_dim_and_length(head_dim, causal, seqlen, wanted):
    problem = Problem(head_dim=head_dim, head_dim_v=head_dim, causal=causal)
    assert chosen(problem, seqlen) == wanted
    if wanted[0] == 3:  # rows of few queries or keys would be empty
        assert chosen(problem, 16, seqlen) == chosen(problem, seqlen, 16) == (2, 128)


@pytest.mark.parametrize(
    "feature",
    [{"softcap": True}, {"alibi_slopes": True}, {"attn_mask": "bool"}, {"window": True}, {"kind": "varlen"}],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_warpgroups_serve_what_is_more_than_a_product(head_dim, feature):
    problem = Problem(head_dim=head_dim, head_dim_v=head_dim)
    assert chosen(problem, 8192)[0] == (3 if head_dim == 64 else 2) and chosen(replace(problem, **feature), 8192) == (
        2,
        128,
    )


def test_every_configuration_has_its_images_and_fits():
    images = list(sm90.BACKEND.images("sm_90a"))
    own = [s for s in images if s.entry == "arch/sm90/forward.cu"]
    assert {dict(s.config)["num_warpgroups"] for s in own} == {2, 3}
    keys = [s.key() for s in images]
    assert len(set(keys)) == len(keys)
    for spec in own:
        assert sm90.shared_bytes(spec.config) <= 227 * 1024, spec.name()
    decode = [s for s in images if s.entry == "arch/sm80/decode.cu"]
    assert {dict(s.config)["cache"] for s in decode} == {"e4m3"}, "whose instructions PTX does not use"
    assert all("backward" in s.entry for s in images if s not in own and s not in decode)


def test_the_plan_tells_what_was_measured():
    q = (2, 4096, 16, 128)
    text = str(dispatch.cached_plan(Problem(), SizeBucket.of(*q[:1], q[2], q[1], q[1]), HOPPER, "sm90"))
    assert "measured s2048" in text and "3 warpgroups of 80" in text


def paged(page_size: int, seqlen_q: int):
    problem = Problem(kind="paged", page_size=page_size, causal=True)
    return dispatch.cached_plan(problem, SizeBucket.of(2, 16, seqlen_q, 4096), HOPPER)


def test_pages_that_boxes_can_hold_are_read_by_tma():
    """A box of TMA lies in one page, at a multiple of eight rows of a tile."""
    for page_size in (8, 16, 24, 64, 256):
        plan = paged(page_size, 512)
        assert plan.backend == "sm90" and dict(plan.config)["num_warpgroups"] == 2
        assert dict(paged(page_size, 1).config)["kernel"] == "decode"
    plan = paged(12, 512)
    assert plan.backend == "sm80"
    (refusal,) = (r for name, refusals in plan.rejected if name == "sm90" for r in refusals)
    assert str(refusal) == "page_size = 12: its kernels cannot read the tensor as it lies (allowed: multiples of 8)"


GRADS = Problem(kind="varlen", grads=("q", "k", "v"), return_lse=True)


def backward_of(**changes) -> str:
    size = SizeBucket.of(2, 16, 2048, 2048, 4096)
    plan = dispatch.cached_plan(replace(GRADS, **changes), size, HOPPER, "sm90")
    return str(dict(plan.config)["backward"])


@pytest.mark.parametrize(
    "changes, tile",
    [
        ({}, "64x128"),
        ({"head_dim": 64, "head_dim_v": 64}, "128x128"),
        ({"head_dim": 40, "head_dim_v": 72}, "64x128"),
        ({"softcap": True, "sinks": True, "seqused_k": True, "causal": True, "gqa_ratio": 4}, "64x128"),
        ({"window": True, "alibi_slopes": True, "dtype": "fp16", "dtype_kv": "fp16", "dtype_out": "fp16"}, "64x128"),
    ],
    ids=str,
)
def test_the_backward_of_hoppers_own(changes, tile):
    assert backward_of(**changes) == f"arch/sm90, {tile}, dq added up in no fixed order"


@pytest.mark.parametrize(
    "changes", [{"deterministic": True}, {"head_dim": 136}, {"head_dim_v": 192}, {"attn_mask": "bool"}], ids=str
)
def test_the_shared_backward_answers_the_rest_openly(changes):
    assert backward_of(**changes).startswith("arch/sm80 compiled for sm_90a, keys ")


def test_every_configuration_of_the_backward_has_its_images_and_fits():
    own = [s for s in sm90.BACKEND.images("sm_90a") if s.entry.startswith("arch/sm90/backward")]
    parts = {part: [s for s in own if s.entry == f"arch/sm90/backward{part}.cu"] for part in ("", "_rows", "_queries")}
    # Seven pairs of head dimensions, two elements; with and without softcap and ALiBi.
    assert {part: len(found) for part, found in parts.items()} == {"": 56, "_rows": 14, "_queries": 14}
    assert all(wgmma_backward.shared_bytes(s.config) <= 227 * 1024 for s in parts[""])
