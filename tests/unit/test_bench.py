"""`python -m xattn bench`."""

from __future__ import annotations

import json

import pytest
import torch

from xattn import cli
from xattn.backends import sm90
from xattn.bench import Case, timing, tune

CPU = ["--device", "cpu", "--rounds", "1"]


def run(capsys, *words: str) -> tuple[int, str, str]:
    status = cli.main(["bench", *words])
    return status, *capsys.readouterr()


def test_times_backends_beside_each_other(capsys):
    words = ["--seqlen", "9", "33", "--head-dim", "16", "--mask", "causal", "--backend", "sdpa", "reference", "--json"]
    status, out, _ = run(capsys, *CPU, *words)
    results = json.loads(out)
    assert status == 0 and [r["backend"] for r in results] == ["sdpa", "reference"] * 2
    assert {r["call"] for r in results} == {"bf16 b28 s9 h2 d16 causal", "bf16 b7 s33 h2 d16 causal"}
    for r in results:
        n = int(r["call"].split()[2][1:])
        batch = 256 // n
        assert r["us"] > 0
        assert r["TFLOP/s"] == pytest.approx(2 * batch * 2 * n * n * 16 / r["us"] * 1e-6, abs=1e-3)


def test_a_table_for_people(capsys):
    status, out, _ = run(capsys, *CPU, "--seqlen", "8", "--heads", "4", "--heads-kv", "2", "--dtype", "fp32")
    assert status == 0 and "fp32 b32 s8 h4/2 d64 full" in out and "TFLOP/s" in out and "sdpa" in out


def test_what_does_not_answer_is_told_and_fails_the_command_when_alone(capsys):
    status, out, _ = run(capsys, *CPU, "--seqlen", "8", "--backend", "sm90", "--json")
    assert status == 1 and all("vendor" in r["fault"] or "device" in r["fault"] for r in json.loads(out))
    status, out, _ = run(capsys, *CPU, "--seqlen", "8", "--backend", "sm90", "sdpa", "--json")
    assert status == 0 and sum("us" in r for r in json.loads(out)) == 2


@pytest.mark.parametrize(
    "words, told",
    [
        (["--backend", "nobody"], "--backend: got 'nobody'"),
        (["--set", "tile_n"], "--set: got 'tile_n'"),
        (["--set", "=3"], "--set: got '=3'"),
        (["--out", "x"], "--out"),
        (["--heads", "4", "--heads-kv", "3"], "--heads-kv: got 3; allowed: divisors of 4"),
        (["--tune"], "--tune: got"),
        (["--tune", "--mask", "causal"], "--mask: got a value with --tune"),
        (["--tune", "--head-dim", "64"], "--head-dim: got a value with --tune"),
        (["--tune", "--set", "tile_n=64"], "--set: got a value with --tune"),
        (["--batch", "2147483647", "--seqlen", "2147483647"], "--head-dim: got a tensor of (2147483647, 2147483647, 2"),
        (["--seqlen", "8", "--heads", "2147483647", "--head-dim", "2147483647"], "--head-dim: got a tensor of (32, 8,"),
    ],
)
def test_wrong_usage(capsys, words, told):
    status, _, err = run(capsys, *CPU, *words)
    assert status == 2 and told in err


def test_what_the_memory_does_not_hold(capsys):
    """Is told, and the others are timed."""
    words = ["--seqlen", "8", "--batch", "1", str(2**31 - 1), "--heads", "512", "--mask", "full", "--json"]
    status, out, _ = run(capsys, *CPU, *words, "--backend", "sdpa")
    assert status == 0 and ["fault" in r for r in json.loads(out)] == [False, True]
    assert "allocate" in json.loads(out)[1]["fault"]


@pytest.mark.parametrize("option", ["--batch", "--seqlen", "--heads", "--rounds"])
@pytest.mark.parametrize("value", ["0", "-1", "²", "x", "99999999999999999999"])
def test_numbers(capsys, option, value):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *CPU, f"{option}={value}"])
    assert caught.value.code == 2 and f"argument {option}" in capsys.readouterr().err


def test_values_of_the_configuration(capsys):
    words = ["--seqlen", "8", "--backend", "reference", "--json"]
    _, out, _ = run(capsys, *CPU, *words, "--set", "compute=float64")
    assert json.loads(out)[0]["configuration"] == {"compute": "float64"}
    _, out, _ = run(capsys, *CPU, *words, "--set", "tile=3")
    assert "it has no tile; it has compute" in json.loads(out)[0]["fault"]


def test_flops():
    case = Case(2, 10, 3, 1, 8, "bf16", False)
    assert case.flops() == 4 * 2 * 3 * 10 * 10 * 8
    assert case.inputs(torch.device("cpu")).k.shape == (2, 10, 1, 8)


def test_medians_call_everything_as_often():
    seen = {"a": 0, "b": 0}

    def count(name):
        seen[name] += 1

    found = timing.medians({n: (lambda n=n: count(n)) for n in seen}, torch.device("cpu"), 3)
    assert seen == {"a": 3, "b": 3} and set(found) == {"a", "b"}


def test_a_proposal_names_where_a_row_begins_to_be_the_fastest():
    wide, base = (tune.name(row) for row in sm90.rows(64, 64))
    figures = {512: {wide: 3.0, base: 2.0}, 1024: {wide: 1.0, base: 2.0}, 2048: {wide: 5.0, base: 4.0}}
    first, last = tune.propose(64, True, figures)
    assert (first["row"], first["least"], first["now"]) == (wide, 2048, sm90.rows(64, 64)[0].least[True])
    assert (last["row"], last["least"]) == (base, 0)
    figures[2048][base] = 6.0
    assert tune.propose(64, True, figures)[0]["least"] is None


def test_tuning_writes_a_proposal(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tune, "_figures", lambda case, place, rounds: {
        tune.name(row): 100.0 * row.num_warpgroups + case.seqlen for row in sm90.rows(case.head_dim, case.head_dim)
    })  # fmt: skip
    hopper = tune.device.from_arch("sm_90")
    monkeypatch.setattr(tune.device, "of", lambda place: hopper)
    out = tmp_path / "tiles.json"
    status, text, _ = run(capsys, *CPU, "--tune", "--out", str(out))
    rows = json.loads(out.read_text())["rows"]
    assert status == 0 and str(out) in text
    assert [r["least"] for r in rows if r["row"].startswith("3")] == [512] * 2
    assert {r["head_dim"] for r in rows} == {64, 96, 128, 192, 256}
    assert run(capsys, *CPU, "--tune", "--out", str(tmp_path / "no" / "x"))[0] == 2
