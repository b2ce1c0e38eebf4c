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
from small_calls import image_of, queued_call  # noqa: E402

from xattn.kernel_call import LaunchError  # noqa: E402
from xattn.launch_library import Library  # noqa: E402

library = Library(Path(library_path))
call = queued_call(image_of(vendor, rest[1].encode() if rest else b"code"))
number = torch.full((16,), -7, dtype=torch.int64)
try:
    library.prepare(call)([number])
    found = {"error": "", "queue": int(number.view(torch.int32)[0])}
except LaunchError as error:
    found = {"error": str(error)}
print(json.dumps(found))
