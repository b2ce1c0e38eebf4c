"""What is AMD's alone: calls that the backend `cdna` describes for an MI300X, streams and devices, HIP's errors, over
the stand-in fake_hip.cpp. Prints what happened as JSON.

    python scenarios_amd.py LIBRARY FAKE_DRIVER FAKE_TORCH_HIP KFD_ROOT FOLDER
"""

from __future__ import annotations

import ctypes
import json
import sys
from dataclasses import replace
from pathlib import Path

library_path, fake_path, torch_hip_path, kfd_root, folder = sys.argv[1:]
fake = ctypes.CDLL(fake_path)
fake.fake_stream_of_launch.restype = ctypes.c_uint64

import torch  # noqa: E402
from small_calls import error  # noqa: E402

import xattn  # noqa: E402
from xattn import device, forward_call, jit, launch  # noqa: E402
from xattn.images import Image, ImageSpec  # noqa: E402
from xattn.kernel_call import Call  # noqa: E402
from xattn.launch_library import Library  # noqa: E402
from xattn.launch_params import ForwardParams, Operand  # noqa: E402

library = Library(Path(library_path))
found: dict[str, object] = {}
chosen: list[Image] = []
calls: list[Call] = []


class Noting:
    """The launcher, which notes what it is asked for."""

    def prepare(self, call: Call):
        calls.append(call)
        return library.prepare(call)

    def description(self) -> str:
        return library.description()


def choose(entry: str, fields: forward_call.Fields, arch: str):
    """The host's build of the kernel that is asked for, as the driver's stand-in takes it."""
    assert (entry.partition("/")[0], arch) == ("arch", "gfx942")
    kind = Path(entry).stem
    spec = ImageSpec(f"arch/host/{kind}_cdna.cpp", fields, "host-cdna")
    path = Path(folder, f"{spec.key()}.so")
    if not path.exists():
        path.write_bytes(jit.build(spec, jit.HostCompiler()).code)
    chosen.append(Image(spec.key(), arch, "hsaco", spec.name(), "a compiler 1.0", str(path).encode()))
    return chosen[-1], None


# The CPU passes for the MI300X of a KFD tree.
mi300x = next(d for d in device.survey(root=Path(kfd_root)).devices if d.vendor == "amd")
found["device"] = [mi300x.arch, mi300x.name, mi300x.sm_count, mi300x.warp_size, mi300x.smem_bytes]
for place in (torch.device("cpu"), torch.device("cpu:0"), "cpu"):
    device._known[place] = mi300x
forward_call.choose = choose
launch._chosen[""] = Noting()


def difference(got, truth) -> float:
    return max((a.float() - b.float()).abs().max().item() for a, b in zip(got, truth, strict=True))


torch.manual_seed(0)
q = torch.randn(2, 70, 4, 64).bfloat16()
k, v = (torch.randn(2, 90, 2, 64).bfloat16() for _ in range(2))
options = {"causal": True, "window": (40, None), "return_lse": True}
found["plan"] = xattn.explain(q, k, v, **options).backend
got = xattn.attention(q, k, v, backend="cdna", **options)
found["forward"] = difference(got, xattn.attention(q, k, v, backend="reference", **options))
found["shape"] = [fake.fake_shape(n) for n in range(7)]
again = xattn.attention(q.clone(), k, v, backend="cdna", **options)
found["again"] = torch.equal(again[0], got[0]) and torch.equal(again[1], got[1])

# Decode: split, so that a work queue counts those that have ended.
cache_k, cache_v = (torch.randn(40, 16, 2, 64).bfloat16() for _ in range(2))
table = torch.randperm(40, dtype=torch.int32).view(2, 20)
lengths = torch.tensor([301, 77], dtype=torch.int32)
paged = (q[:, :1].contiguous(), cache_k, cache_v, table, lengths)
launches = fake.fake_launches()
got = xattn.attention_paged(*paged, num_splits=2, return_lse=True, backend="cdna")
found["decode"] = difference(got, xattn.attention_paged(*paged, return_lse=True, backend="reference"))
found["splits"] = [calls[-1].params.num_splits, calls[-1].queue is not None, fake.fake_launches() - launches]


# Errors of HIP, each where it appears; afterwards the same call works.
example = calls[0]
inputs = [q, k, v]
errors: dict[str, list[str]] = {}
for name, status in (
    ("hipGetDevice", 100),
    ("hipModuleLoadData", 2),
    ("hipModuleLoadData", 209),
    ("hipModuleLoadData", 200),
    ("hipModuleGetFunction", 500),
    ("hipModuleLaunchKernel", 719),
    ("hipModuleLaunchKernel", 9),
):
    fresh = replace(example, image=replace(example.image, key=f"{name}{status}"))
    fake.fake_fail(name.encode(), status)
    errors[f"{name} {status}"] = [error(lambda c=fresh: library.prepare(c)(inputs)) for _ in range(2)]
found["errors"] = errors
fake.fake_devices(0)
found["no_device"] = error(lambda: library.prepare(replace(example, image=replace(example.image, key="none"))))
fake.fake_devices(2)

# A device other than the current one, and torch's current stream of it. Only where torch has no GPU of its own to ask.
found["stream"] = None
if not torch.version.cuda and not torch.version.hip:
    ctypes.CDLL(torch_hip_path)
    out = torch.zeros_like(q)
    params = ForwardParams.from_buffer_copy(example.params)
    params.out = Operand.of(out)
    on_gpu = replace(example, device=torch.device("cuda", 1), params=params, outputs=())
    on_gpu = replace(on_gpu, image=replace(example.image, key="on the second GPU"))
    library.prepare(on_gpu)(inputs)
    found["stream"] = [fake.fake_stream_of_launch(), fake.fake_device_of_launch(), fake.fake_current()]
    found["on_gpu"] = difference([out], [xattn.attention(q, k, v, backend="reference", **options)[0]])
    there = replace(on_gpu, device=torch.device("cuda", 5), image=replace(example.image, key="on the sixth GPU"))
    found["no_such_device"] = error(lambda: library.prepare(there))

print(json.dumps(found))
