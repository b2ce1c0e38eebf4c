"""Drives the compiled launcher over a stand-in for a driver (fake_cuda.cpp, fake_hip.cpp) and prints what happened as
JSON.

    python scenarios.py VENDOR LIBRARY FAKE_DRIVER HOST_KERNEL

In a process of its own: the stand-in takes the name of the vendor's driver.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

vendor, library_path, fake_path, kernel_path = sys.argv[1:]
nvidia = vendor == "nvidia"
fake = ctypes.CDLL(fake_path)  # its soname is the driver's: everybody's dlopen of that finds this one

import torch  # noqa: E402
from small_calls import MapParams, error, image_of, queued_call  # noqa: E402

from xattn.images import Image  # noqa: E402
from xattn.kernel_call import Call, ImageRefused, LaunchError, Output, Shape, TensorMap, slot  # noqa: E402
from xattn.launch_library import Library  # noqa: E402
from xattn.launch_params import ForwardParams, Operand  # noqa: E402

library = Library(Path(library_path))
found: dict[str, object] = {}


def image(code: bytes, key: str = "host") -> Image:
    return image_of(vendor, code, key)


def call(q, k, v, return_lse: bool = True) -> Call:
    batch, seqlen, heads, dim = q.shape
    p = ForwardParams(
        q=Operand.of(q), k=Operand.of(k), v=Operand.of(v), out=Operand.dense(q.shape),
        batch=batch, sequences=batch, heads_q=heads, heads_kv=k.shape[2], seqlen_q=seqlen, seqlen_k=k.shape[1],
        head_dim=dim, head_dim_v=dim, scale=dim**-0.5 * 1.4426950408889634, window_left=-1, window_right=-1,
        m_blocks=-(-seqlen // 64), lse_head_stride=seqlen, lse_batch_stride=seqlen * heads,
    )  # fmt: skip
    p.order_tiles(3)
    outputs = [Output(slot(ForwardParams, "out"), tuple(q.shape), q.dtype)]
    if return_lse:
        outputs.append(Output(slot(ForwardParams, "lse"), (batch, heads, seqlen), torch.float32))
    shape = Shape((batch * heads * p.m_blocks, 1, 1), (128 if nvidia else 256, 1, 1), 24576)
    slots = tuple(slot(ForwardParams, n) for n in "qkv")
    code = image(kernel_path.encode())
    return Call(code, "xattn_forward", torch.device("cpu"), shape, p, slots, tuple(outputs), 3)


torch.manual_seed(0)
q = torch.randn(2, 70, 4, 64).bfloat16()
k, v = (torch.randn(2, 90, 2, 64).bfloat16() for _ in range(2))
wanted = torch.nn.functional.scaled_dot_product_attention(
    *(t.float().transpose(1, 2) for t in (q, k, v)), enable_gqa=True
).transpose(1, 2)

# The same call on these tensors, and on others.
first = call(q, k, v)
prepared = library.prepare(first)
out, lse = prepared([q, k, v])
found["error"] = (out.float() - wanted).abs().max().item()
found["dtypes"] = [str(out.dtype), str(lse.dtype)]
found["strides"] = [list(out.stride()), list(lse.stride())]
again = prepared([q.clone(), k.clone(), v.clone()])
found["again"] = torch.equal(again[0], out) and again[0].data_ptr() != out.data_ptr()
found["shape"] = [fake.fake_shape(n) for n in range(7)]
library.prepare(first)
found["modules"] = fake.fake_modules()
found["left"] = fake.fake_depth() if nvidia else fake.fake_current()
found["without_lse"] = len(library.prepare(call(q, k, v, return_lse=False))([q, k, v]))

# An input that is not aligned: nothing is launched.
launches = fake.fake_launches()
odd = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
found["unaligned"] = [len(prepared([odd, k, v])), fake.fake_launches() - launches]

# Errors.
# The head of an ELF file for gfx90a.
other = b"refuse" if nvidia else b"\x7fELF".ljust(18, b"\0") + b"\xe0".ljust(30, b"\0") + b"\x3f\0\0\0"
found["refused"] = error(lambda: library.prepare(replace(first, image=image(other, "other"))))
found["refused_type"] = issubclass(ImageRefused, LaunchError)
found["no_kernel"] = error(lambda: library.prepare(replace(first, symbol="nothing")))
large = replace(first, shape=replace(first.shape, shared_bytes=1 << 20))
found["shared"] = error(lambda: library.prepare(large)([q, k, v]))
found["no_device"] = error(lambda: library.prepare(replace(first, device=torch.device("cpu", 7))))
broken = replace(first, symbol="xattn_fail")
found["launch"] = error(lambda: library.prepare(broken)([q, k, v]))
found["too_few"] = error(lambda: prepared([q, k]))
handle = prepared._handle
prepared = None
gc.collect()
found["forgotten"] = error(lambda: torch.ops.xattn.launch(handle, [q, k, v]))


# Work queues: one for each stream, one for each captured launch, until there is none.
fake.fake_stream.argtypes = [ctypes.c_uint64, ctypes.c_int]
number = torch.zeros(16, dtype=torch.int64)
queued = library.prepare(queued_call(image(kernel_path.encode())))


def queue_of(stream: int, capturing: int = 0) -> int:
    fake.fake_stream(stream, capturing)
    fake.fake_param_bytes(ctypes.sizeof(MapParams))
    number.fill_(-7)
    queued([number])
    if capturing:
        assert int(number[0]) == -7, "it runs while it is captured"
        fake.fake_replay()
        fake.fake_forget_graph()
    return int(number.view(torch.int32)[0])


found["queues"] = [queue_of(5), queue_of(6), queue_of(5), queue_of(5, 1), queue_of(5, 1), queue_of(6)]
found["no_queue"] = [[queue_of(n) for n in range(600)][-1], [queue_of(5, 1) for _ in range(4000)][-1], queue_of(5)]

# Graphs: what is captured runs at the replay, on the contents of then.
fake.fake_stream(5, 1)
fake.fake_param_bytes(ctypes.sizeof(ForwardParams))
contents = [t.clone() for t in (q, k, v)]
captured = library.prepare(first)(contents)
captured[0].fill_(7.0)
replays = []
for change in (1.0, -2.0):
    contents[2].copy_(v * change)
    replays.append([fake.fake_replay(), (captured[0].float() - change * wanted).abs().max().item()])
fake.fake_forget_graph()
fake.fake_stream(5, 0)
found["graph"] = replays

# Launch attributes and tensor maps.
seen = torch.zeros(16, dtype=torch.int64)
tensor_map = TensorMap(MapParams.map.offset, 1, 9, (64, 70, 4), (2, 512, 128), (64, 32, 1), 3, 3)
maps = Call(
    image(kernel_path.encode()), "xattn_copy_map", torch.device("cpu"), Shape((1, 1, 1), (1, 1, 1), 0),
    MapParams(), (0, 8), (), 0, maps=(tensor_map,),
)  # fmt: skip
if nvidia:
    special = replace(first, shape=replace(first.shape, cluster=(2, 1, 1), overlap=True))
    library.prepare(special)([q, k, v])
    found["attributes"] = [fake.fake_launches_ex(), fake.fake_attributes()]
    library.prepare(maps)([seen, q])
    found["map"] = [seen[0].item() == q.data_ptr(), *seen[1:8].tolist()]
else:
    found["map"] = error(lambda: library.prepare(maps)([seen, q]))

# Threads.
shared = library.prepare(first)
results: list[bool] = []


def work() -> None:
    for _ in range(5):
        results.append(torch.equal(shared([q, k, v])[0], out))


threads = [threading.Thread(target=work) for _ in range(4)]
for t in threads:
    t.start()
for t in threads:
    t.join()
found["threads"] = [len(results), all(results)]
print(json.dumps(found))
