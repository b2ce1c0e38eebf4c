"""Machine code as objdump and nvdisasm list it: instructions, loops, one step of the loop that multiplies matrices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Instruction(NamedTuple):
    """``targets``: addresses that it may go to; ``falls``: whether the next instruction may follow."""

    address: int
    name: str
    targets: tuple[int, ...] = ()
    falls: bool = True


# "	s_cbranch_scc0 3235      // 0000000016E4: BF840CA3 <xattn_forward+0x3374>"
_AMD_LINE = re.compile(
    r"^\s+([a-z]\w+)(?=\s).*?//\s*([0-9A-F]+):[^<\n]*(?:<([\w.$]+)(?:\+0x([0-9a-f]+))?>)?", re.MULTILINE
)
_AMD_LABEL = re.compile(r"^([0-9a-f]{8,})\s+<([\w.$]+)>:", re.MULTILINE)
_AMD_ENDS = ("s_endpgm", "s_branch", "s_setpc_b64", "s_trap")


def of_amd(listing: str) -> list[Instruction]:
    """llvm-objdump's listing of an hsaco."""
    labels = {name: int(address, 16) for address, name in _AMD_LABEL.findall(listing)}
    found = []
    for name, address, label, offset in _AMD_LINE.findall(listing):
        branches = name.startswith(("s_branch", "s_cbranch"))
        targets = (labels[label] + int(offset or "0", 16),) if branches else ()
        found.append(Instruction(int(address, 16), name, targets, name not in _AMD_ENDS))
    return found


# "        /*0a30*/              @!P0 BRA `(.L_x_3) ;", after lines such as ".L_x_3:"
_NVIDIA_LINE = re.compile(
    r"^(\.L_x_\d+):|^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(?:[^;\n]*`\((\.L_x_\d+)\))?", re.MULTILINE
)


def of_nvidia(listing: str) -> list[Instruction]:
    """nvdisasm's listing of a cubin of one kernel."""
    labels: dict[str, int] = {}
    waiting: list[str] = []
    lines = []
    for label, address, guard, name, target in _NVIDIA_LINE.findall(listing):
        if label:
            waiting.append(label)
            continue
        labels |= dict.fromkeys(waiting, int(address, 16))
        waiting = []
        lines.append((int(address, 16), guard, name, target))
    return [
        Instruction(
            address,
            name,
            (labels[target],) if target in labels and name.startswith(("BRA", "BSYNC")) else (),
            bool(guard) or not name.startswith(("BRA", "EXIT", "RET")),
        )
        for address, guard, name, target in lines
    ]


# ---------------------------------------------------------------- loops
Block = list[Instruction]
Order = tuple[float, ...]


def main_step(code: Sequence[Instruction], value: Callable[[Iterable[Instruction]], Order]) -> Counter[str]:
    """The instructions of one step of the main loop, by name and number; empty where there is no loop.

    Of the innermost loops, and of all ways through each, it is that of the largest ``value`` (numbers that add up over
    instructions; the first one counts first).

    A way goes on where a branch only asks whether any lane is active, and passes loops within the loop once.
    """
    blocks = _blocks(code)
    loops = _loops(blocks)
    best: tuple[Order, list[int]] | None = None
    for head, body in loops:
        if any(other[1] < body for other in loops if value(_all(blocks, other[1]))[0] > 0):
            continue  # the products are in a loop within it
        found = _way(blocks, head, body, value)
        if found is not None and (best is None or found[0] > best[0]):
            best = found
    return Counter(i.name for n in (best[1] if best else []) for i in blocks[n][0])


def _all(blocks: list[tuple[Block, list[int]]], body: Iterable[int]) -> list[Instruction]:
    return [i for n in body for i in blocks[n][0]]


def _blocks(code: Sequence[Instruction]) -> list[tuple[Block, list[int]]]:
    """Basic blocks in the order of their addresses, each with the numbers of those that may follow."""
    starts = {code[0].address} | {t for i in code for t in i.targets}
    starts |= {b.address for a, b in zip(code, code[1:], strict=False) if a.targets or not a.falls}
    blocks: list[Block] = []
    for i in code:
        if i.address in starts:
            blocks.append([])
        blocks[-1].append(i)
    number = {block[0].address: n for n, block in enumerate(blocks)}
    found = []
    for n, block in enumerate(blocks):
        last = block[-1]
        follows = [number[t] for t in last.targets if t in number]
        if last.falls and n + 1 < len(blocks):
            follows.append(n + 1)
        found.append((block, follows))
    return found


def _loops(blocks: list[tuple[Block, list[int]]]) -> list[tuple[int, frozenset[int]]]:
    """(head, body) of each loop; those that share a head are one."""
    before: dict[int, set[int]] = {n: set() for n in range(len(blocks))}
    for n, (_, follows) in enumerate(blocks):
        for m in follows:
            before[m].add(n)
    bodies: dict[int, set[int]] = {}
    for n, head in _retreating(blocks):
        body, waiting = bodies.setdefault(head, {head}), [n]
        while waiting:
            m = waiting.pop()
            if m not in body:
                body.add(m)
                waiting += before[m]
    return [(head, frozenset(body)) for head, body in bodies.items()]


def _retreating(blocks: list[tuple[Block, list[int]]]) -> list[tuple[int, int]]:
    """Edges back to a block that the walk from the entry is still inside of."""
    found, state = [], {0: 1}  # 1: on the way, 2: left
    stack = [(0, iter(blocks[0][1]))]
    while stack:
        n, rest = stack[-1]
        for m in rest:
            if state.get(m) == 1:
                found.append((n, m))
            elif m not in state:
                state[m] = 1
                stack.append((m, iter(blocks[m][1])))
                break
        else:
            state[n] = 2
            stack.pop()
    return found


def _way(
    blocks: list[tuple[Block, list[int]]],
    head: int,
    body: frozenset[int],
    value: Callable[[Iterable[Instruction]], Order],
) -> tuple[Order, list[int]] | None:
    """The way of the largest value through a loop, from its head until it comes back there."""
    back = set(_retreating(blocks))
    known: dict[int, tuple[Order, list[int]] | None] = {}

    def likely(n: int) -> list[int]:
        block, follows = blocks[n]
        inside = [m for m in follows if m in body]
        if block[-1].name == "s_cbranch_execz" and n + 1 in inside and n + 1 != head:
            return [n + 1]
        return inside

    def from_here(n: int) -> tuple[Order, list[int]] | None:
        own, ends = value(blocks[n][0]), head in blocks[n][1]
        best: tuple[Order, list[int]] | None = (own, [n]) if ends else None
        for m in likely(n):
            if (n, m) in back or m == head:
                continue
            rest = known[m]
            if rest is not None:
                total = tuple(a + b for a, b in zip(own, rest[0], strict=True))
                if best is None or total > best[0]:
                    best = (total, [n, *rest[1]])
        return best

    for n in _after(blocks, head, body, back):
        known[n] = from_here(n)
    return known[head]


def _after(
    blocks: list[tuple[Block, list[int]]], head: int, body: frozenset[int], back: set[tuple[int, int]]
) -> list[int]:
    """The blocks of a loop, each behind all that follow it."""
    order: list[int] = []
    seen = {head}
    stack = [(head, iter(blocks[head][1]))]
    while stack:
        n, rest = stack[-1]
        for m in rest:
            if m in body and m not in seen and (n, m) not in back:
                seen.add(m)
                stack.append((m, iter(blocks[m][1])))
                break
        else:
            order.append(n)
            stack.pop()
    return order
