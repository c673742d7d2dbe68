"""A mixture: words to spell, and a shop with tools."""

from __future__ import annotations

import toy_tools
import toy_words
import verifiers as vf


def load_environment() -> vf.EnvGroup:
    """Words first, then the shop."""
    words, shop = toy_words.load_environment(size=3), toy_tools.load_environment()
    return vf.EnvGroup([words, shop], env_names=["words", "shop"])
