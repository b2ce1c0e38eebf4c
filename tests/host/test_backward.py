"""The backward kernels, through emulated backends, against float64 autograd of the oracle."""

from __future__ import annotations

import cases
import pytest
import torch

import xattn


def randn(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def qkv(b=1, sq=65, sk=97, h=2, hk=1, d=64, dv=None, dtype=torch.bfloat16):
    shapes = ((b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv or d))
    return dict(zip("qkv", (randn(*s, dtype=dtype, seed=n) for n, s in enumerate(shapes)), strict=True))


def checked(target, tensors, kind="attention", wants=("q", "k", "v"), **other):
    """Results and gradients are right, and native."""
    call = cases.Call(kind, dict(tensors), other, tuple(wants))
    args, kwargs = call.arguments({n: x.detach().requires_grad_(n in wants) for n, x in tensors.items()})
    plan = xattn.explain(*args, kind=kind, backend=target.backend, **kwargs)
    assert plan.native and "backward" in dict(plan.config), plan
    cases.check(call, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_dtypes(target, dtype, causal):
    checked(target, qkv(dtype=dtype), causal=causal)
