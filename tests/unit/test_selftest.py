"""The self-test: that it passes here, and that it finds what is wrong."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import oracle
import pytest
import torch

import xattn
from xattn import cli, images, jit, launch, selftest
from xattn.images import Image, ImageSpec, Store
from xattn.selftest import CASES, Case

CPU = torch.device("cpu")


# ---------------------------------------------------------------- the rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor, right", [(1.0, True), (1.9, True), (2.5, False)])
def test_the_rule_is_that_of_the_tests(dtype, factor, right):
    """An error of twice the plain computation's passes; the oracle of the tests judges alike."""
    truth = torch.linspace(1, 2, 50, dtype=torch.float64)
    plain = truth + 0.05
    got = (truth + 0.05 * factor).to(dtype)
    pairs = list(selftest.compare(got, truth, plain))
    assert len(pairs) == 2 and all(error <= allowed for error, allowed in pairs) == right
    if right:
        oracle.assert_close("out", got, truth, plain)
    else:
        with pytest.raises(AssertionError):
            oracle.assert_close("out", got, truth, plain)


def test_many_small_errors_are_found():
    """The largest error is allowed, the sum of all is not."""
    truth, off = torch.ones(100, dtype=torch.float64), torch.zeros(100, dtype=torch.float64)
    off[0] = 0.1
    largest, square = selftest.compare((truth + 0.09).float(), truth, truth + off)
    assert largest[0] <= largest[1] and square[0] > square[1]


@pytest.mark.parametrize(
    "got, truth",
    [
        ([math.nan, 1.0], [1.0, 1.0]),
        ([math.inf, 1.0], [1.0, 1.0]),
        ([1.0, 1.0], [-math.inf, 1.0]),
        ([1.0], [1.0, 1.0]),
    ],
)
def test_what_is_never_right(got, truth):
    got, truth = torch.tensor(got), torch.tensor(truth, dtype=torch.float64)
    assert all(error > allowed for error, allowed in selftest.compare(got, truth, truth))


def test_infinite_in_both_is_right():
    x = torch.tensor([-math.inf, 2.0])
    assert all(error <= allowed for error, allowed in selftest.compare(x, x.double(), x.double()))
    empty = torch.full((3,), -math.inf)
    assert list(selftest.compare(empty, empty.double(), empty.double())) == []


# ---------------------------------------------------------------- the problems
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.label)
def test_every_problem_on_the_cpu(case):
    result = selftest.run(case, CPU)
    assert result.ok and result.backend in ("sdpa", "reference") and not result.native, result
    assert 0 < result.error <= result.allowed


def test_problems_are_representative():
    assert len({c.label for c in CASES}) == len(CASES)
    assert {c.dtype for c in CASES} == {"bf16", "fp16", "fp32"}
    assert {c.kind for c in CASES} == {"attention", "varlen", "paged"}
    assert {64, 72, 128, 256} <= {c.dims[0] for c in CASES}
    used = {option for c in CASES for option in c.options}
    assert used >= {
        "causal",
        "window",
        "softcap",
        "alibi_slopes",
        "sinks",
        "boolean",
        "added",
        "seqused_k",
        "return_lse",
    }


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.dtype == "bf16" and not c.backward],
    ids=lambda c: c.label,
)
def test_the_plain_computation_is_right(case):
    """In float64 it is the reference's answer: what sets the tolerance is the same attention."""
    tensors, options = selftest._cast(*selftest._arguments(case, CPU), torch.float64)
    truth = selftest._call(case, tensors, options, backend="reference")
    plain = selftest._results(case, selftest._plain(case, tensors, options), tensors)
    for a, b in zip(plain, truth, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.kind == "paged" or "seqused_k" in c.options], ids=lambda c: c.label
)
def test_what_lies_outside_is_nan(case):
    tensors, _ = selftest._arguments(case, CPU)
    assert tensors[1].isnan().any() and tensors[2].isnan().any()


def wrong(monkeypatch, spoil) -> None:
    right = selftest._CALLS["attention"]

    def call(*args, **options):
        answer = right(*args, **options)
        return answer if options.get("backend") else spoil(answer)

    monkeypatch.setitem(selftest._CALLS, "attention", call)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: out * 1.02,
        lambda out: torch.cat([out[:, :-1], out[:, -1:] * math.nan], 1),
        lambda out: out[:, :-1],
    ],
    ids=["scaled", "nan", "shape"],
)
def test_a_wrong_answer_fails(monkeypatch, spoil):
    wrong(monkeypatch, spoil)
    result = selftest.run(Case("fp32", dtype="fp32"), CPU)
    assert not result.ok and result.backend == "sdpa"
    assert result.fault.startswith("NaN, or a wrong shape") if result.error is None else result.error > result.allowed


def test_a_wrong_gradient_fails(monkeypatch):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 1.1

    wrong(monkeypatch, Wrong.apply)
    assert not selftest.run(Case("backward", dtype="fp32", backward=True), CPU).ok
    assert selftest.run(Case("forward", dtype="fp32"), CPU).ok


def test_an_exception_is_a_fault(monkeypatch):
    def fails(out):
        raise RuntimeError("the launch failed")

    wrong(monkeypatch, fails)
    result = selftest.run(Case("fp32", dtype="fp32"), CPU)
    assert not result.ok and result.fault == "RuntimeError: the launch failed" and result.backend == "sdpa"
    assert result.trace.startswith("Traceback") and "in fails" in result.trace and result.us is None


# ---------------------------------------------------------------- the machine
@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XATTN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "images"


def found(what: str) -> list[selftest.Finding]:
    return [f for f in selftest.environment() if f.what == what]


def test_compilers_and_what_they_lack(cache, monkeypatch):
    class Compiler:
        def __init__(self, name, missing):
            self.name, self._missing = name, missing

        def missing(self):
            return self._missing

        def version(self):
            return "one 1.0"

    monkeypatch.setattr(jit, "COMPILERS", (Compiler("one", ""), Compiler("two", "pip install two")))
    assert [(f.state, f.text) for f in found("compiler one")] == [("ok", "one 1.0")]
    assert [(f.state, f.text) for f in found("compiler two")] == [("note", "pip install two")]


def test_launcher(cache, monkeypatch):
    monkeypatch.setattr(launch, "missing", lambda: "")
    monkeypatch.setattr(launch, "description", lambda: "a launcher 1.0")
    assert [(f.state, f.text) for f in found("launcher")] == [("ok", "a launcher 1.0")]
    monkeypatch.setattr(launch, "missing", lambda: "pip install it")
    assert [(f.state, f.text) for f in found("launcher")] == [("note", "pip install it")]


def test_environment_variables(cache, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    (finding,) = found("environment variables")
    assert f"XATTN_CACHE_DIR={cache.parent}" in finding.text and "CUDA_VISIBLE_DEVICES=3" in finding.text


SPEC = ImageSpec("arch/sm80/forward.cu", (("element", "bf16"), ("head_dim", 64), ("head_dim_v", 64)), "sm_80")


def put(folder) -> None:
    images.publish(Image(SPEC.key(), SPEC.arch, "cubin", SPEC.name(), "a compiler 1.0", b"code"), folder)


def cut(folder) -> None:
    put(folder)
    (path,) = folder.rglob("*.image")
    path.write_bytes(path.read_bytes()[:-1])


def test_the_store(cache, tmp_path, monkeypatch):
    """A broken file of the wheel is a failure, one of the cache heals itself."""
    monkeypatch.setattr(selftest, "Store", lambda: Store(shipped=(tmp_path / "wheel",)))
    assert [(f.state, f.text) for f in found("images, wheel")] == [("ok", "0 images")]
    put(tmp_path / "wheel")
    cut(cache)
    assert [(f.state, f.text) for f in found("images, wheel")] == [("ok", "1 images")]
    (finding,) = found("images, cache")
    assert finding.state == "note" and "0 images, 1 broken (removed, and compiled again" in finding.text
    cut(tmp_path / "wheel")
    (finding,) = found("images, wheel")
    assert finding.state == "FAILED" and "3 of 4 bytes" in finding.text
    assert [f.state for f in found("images, cache folder")] == ["ok"]


def test_a_cache_that_cannot_be_written_to(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XATTN_CACHE_DIR", str(tmp_path / "file"))
    (finding,) = found("images, cache folder")
    assert finding.state == "note" and "cannot be written to (Not a directory)" in finding.text


# ---------------------------------------------------------------- the command
@pytest.fixture
def few(cache, monkeypatch):
    monkeypatch.setattr(selftest, "CASES", (Case("one", dtype="fp32"), Case("two", dtype="fp32", kind="varlen")))


def test_check(few, capsys):
    assert cli.main(["check", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "device under test: cpu, " in text and "2 problems on cpu: all ok" in text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith(("  one ", "  two "))] == ["ok", "ok"]


def test_check_says_that_there_is_no_gpu(few, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cli.main(["check"]) == 0
    assert "this torch sees no GPU" in capsys.readouterr().out


def test_check_fails(few, capsys, monkeypatch):
    wrong(monkeypatch, lambda out: out + 1)
    assert cli.main(["check", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert "2 problems on cpu: FAILED: one\n" in text
    monkeypatch.setitem(selftest._CALLS, "varlen", lambda *a, **k: 1 / 0)
    assert cli.main(["check", "--device", "cpu"]) == 1
    assert "two: ZeroDivisionError: division by zero" in capsys.readouterr().out


def test_check_fails_for_a_broken_wheel(few, capsys, tmp_path, monkeypatch):
    cut(tmp_path / "wheel")
    monkeypatch.setattr(selftest, "Store", lambda: Store(shipped=(tmp_path / "wheel",)))
    assert cli.main(["check", "--device", "cpu"]) == 1
    assert "FAILED: images, wheel" in capsys.readouterr().out


def test_check_json(few, capsys, monkeypatch):
    assert cli.main(["check", "--device", "cpu", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["device"], answer["ok"], answer["failed"]) == ("cpu", True, [])
    assert [p["label"] for p in answer["problems"]] == ["one", "two"]
    assert all(p["ok"] and p["error"] <= p["allowed"] for p in answer["problems"])
    assert {"what", "state", "text"} == set(answer["environment"][0])
    assert all(p["first_ms"] > 0 and p["us"] > 0 and p["trace"] == "" for p in answer["problems"])
    assert answer["versions"]["torch"] == torch.__version__ and answer["versions"]["torch_hip"] == torch.version.hip
    assert answer["hardware"]["vendor"] == "cpu" and answer["hardware"]["sm_count"] > 0 and answer["seconds"] > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", answer["time"])
    wrong(monkeypatch, lambda out: out[:, :-1])
    assert cli.main(["check", "--device", "cpu", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (answer["ok"], answer["failed"]) == (False, ["one"])


def test_a_report_to_send(few, capsys, tmp_path, monkeypatch):
    """Beside the tables; what failed comes with its traceback."""
    monkeypatch.setitem(selftest._CALLS, "varlen", lambda *a, **k: 1 / 0)
    file = tmp_path / "report.json"
    assert cli.main(["check", "--device", "cpu", "--json", str(file)]) == 1
    text = capsys.readouterr().out
    assert "2 problems on cpu: FAILED: two" in text and f"the report is in {file}" in text
    answer = json.loads(file.read_text())
    one, two = answer["problems"]
    assert one["ok"] and not two["ok"] and "ZeroDivisionError" in two["trace"] and two["error"] is None


def test_a_report_that_cannot_be_written(few, capsys, tmp_path):
    """It is said before any problem."""
    assert cli.main(["check", "--device", "cpu", "--json", str(tmp_path / "none" / "report.json")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("xattn check: ") and "No such file" in captured.err


def test_what_kernels_reported_fails_the_check(few, capsys, monkeypatch):
    def raises(device):
        raise xattn.DeviceValueError("page_table: a page id out of range")

    monkeypatch.setattr(xattn.api, "check_errors", raises)
    assert cli.main(["check", "--device", "cpu", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["failed"] == ["kernel status"] and "a page id out of range" in answer["environment"][-1]["text"]


@pytest.mark.parametrize("name", ["99", "-1", "cuda", "gfx942", ""])
def test_check_of_devices_that_are_not_there(few, capsys, name):
    assert cli.main(["check", f"--device={name}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"xattn check: --device: got {name!r}; allowed: ")


def test_the_first_gpu_is_meant(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert selftest.device_of(None) == torch.device("cuda", 0)
    assert selftest.device_of("1") == torch.device("cuda", 1)
    assert selftest.device_of("cpu") == CPU


def test_cases_of_every_dtype_differ():
    """The same numbers on every device, and none of them the same in two arguments."""
    (q, k, v), _ = selftest._arguments(replace(CASES[0], lengths=(10, 10), heads=(2, 2)), CPU)
    again, _ = selftest._arguments(replace(CASES[0], lengths=(10, 10), heads=(2, 2)), CPU)
    assert torch.equal(q, again[0]) and not torch.equal(q, k) and not torch.equal(k, v)
