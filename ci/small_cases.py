"""Small calls of every native configuration of this machine's GPU, for compute-sanitizer (ci/sanitize): ragged lengths,
every mask, packed sequences with rows behind the last offset, paged caches with one and with many queries."""

from __future__ import annotations

import argparse
import sys
import warnings

import torch

import xattn
from xattn.backends import REGISTRY


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def options(heads: int, sq: int, sk: int) -> list[dict]:
    """One of each feature, and some together."""
    added = randn(1, heads, sq, sk)
    return [
        {},
        {"causal": True, "return_lse": True},
        {"window": (20, 3)},
        {"softcap": 5.0, "alibi_slopes": torch.rand(heads, device="cuda"), "causal": True},
        {"sinks": randn(heads, dtype=torch.float32), "seqused_k": torch.tensor([sk, 3], device="cuda")},
        {"attn_mask": torch.rand(sq, sk, device="cuda") > 0.3},
        {"attn_mask": added},
        {"attn_mask": added.float(), "softcap": 3.0},
    ]


def main() -> int:
    native = [b.name for b in REGISTRY if b.native]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", nargs="+", choices=native, default=native, help="only these (default: every one)")
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float16"), default=("bfloat16", "float16"))
    args = parser.parse_args()
    warnings.simplefilter("error", xattn.FallbackWarning)
    done = 0
    for backend in args.backend:
        for dtype in (getattr(torch, name) for name in args.dtype):
            for d, dv in ((64, 64), (40, 72), (96, 96), (128, 128), (192, 128), (256, 256)):
                q = randn(2, 70, 4, d, dtype=dtype)
                k, v = randn(2, 137, 2, d, dtype=dtype), randn(2, 137, 2, dv, dtype=dtype)
                for kwargs in options(4, 70, 137):
                    if not xattn.supported(q, k, v, backend=backend, **kwargs):
                        continue
                    xattn.attention(q, k, v, backend=backend, **kwargs)
                    done += 1
                cu_q, cu_k = (torch.tensor(x, device="cuda") for x in ([0, 3, 3, 60], [0, 90, 100, 130]))
                if xattn.supported(q[0], k[0], v[0], cu_q, cu_k, 70, 137, kind="varlen", backend=backend):
                    xattn.attention_varlen(q[0], k[0], v[0], cu_q, cu_k, 70, 137, causal=True, backend=backend)
                    done += 1
                caches = [randn(40, 8, 2, n, dtype=dtype) for n in (d, dv)]
                table, lengths = torch.randperm(40, device="cuda").view(2, 20), torch.tensor([150, 9], device="cuda")
                for few in (q[:, :1], q[:, :7], q):
                    if xattn.supported(few, *caches, table, lengths, kind="paged", backend=backend):
                        xattn.attention_paged(few, *caches, table, lengths, causal=True, backend=backend)
                        done += 1
    torch.cuda.synchronize()
    xattn.check_errors()
    print(f"{done} calls")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
