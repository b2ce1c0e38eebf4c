"""What the body of a configuration must hold, by arithmetic."""

from __future__ import annotations

from xattn.backends import cdna, sm80, sm90
from xattn.forward_call import CACHES
from xattn.images import ImageSpec


def of_config(spec: ImageSpec, lanes: int) -> dict[str, int]:
    """What the body of a configuration must hold, its loops unrolled: 16 x 16 x 16 products of a warp (Hopper's: of a
    warpgroup; of 8-bit floats twice as deep), fragments read from shared memory, bytes of shared memory."""
    c = {name: int(value) for name, value in spec.config if not isinstance(value, str)}
    if "num_warpgroups" in c:  # Hopper's: operands come from shared memory as they are; one warpgroup more copies
        products = 4 * (c["tile_n"] // 16) * ((c["head_dim"] + c["head_dim_v"]) // 16)
        if dict(spec.config)["element"] == "e4m3":
            products //= 2
        threads = 4 * lanes * (c["num_warpgroups"] + 1)
        return {"products": products, "fragments": 0, "shared": sm90.shared_bytes(spec.config), "threads": threads}
    if "backward" in spec.entry:
        return of_backward(spec) | {"fragments": 0, "threads": lanes * c["num_warps"]}
    decode = "tile_m" not in c  # every warp has all the rows
    rows, keys = 1 if decode else c["tile_m"] // (16 * c["num_warps"]), c["tile_n"] // 16
    dims = [c["head_dim"] // 16, c["head_dim_v"] // 16]
    at_once = 2 if decode and dict(spec.config)["cache"] in CACHES.values() else 1  # fragments of keys or values
    body = (cdna if spec.arch.startswith("gfx") else sm80).DECODE
    return {
        "products": rows * keys * sum(dims),
        "fragments": dims[0] * rows + keys * sum(dims) // at_once,
        "shared": body.shared_bytes(spec.config)
        if decode
        else 32 * (c["tile_m"] * max(dims) + c["tile_n"] * sum(dims)),
        "threads": lanes * c["num_warps"],
    }


def has_products(spec: ImageSpec) -> bool:
    """Whether its kernel multiplies matrices, so that the others can be asked."""
    return not any(name in spec.entry for name in ("append", "backward_rows"))


def of_backward(spec: ImageSpec) -> dict[str, int]:
    """16 x 16 x 16 products of a warp for one tile of a backward kernel's walk, and bytes of shared memory."""
    c = {name: int(value) for name, value in spec.config if not isinstance(value, str)}
    d, dv, stages = c["head_dim"], c["head_dim_v"], c["num_stages"]
    groups = c["tile_m"] * c["tile_n"] // (256 * c["num_warps"])
    keys = max(64, c["tile_n"])  # of a KeptTile (kernels/dropout.h), in blocks of 64
    kept = keys // 8 * (c["tile_m"] + 8) if c.get("dropout") else 0
    if "keys" in spec.entry:  # S twice where dk and dv are made apart
        products = groups * (2 * d + 2 * dv + (d if c["parts"] == 2 else 0)) // 16
        shared = 2 * (c["tile_n"] + stages * c["tile_m"]) * (d + dv) + stages * 8 * c["tile_m"]
        shared += stages * kept
    else:
        products = groups * (2 * d + dv) // 16
        shared = 2 * (c["tile_m"] + stages * c["tile_n"]) * (d + dv) + 2 * kept
    return {"products": products, "shared": shared}
