"""What chaos tests found out is told at the end of the session, whichever process ran them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[object], None]:
    """Return a function that adds a text to the session's report."""
    return lambda text: record_property("chaos", str(text))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what was told."""
    ended = [one for kind in ("passed", "failed") for one in terminalreporter.stats.get(kind, [])]
    told = [text for report in ended for name, text in report.user_properties if name == "chaos"]
    if told:
        terminalreporter.section("chaos")
    for text in told:
        terminalreporter.write_line(text)
