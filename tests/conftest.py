"""Markers, threads and hypothesis for all tests, and the rule that a test may be skipped only for absent hardware, or
for a compiler for AMD that no Python package brings."""

from __future__ import annotations

import os
from collections import Counter

# Asking torch for GPUs goes through NVML then, so that tests may still fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import hypothesis
import pytest
import torch

NO_HARDWARE = "no hardware:"
ALLOWED_SKIPS = (NO_HARDWARE, "no AMD compiler:")

# Equal runs on every machine, loaded or not. For a random search: --hypothesis-profile=default
hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        threads = max(1, torch.get_num_threads() // workers)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the processes that tests start
    if not hasattr(config, "workerinput"):  # xdist's workers report to the one process that counts
        config.pluginmanager.register(SkipAccount(), "skip-account")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if "tests/gpu/" in item.path.as_posix() and item.get_closest_marker("gpu") is None:
            item.add_marker("gpu")
        marker = item.get_closest_marker("gpu")
        together = item.get_closest_marker("one_worker")
        if config.pluginmanager.hasplugin("xdist") and (marker or together):  # under --dist loadgroup
            item.add_marker(pytest.mark.xdist_group("gpu" if marker else together.args[0]))
        if marker is None:
            continue
        needed = marker.kwargs.get("count", 1)
        if num_gpus < needed:
            found = f"{num_gpus} of {needed} GPUs" if num_gpus else "no GPU"
            item.add_marker(pytest.mark.skip(reason=f"{NO_HARDWARE} {found}"))


class SkipAccount:
    """Counts skips by reason, and fails the session when a reason is none of those allowed."""

    def __init__(self) -> None:
        # Node id -> reason; a dict, since each of xdist's workers reports what it collects.
        self.skipped: dict[str, str] = {}

    def _record(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self.skipped[report.nodeid] = reason.removeprefix("Skipped: ")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._record(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._record(report)

    def _forbidden(self) -> list[str]:
        return [nodeid for nodeid, reason in self.skipped.items() if not reason.startswith(ALLOWED_SKIPS)]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._forbidden() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.skipped:
            return
        terminalreporter.section("skips by reason")
        for reason, count in Counter(self.skipped.values()).most_common():
            terminalreporter.write_line(f"{count:6d}  {reason}")
        forbidden = self._forbidden()
        if forbidden:
            terminalreporter.write_line(
                f"FAILED: a test may be skipped only for a reason that starts with one of {ALLOWED_SKIPS}:", red=True
            )
            for nodeid in forbidden:
                terminalreporter.write_line(f"  {nodeid}: {self.skipped[nodeid]}", red=True)
