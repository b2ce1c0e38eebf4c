"""User functions asked at the ends of their indices, before a result or a token is written."""

from __future__ import annotations

import torch

from . import segments, validate
from .inputs import Inputs

_ROLES = ("score_mod", "mask_mod", "epilogue")


def functions(x: Inputs) -> None:
    """On the CPU: those that hold tensors, at the first and last index of each kind.

    So that a tensor which is too small is found in time; kernels find the rest.
    """
    given = [(role, getattr(x, role), aux) for role in _ROLES if (aux := getattr(x, f"{role}_aux"))]
    if not given or x.q.device.type != "cpu":
        return
    if x.kind != "paged":
        validate.values(x)
    heads = torch.tensor([0, x.num_heads_q - 1])
    for segment in segments.segments(x, 1):
        batch, seqlen_q, seqlen_k = segment.batch_idx, segment.extent_q, segment.extent_k
        for role, mod, aux in given:
            last = (x.head_dim_v if role == "epilogue" else seqlen_k) - 1
            if seqlen_q < 1 or last < 0:
                continue
            first = seqlen_k - seqlen_q if x.kind == "paged" else 0
            value = [] if role == "mask_mod" else [torch.zeros(len(batch), 2, 2, 2)]
            ends = torch.tensor([[first], [first + seqlen_q - 1]]), torch.tensor([0, last])
            mod.eager(*value, batch[:, None, None, None], heads[:, None, None], *ends, *aux)
