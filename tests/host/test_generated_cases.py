"""The generated cases of tests/cases.py through the real backends `sm80` and `cdna`, planning and parameter block
included, with the kernel body run on the CPU: as wave32 with mma.m16n8k16, and as wave64 with MFMA 16x16x16."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

import cases
import pytest
import torch

import xattn
from xattn import device, dispatch, forward_call, jit, launch, repeats
from xattn.device import Device
from xattn.images import Image, ImageSpec, Store
from xattn.kernel_call import filled

DEVICES = {
    "sm80": Device("nvidia", "sm_80", sm_count=108, warp_size=32),
    "cdna": Device("amd", "gfx942", sm_count=304, warp_size=64),
}
# Every image is compiled by the host's compiler: head dimensions of three padded sizes, one of them with a ragged end.
HEAD_DIMS = [(16, 16), (64, 64), (72, 40)]


class HostLauncher:
    """Launches on the CPU what ``choose`` gave out."""

    def __init__(self, backend: str, folder):
        self.layer, self.folder = f"host-{backend}", folder
        self.specs: dict[str, ImageSpec] = {}
        self.kernels: dict[str, ctypes.CDLL] = {}

    def choose(self, entry: str, fields: forward_call.Fields, arch: str):
        kind = entry.rpartition("/")[2].partition(".")[0]  # forward or decode
        spec = ImageSpec(f"arch/host/{kind}_{self.layer.removeprefix('host-')}.cpp", fields, self.layer)
        self.specs[spec.key()] = spec
        return Image(spec.key(), arch, "host", spec.name(), "the host's compiler", b""), None

    def prepare(self, call):
        key = call.image.key
        if key not in self.kernels:
            image = jit.get(self.specs[key], Store(shipped=(), cache=self.folder))
            path = self.folder / f"{key}.so"
            path.write_bytes(image.code)
            run = self.kernels[key] = getattr(ctypes.CDLL(str(path)), call.symbol)
            run.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_int]
        run = self.kernels[key]

        def prepared(inputs):
            made = filled(call, inputs)
            if made is None:
                return []
            outputs, params = made
            for out in outputs:
                out.fill_(math.nan)
            if call.queue is not None:
                ctypes.c_int32.from_address(ctypes.addressof(params) + call.queue).value = 5
            message = ctypes.create_string_buffer(512)
            blocks = call.shape.grid[0]
            assert not run(ctypes.addressof(params), blocks, blocks, message, len(message)), message.value.decode()
            return outputs

        return prepared

    def description(self) -> str:
        return "the host"


@pytest.fixture(params=DEVICES)
def target(request, tmp_path_factory, monkeypatch):
    """A backend on a CPU that passes for its device."""
    backend = request.param
    launcher = HostLauncher(backend, tmp_path_factory.mktemp("generated"))
    place = cases.Target(backend, "cpu:0")  # a name of its own: what a target admits is remembered
    for name in (torch.device("cpu"), torch.device("cpu:0")):
        monkeypatch.setitem(device._known, name, DEVICES[backend])
    monkeypatch.setattr(launch, "_chosen", {"": launcher})
    monkeypatch.setattr(forward_call, "choose", launcher.choose)
    dispatch._plans.clear()
    repeats.forget()
    yield place
    dispatch._plans.clear()
    repeats.forget()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["attention", "varlen", "paged"])
def test_generated_cases(target, kind):
    able, _ = cases.values_for(kind, target)
    able = able | {"head_dims": HEAD_DIMS, "heads": [(2, 1), (1, 3), (1, 12)] if kind == "paged" else [(2, 1), (1, 3)]}
    done = 0
    for row in cases.pairwise(able):
        case = replace(cases._base(kind, target), **row)
        try:
            cases.check(cases.make(case, "cpu"), target)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
        done += 1
    assert done > 20


@pytest.mark.parametrize("mask_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_lowest_added_mask_hides_nothing(target, mask_dtype):
    """It is finite, in whatever dtype, and the same of all keys; what is -inf hides, and NaN stays NaN."""
    q, k, v = (torch.randn(1, n, 2, 16, dtype=torch.bfloat16) for n in (5, 7, 7))
    q.zero_()
    mask = torch.full((5, 7), torch.finfo(mask_dtype).min, dtype=mask_dtype)
    mask[1], mask[2, 3:], mask[3, 0] = -math.inf, -math.inf, math.nan
    out, lse = xattn.attention(q, k, v, attn_mask=mask, return_lse=True, backend=target.backend)
    for row, keys in ((0, slice(0, 7)), (2, slice(0, 3)), (4, slice(0, 7))):
        torch.testing.assert_close(out[0, row].double(), v[0, keys].double().mean(0), rtol=2e-2, atol=2e-2)
    assert not out[0, 1].any() and lse[0, :, 1].eq(-math.inf).all() and out[0, 3].isnan().all()
