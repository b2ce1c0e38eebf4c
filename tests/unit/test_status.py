"""The status of devices: raised at once on the CPU, kept until asked for elsewhere."""

from __future__ import annotations

import pytest
import torch

import xattn
from xattn import status

CPU = torch.device("cpu")
META = torch.device("meta")


@pytest.fixture(autouse=True)
def words(monkeypatch):
    """No status of another test."""
    found: dict[torch.device, torch.Tensor] = {}
    monkeypatch.setattr(status, "_words", found)
    return found


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another device: what a GPU would hold, without one."""

    device = torch.device("cuda", 3)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def flags(*values: bool) -> torch.Tensor:
    return torch.tensor(values).as_subclass(Elsewhere)


@pytest.fixture
def gpu(words):
    """The word of that device, held by the CPU."""
    words[Elsewhere.device] = torch.zeros(len(status.MESSAGES), dtype=torch.int32)
    return words[Elsewhere.device]


@pytest.mark.parametrize("code", status.MESSAGES)
def test_cpu_raises_at_once(code, words):
    status.report(code, torch.tensor([False, False]))
    status.report(code, torch.zeros(0, dtype=torch.bool))
    with pytest.raises(xattn.DeviceValueError) as caught:
        status.report(code, torch.tensor([False, True]), "seqused_k", torch.tensor([3, 9]), "0 to 7")
    assert str(caught.value) == "seqused_k: got 9 at [1]; allowed: 0 to 7"
    with pytest.raises(xattn.DeviceValueError) as caught:
        status.report(code, torch.tensor(True), "cu_seqlens_q", torch.arange(20), "none")
    assert str(caught.value) == "cu_seqlens_q: got [0, 1, 2, 3, 4, 5, 6], and 13 more; allowed: none"
    with pytest.raises(xattn.DeviceValueError) as caught:
        status.report(code, torch.tensor(True))
    assert str(caught.value) == status.MESSAGES[code]
    assert not words, "the CPU has no status word"


def test_error_is_a_value_error():
    assert issubclass(xattn.DeviceValueError, ValueError)


def test_codes_are_bits():
    assert list(status.CODES) == list(status.MESSAGES)
    assert list(status.CODES.values()) == [1 << n for n in range(len(status.MESSAGES))]


def test_nothing_to_raise_on_the_cpu():
    for device in (None, "cpu", CPU):
        assert xattn.check_errors(device) is None


def test_report_elsewhere_is_kept_and_raised_once(gpu):
    status.report("page_table", flags(False))
    xattn.check_errors()
    status.report("page_table", flags(False, True), "not shown")
    status.report("page_table", flags(False))  # sticky
    status.report("rotary", flags(True))
    assert gpu.tolist() == [int(name in ("page_table", "rotary")) for name in status.MESSAGES]
    with pytest.raises(xattn.DeviceValueError) as caught:
        xattn.check_errors()
    assert str(caught.value) == f"on cuda:3: {status.MESSAGES['page_table']}; {status.MESSAGES['rotary']}"
    assert not gpu.any()
    xattn.check_errors()


@pytest.mark.parametrize("name", [3, "cuda:3", torch.device("cuda", 3)])
def test_only_the_device_asked_for(gpu, words, name):
    other = words[torch.device("cuda", 1)] = torch.zeros_like(gpu)
    other[0] = gpu[1] = 1
    with pytest.raises(xattn.DeviceValueError, match="^on cuda:3: max_seqlen"):
        xattn.check_errors(name)
    assert not gpu.any() and other[0] == 1
    xattn.check_errors(name)
    with pytest.raises(xattn.DeviceValueError, match="^on cuda:1: cu_seqlens"):
        xattn.check_errors()


def test_a_device_without_index_is_the_current_one(gpu, monkeypatch):
    gpu[2] = 1
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    xattn.check_errors("cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with pytest.raises(xattn.DeviceValueError, match="seqlens_k"):
        xattn.check_errors("cuda")


def test_word_is_one_int32_for_each_message():
    cpu = torch.device("cpu")
    word = status.word(cpu)
    assert (word.shape, word.dtype, word.device) == ((len(status.MESSAGES),), torch.int32, cpu)
    assert status.word(cpu) is word
    assert status.word(META).shape == word.shape and status.word(META).device.type == "meta"


def test_report_elsewhere_reads_nothing():
    """On a device whose values cannot be read: any synchronisation would raise."""
    status.report("seqlens_k", torch.ones(3, dtype=torch.bool, device="meta"))


@pytest.mark.parametrize(
    "name, error",
    [
        ("nowhere", ValueError),
        ("cuda:77", ValueError),
        ("meta", ValueError),
        (META, ValueError),
        (77, ValueError),
        (-1, ValueError),
        (2**70, ValueError),
        (1.5, TypeError),
        (True, TypeError),
        (["cpu"], TypeError),
    ],
)
def test_check_errors_refuses_what_is_no_device(name, error):
    with pytest.raises(error, match="^device: got .*; allowed: .*cpu"):
        xattn.check_errors(name)


def test_tensors_without_values_leave_nothing_to_check():
    word = status.word(torch.device("meta"))
    assert word.device.type == "meta" and torch.device("meta") not in status._words
    status.check_errors()
