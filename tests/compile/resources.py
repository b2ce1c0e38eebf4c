"""What a compiled image uses: registers, spills, shared memory, and the instructions in its machine code."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from compile import machine_code
from compile.machine_code import Instruction
from compile.nvrtc import file_of

from xattn.images import Image
from xattn.jit import COMPILERS, Clang, spilled_bytes


class Resources(NamedTuple):
    """Of one kernel. ``spilled``: bytes that ptxas stores and loads again, registers on AMD; ``stack``: bytes of local
    memory (scratch) a thread; ``shared``: bytes of static shared memory, the kernel's own tiles being dynamic;
    ``accumulation``: AMD's accumulation registers, which are among ``registers``; ``code``: in the order of
    addresses."""

    registers: int
    spilled: int
    stack: int
    shared: int
    instructions: Counter
    accumulation: int
    code: tuple[Instruction, ...]


def run(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command[0]}: {done.stderr}"
    return done.stdout


def of_nvidia(image: Image) -> Resources:
    """Of a cubin, by cuobjdump and nvdisasm."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image.code)
        file.flush()
        usage = run(file_of("nvidia-cuda-cuobjdump", "cuobjdump"), "--dump-resource-usage", file.name)
        # Neither data flow nor columns are read: without them nvdisasm takes a quarter less.
        plain = ("--print-code", "--no-dataflow", "--print-raw")
        listing = run(file_of("nvidia-cuda-nvdisasm", "nvdisasm"), *plain, file.name)
    number = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    code = machine_code.of_nvidia(listing)
    stack = number["STACK"] + number["LOCAL"]
    names = Counter(i.name for i in code)
    return Resources(number["REG"], spilled_bytes(image), stack, number["SHARED"], names, 0, tuple(code))


def of_amd(image: Image) -> Resources:
    """Of an hsaco, by its notes and llvm-objdump. Registers: vector and accumulation registers of a lane together."""
    with tempfile.NamedTemporaryFile(suffix=".hsaco") as file:
        file.write(image.code)
        file.flush()
        notes = run(llvm_tool("llvm-readelf"), "--notes", file.name)
        listing = run(llvm_tool("llvm-objdump"), "--disassemble", f"--mcpu={image.arch}", file.name)
    number = {name: int(value) for name, value in re.findall(r"\.(\w+):\s+(\d+)$", notes, re.MULTILINE)}
    code = machine_code.of_amd(listing)
    return Resources(
        number["vgpr_count"],  # accumulation registers are counted in it (AMDGPU usage guide, code object metadata)
        number["vgpr_spill_count"] + number["sgpr_spill_count"],
        number["private_segment_fixed_size"],
        number["group_segment_fixed_size"],
        Counter(i.name for i in code),
        number["agpr_count"],
        tuple(code),
    )


def count(resources: Resources, start: str) -> int:
    """Instructions whose name starts so."""
    return sum(n for name, n in resources.instructions.items() if name.startswith(start))


# ---------------------------------------------------------------- clang for AMD
LEAST_CLANG = 22  # what the gates were measured with; 20 is the first that knows gfx950


def amd_compiler() -> Clang:
    return next(c for c in COMPILERS if isinstance(c, Clang))


def llvm_tool(name: str) -> Path:
    """A tool of the compiler's own LLVM."""
    program = amd_compiler().program()
    assert program is not None
    return Path(program).resolve().parent / name


def missing_amd_compiler() -> str:
    """What lacks to compile for AMD and read the result; "" where nothing does."""
    compiler = amd_compiler()
    if compiler.missing():
        return compiler.missing()
    version = re.search(r"version (\d+)", compiler.version())
    if version is None or int(version[1]) < LEAST_CLANG:
        return f"{compiler.version()} is older than {LEAST_CLANG}"
    lacking = [n for n in ("llvm-readelf", "llvm-objdump", "llvm-mca", "ld.lld") if not shutil.which(llvm_tool(n))]
    return f"{', '.join(lacking)} not beside {compiler.program()}" if lacking else ""
