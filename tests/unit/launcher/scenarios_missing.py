"""What the compiled launcher says of a driver that is not there or lacks a function. Prints JSON.

python scenarios_missing.py VENDOR LIBRARY [FAKE_DRIVER KERNELS]
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

vendor, library_path, *rest = sys.argv[1:]
if rest:
    fake = ctypes.CDLL(rest[0])

import torch  # noqa: E402

from xattn.images import Image  # noqa: E402
from xattn.kernel_call import Call, LaunchError, Shape  # noqa: E402
from xattn.launch_library import Library  # noqa: E402


class MapParams(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("pad", ctypes.c_uint64 * 7), ("map", ctypes.c_uint64 * 16))


library = Library(Path(library_path))
arch, kind = ("sm_80", "cubin") if vendor == "nvidia" else ("gfx942", "hsaco")
code = rest[1].encode() if rest else b"code"
call = Call(
    Image("k", arch, kind, f"forward [test] for {arch}", "a compiler 1.0", code),
    "xattn_copy_map",
    torch.device("cpu"),
    Shape((1, 1, 1), (1, 1, 1), 0),
    MapParams(),
    (0,),
    (),
    0,
    queue=MapParams.map.offset,
)
number = torch.full((16,), -7, dtype=torch.int64)
try:
    library.prepare(call)([number])
    found = {"error": "", "queue": int(number.view(torch.int32)[0])}
except LaunchError as error:
    found = {"error": str(error)}
print(json.dumps(found))
