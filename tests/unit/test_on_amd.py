"""The commands for a machine with AMD hardware: that they are commands, as far as that can be known without one."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from xattn import cli

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ci" / "on_amd.md").read_text()
ROWS = [row.split("|")[2] for row in TEXT.splitlines() if re.match(r"\| \d+ \|", row)]
COMMANDS = [command for row in ROWS for command in re.findall(r"`([^`]+)`", row)]
XATTN = [c[c.index("python -m xattn ") :] for c in COMMANDS if "python -m xattn " in c]


def test_ten_commands_and_what_was_not_run():
    assert len(ROWS) == 10 and "Nothing of xattn has been run on AMD hardware" in TEXT


@pytest.mark.parametrize("command", XATTN)
def test_options_are_those_of_the_command(command):
    words = shlex.split(command.partition(" >")[0])[3:]
    args, unknown = cli._parser().parse_known_args(words)
    assert unknown == [] and args.command == words[0]


def test_all_of_xattns_commands_were_looked_at():
    assert {shlex.split(c)[3] for c in XATTN} == {"info", "check", "bench"}


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("ci/")])
def test_scripts_know_what_they_are_told(command):
    program, *words = shlex.split(command.partition(" >")[0])
    own = [sys.executable] if "python" in (ROOT / program).read_text().partition("\n")[0] else []
    told = subprocess.run([*own, str(ROOT / program), "--help"], capture_output=True, text=True, check=True).stdout
    for word in words:
        assert word in ("amd-logs", "rocm") or re.search(rf"(^|\s|\[){re.escape(word)}\b", told), (word, told)
