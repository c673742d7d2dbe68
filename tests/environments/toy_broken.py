"""An environment that cannot be loaded."""

from __future__ import annotations

import verifiers as vf


def load_environment(how: str = "raises") -> vf.SingleTurnEnv:
    """Fail in one of the ways environments do."""
    if how == "key":
        vf.ensure_keys(["TOY_BROKEN_API_KEY"])
    if how == "exits":
        raise SystemExit("no licence")
    if how == "nothing":
        return vf.SingleTurnEnv()
    if how != "raises":
        raise PermissionError(f"no entry with {how}")
    raise OSError("the corpus is not there\nlooked in /nowhere")
