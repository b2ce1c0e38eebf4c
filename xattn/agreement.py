"""Whether the ranks of a process group called with the same: compared through the group's store, by the hosts alone, so
that no device waits, and a rank that fails tells the others why before they wait for it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

Said = dict[str, str]  # what a rank called with, by argument
_FAULT = "fault"
_MOST_KNOWN = 4096


@dataclass
class _Calls:
    """Those of one group: how many there were, what was found the same before, and keys that are still in the
    store."""

    count: int = 0
    known: set[str] = field(default_factory=set)
    posted: list[str] = field(default_factory=list)


_groups: WeakKeyDictionary[Any, _Calls] = WeakKeyDictionary()


def tell(group: Any, rank: int, fault: Exception) -> None:
    """Lets the other ranks know that this one fails here."""
    group.get_group_store().set(_key(_next(group), rank), json.dumps({_FAULT: str(fault)}))


def compare(group: Any, rank: int, world: int, said: Said, every_time: bool) -> None:
    """Raises ValueError on every rank where two said different things or one failed. What was found the same once is
    not compared again unless ``every_time``. A rank that does not come is waited for as long as the group's store
    waits."""
    number = _next(group)
    calls = _groups[group]
    words = json.dumps(said)
    if words in calls.known and not every_time:
        return
    _post(group, number, rank, said)
    store = group.get_group_store()
    keys = [_key(number, r) for r in range(world)]
    try:
        store.wait(keys)
    except RuntimeError as error:
        absent = ", ".join(str(r) for r, key in enumerate(keys) if not store.check([key]))
        raise RuntimeError(
            f"rank {absent} of the group did not make this call; allowed: the same call on every rank"
        ) from error
    everyone = [json.loads(text) for text in store.multi_get(keys)]
    for r, other in enumerate(everyone):
        if _FAULT in other:
            raise ValueError(f"rank {r} of the group failed: {other[_FAULT]}")
    for name in said:
        for r, other in enumerate(everyone):
            if other[name] != everyone[0][name]:
                got = f"{everyone[0][name]} on rank 0 and {other[name]} on rank {r}"
                raise ValueError(f"{name}: got {got}; allowed: the same on every rank of the group")
    if len(calls.known) >= _MOST_KNOWN:  # on every rank at once
        calls.known.clear()
    calls.known.add(words)


def _next(group: Any) -> int:
    """The number of this call: the same on every rank, since all make all calls."""
    calls = _groups.setdefault(group, _Calls())
    calls.count += 1
    return calls.count


def _key(number: int, rank: int) -> str:
    return f"xattn/{number}/{rank}"


def _post(group: Any, number: int, rank: int, said: Said) -> None:
    store, posted = group.get_group_store(), _groups[group].posted
    store.set(_key(number, rank), json.dumps(said))
    posted.append(_key(number, rank))
    if len(posted) > 2:  # the others have read it: they came to the call after it
        store.delete_key(posted.pop(0))
