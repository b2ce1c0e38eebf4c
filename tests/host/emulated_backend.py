"""The real backends `sm80` and `cdna`, planning and parameter block included, with the kernel body run on the CPU: as
wave32 with mma.m16n8k16, and as wave64 with MFMA 16x16x16."""

from __future__ import annotations

import ctypes
import math

from xattn import forward_call, jit
from xattn.device import Device
from xattn.images import Image, ImageSpec, Store
from xattn.kernel_call import filled

DEVICES = {
    "sm80": Device("nvidia", "sm_80", sm_count=108, warp_size=32),
    "cdna": Device("amd", "gfx942", sm_count=304, warp_size=64),
}


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
                out.fill_(math.nan if out.is_floating_point() else 85)
            if call.queue is not None:
                ctypes.c_int32.from_address(ctypes.addressof(params) + call.queue).value = 5
            message = ctypes.create_string_buffer(512)
            blocks = call.shape.grid[0]
            assert not run(ctypes.addressof(params), blocks, blocks, message, len(message)), message.value.decode()
            return outputs

        return prepared

    def description(self) -> str:
        return "the host"
