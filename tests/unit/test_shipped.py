"""Which images a wheel ships: the rows of a set, and that kernels ask for what the backends name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from xattn import backward_call, forward_call, jit, launch, shipped
from xattn.backends import cdna, sm80, sm90
from xattn.device import from_arch
from xattn.images import Image, ImageSpec
from xattn.inputs import Inputs
from xattn.problem import SizeBucket

_KERNELS = ("rows", "keys", "queries")

SET = Path(__file__).parents[2] / "ci" / "images.toml"
ROW = '[[images]]\nbackends = ["sm80"]\n'


def load(tmp_path, text: str) -> shipped.ShippedSet:
    path = tmp_path / "set.toml"
    path.write_text(text)
    return shipped.load(path)


# ---------------------------------------------------------------- the sets
def test_the_set_of_the_checkout():
    chosen = shipped.load(SET)
    assert chosen.archs == shipped.ARCHS and chosen.origin == str(SET)
    for arch in chosen.archs:
        specs = chosen.specs(arch)
        assert set(specs) < set(shipped.everything(arch)) and len(set(specs)) == len(specs)
        have = {tuple(dict(s.config).get(n) for n in ("element", "head_dim", "head_dim_v", "attn_mask")) for s in specs}
        for element in ("bf16", "fp16"):
            assert {(element, d, d, "none") for d in (64, 96, 128, 256)} <= have
            assert (element, 128, 128, "boolean") in have and (element, 64, 64, "added16") in have
        appending = [s for s in specs if "/append." in s.entry]
        assert {dict(s.config)["element"] for s in appending} == (set() if arch == "sm_90a" else {"bf16", "fp16"})


def test_without_a_checkout(monkeypatch, tmp_path):
    """Plain calls, every head dimension."""
    monkeypatch.setattr(shipped, "__file__", str(tmp_path / "site-packages" / "xattn" / "shipped.py"))
    chosen = shipped.default()
    assert chosen is shipped.BUILT_IN
    for arch in chosen.archs:
        specs = chosen.specs(arch)
        configs = [dict(s.config) for s in specs if "/forward." in s.entry]
        dims = {64, 96, 128, 192, 256} if arch == "sm_90a" else set(range(32, 257, 32))
        count = 2 * len(dims)
        if arch == "sm_90a":  # two 16-bit elements, and 8-bit ones
            count = sum(2 * len(sm90.rows(d, d)) + len(sm90.rows(d, d, narrow=True)) for d in dims)
        assert {c["head_dim"] for c in configs} == dims and len(configs) == count
        assert all(c["head_dim"] == c["head_dim_v"] and c["attn_mask"] == "none" for c in configs)
        assert not any(c[name] for c in configs for name in ("any_scale", "softcap", "alibi"))
        of_backward = [s for s in specs if "/backward" in s.entry]
        own = 2 * 3 * 3 if arch == "sm_90a" else 0  # three kernels, head dimensions up to 128
        assert len(of_backward) == 2 * (1 + 2 * 8) + own and len(specs) == len(configs) + len(of_backward)


def test_everything_holds_every_option():
    names = ("element", "head_dim", "head_dim_v", "softcap", "alibi", "attn_mask", "paged")
    for entry, masks in (("forward", 4 + 2), ("decode", 2)):  # dense and packed calls, and paged ones
        specs = [s for s in shipped.everything("sm_80") if s.entry == f"arch/sm80/{entry}.cu"]
        have = {tuple(dict(spec.config)[n] for n in names) for spec in specs}
        assert len(have) == 2 * 8 * 8 * 2 * 2 * masks
    assert not shipped.everything("sm_75")


def test_a_row_takes_what_it_names(tmp_path):
    text = ROW + 'element = "fp16"\nhead_dims = [[192, 128]]\nsoftcap = [true, false]\nattn_mask = ["added32"]'
    specs = [s for s in load(tmp_path, text).specs("sm_80") if s.entry != "arch/sm80/backward_rows.cu"]
    configs = [dict(s.config) for s in specs]
    kernels = [f"arch/sm80/{kernel}.cu" for kernel in ("forward", "backward_keys", "backward_queries")]
    assert [(s.entry, c["softcap"]) for s, c in zip(specs, configs, strict=True)] == [
        (kernel, softcap) for kernel in kernels for softcap in (False, True)
    ]
    for c in configs:
        assert (c["element"], c["head_dim"], c["head_dim_v"]) == ("fp16", 192, 128)
        assert (c["attn_mask"], c["alibi"]) == ("added32", False)
    assert load(tmp_path, text).specs("gfx942") == [], "another backend's"


def test_rows_that_overlap_name_an_image_once(tmp_path):
    once = load(tmp_path, ROW).specs("sm_80")
    assert load(tmp_path, ROW + ROW).specs("sm_80") == once and len(once) == 16 + 2 * 16 + 2


WRONG = {
    "archs = 5": "archs: got 5; allowed: a list of names",
    "[[image]]": "image: not understood; allowed: archs, images",
    "archs = ['sm_80']": "images: there is no [[images]] row",
    "images = [": "Invalid value",
    ROW + "softcapped = true": "row 1 of images: softcapped: no image has this field; there are element, head_dim",
    ROW + "softcap = 1": "row 1 of images: softcap: got 1; allowed: False, True",
    ROW + "tile_m = 100": "tile_m: got 100; allowed: 128, 16, 32, 64",
    ROW + "attn_mask = ['bool']": "attn_mask: got 'bool'; allowed: added16, added32, boolean, none",
    ROW + "head_dims = [[64, 60]]": "head_dims: got [64, 60]; no image has these head dimensions",
    ROW + "head_dims = [64]": "head_dims: got [64]; allowed: pairs [head_dim, head_dim_v]",
    ROW
    + ROW.replace("sm80", "ampere"): "row 2 of images: backends: got ['ampere']; allowed: a list of sm90, sm80, cdna",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_sets(tmp_path, text):
    with pytest.raises(ValueError) as raised:
        load(tmp_path, text)
    assert str(raised.value).startswith(f"{tmp_path / 'set.toml'}: ") and WRONG[text] in str(raised.value)


def test_no_such_set(tmp_path):
    with pytest.raises(ValueError, match="none.toml: No such file or directory"):
        shipped.load(tmp_path / "none.toml")


def test_a_python_without_a_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'xattn\[cli\]'"):
        load(tmp_path, ROW)


# ---------------------------------------------------------------- what is asked for at run time is what is named
class Asked(Exception):
    pass


@pytest.mark.parametrize("backend, arch", [(sm80.BACKEND, "sm_80"), (cdna.BACKEND, "gfx942")], ids=["sm80", "cdna"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dims", [(64, 64), (72, 40), (128, 128), (256, 8)], ids=str)
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32, "dtype of q"], ids=str)
def test_calls_ask_for_images_that_are_named(monkeypatch, backend, arch, dtype, dims, mask):
    def choose(entry, config, arch_of_this_machine):
        raise Asked(ImageSpec(entry, config, arch))

    monkeypatch.setattr(jit, "choose", choose)
    q, k = (torch.zeros(1, n, 2, dims[0], dtype=dtype) for n in (5, 7))
    options = {"softcap": 3.0, "alibi_slopes": torch.ones(2)} if dims[0] == 64 else {}
    if mask is not None:
        options["attn_mask"] = torch.zeros(1, 1, 5, 7, dtype=dtype if mask == "dtype of q" else mask)
    inputs = Inputs("attention", q, k, torch.zeros(1, 7, 2, dims[1], dtype=dtype), **options)
    config = backend.config(inputs.problem(), SizeBucket.of(1, 2, 5, 7), from_arch(arch))
    with pytest.raises(Asked) as raised:
        backend.prepare(inputs, config)
    spec = raised.value.args[0]
    assert spec in shipped.everything(arch)
    has = dict(spec.config)
    assert has["softcap"] == has["alibi"] == (dims[0] == 64)


@pytest.mark.parametrize(
    "backend, arch",
    [(sm90.BACKEND, "sm_90a"), (sm80.BACKEND, "sm_80"), (cdna.BACKEND, "gfx942")],
    ids=["sm90", "sm80", "cdna"],
)
@pytest.mark.parametrize("dims", [(64, 64), (72, 40), (256, 8)], ids=str)
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("scale, deterministic", [(None, False), (-0.5, False), (None, True)])
def test_backwards_ask_for_images_that_are_named(monkeypatch, backend, arch, dims, mask, scale, deterministic):
    asked = []

    def choose(entry, config, arch_of_this_machine):
        own = arch_of_this_machine == "sm_90a"
        assert own == (arch == "sm_90a")
        asked.append(ImageSpec(entry, config, arch))
        return Image("", arch, "", "", "", b""), None

    monkeypatch.setattr(forward_call, "choose", choose)
    monkeypatch.setattr(launch, "prepare", lambda call: lambda inputs: [torch.empty(o.shape) for o in call.outputs])
    q, k, v = (torch.zeros(1, n, 2, d) for n, d in ((5, dims[0]), (7, dims[0]), (7, dims[1])))
    q, k, v = (t.bfloat16() for t in (q, k, v))
    options = {} if mask is None else {"attn_mask": torch.zeros(1, 1, 5, 7, dtype=mask)}
    inputs = Inputs("attention", q, k, v, softmax_scale=scale, deterministic=deterministic, **options)
    out, lse = torch.zeros(inputs.out_shape).bfloat16(), torch.zeros(inputs.lse_shape)
    wanted = [name in "qkv" for name, _ in inputs.differentiable()]
    config = backend.config(inputs.problem(("q", "k", "v")), SizeBucket.of(1, 2, 5, 7), from_arch(arch.rstrip("a")))
    backend.backward(inputs, config, out, lse, out.clone(), None, wanted)
    backward_call.forget()
    own = backend is sm90.BACKEND and max(dims) <= 128 and mask is None and not deterministic
    kernels = ["backward_rows", "backward", "backward_queries"] if own else [f"backward_{n}" for n in _KERNELS]
    assert [Path(s.entry).stem for s in asked] == kernels
    assert own == any(s.entry.startswith("arch/sm90/") for s in asked)
    assert set(asked) <= set(shipped.everything(arch))
