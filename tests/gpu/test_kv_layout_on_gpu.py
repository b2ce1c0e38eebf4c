"""convert_pages on a GPU gives the bits that it gives on the CPU, and waits for nothing."""

import pytest
import torch

import xattn
from xattn import KVLayout, convert_page_table, convert_pages
from xattn.kv_layout import LAYOUT_DTYPES

CUDA = torch.device("cuda")


@pytest.mark.parametrize("src", LAYOUT_DTYPES, ids=str)
@pytest.mark.parametrize("dst", LAYOUT_DTYPES, ids=str)
def test_the_bits_of_the_cpu(src, dst):
    """Each pattern of 8 and 16 bits, and many of 32, under scales that are given and, where they are, chosen."""
    if src.itemsize == 4:
        pages = torch.randint(-(2**31), 2**31, (1 << 16,), generator=torch.Generator().manual_seed(0))
        pages = pages.to(torch.int32).view(src)
    else:
        n = 1 << (8 * src.itemsize)
        pages = torch.arange(n, dtype=torch.int32).to(torch.uint8 if n == 256 else torch.int16).view(src)
    pages = pages.view(-1, 16, 2, 2)
    scales = torch.tensor([0.3, 1e-3])
    for given in (None, scales / 3, 1.0):
        try:
            wanted, layout = convert_pages(pages, KVLayout(src, "NHD", 16, scales), KVLayout(dst, "HND", 8, given))
        except ValueError:
            assert given is None
            continue
        old = KVLayout(src, "NHD", 16, scales.to(CUDA))
        new = KVLayout(dst, "HND", 8, given.to(CUDA) if isinstance(given, torch.Tensor) else given)
        got, made = convert_pages(pages.to(CUDA), old, new)
        assert torch.equal(made.scales.cpu(), layout.scales) and made.scales.device == got.device
        numbers, other = got.cpu().double(), wanted.double()
        assert torch.equal(numbers.isnan(), other.isnan())
        there = ~other.isnan()
        assert torch.equal(numbers[there], other[there])
        assert torch.equal(numbers.signbit()[there], other.signbit()[there])


def test_nothing_synchronises_and_bad_tables_are_reported(unsynchronised):
    pages = torch.zeros(64, 16, 2, 64, device=CUDA).to(torch.float8_e4m3fn)
    table = torch.tensor([[0, 1, 4, 6]], dtype=torch.int32, device=CUDA)
    src, dst = KVLayout(torch.float8_e4m3fn, "NHD", 16, 0.5), KVLayout(torch.float8_e4m3fnuz, "HND", 32)
    rounded = KVLayout(torch.bfloat16, "NHD", 16, 1.0)
    calls = (
        lambda: convert_pages(pages, src, dst),
        lambda: convert_pages(pages, src, rounded),
        lambda: convert_page_table(table, src, dst),
    )
    for call in calls:
        call()
    with pytest.raises(xattn.DeviceValueError, match="page_table"):
        xattn.check_errors()
    with unsynchronised():
        new = [call() for call in calls][-1]
    assert new.tolist() == [[0, -1]]
    with pytest.raises(xattn.DeviceValueError, match="page_table"):
        xattn.check_errors()
