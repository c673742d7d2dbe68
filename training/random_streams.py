"""Random streams: of the sampler, which shares generators with the trainer, and of the order of prompts."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def sampler_seed(seed: int, step: int, rank: int) -> int:
    """From (SEED, step, rank): other seeds sample differently, a resumed step samples what it would have."""
    return random.Random(f"{seed}/{step}/{rank}").getrandbits(63)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """The process's generators go on as if nothing had been drawn or seeded inside, also after a failure."""
    import numpy
    import torch

    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A random stream of its own for the sampler, which shares torch's generators with the trainer.

    Environments that run meanwhile draw from Python's and numpy's, which are left to go on.
    """
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def by_epoch(sampler: Any, seed: int) -> Any:
    """Let TRL's prompt sampler draw each epoch's order from (seed, epoch).

    Its one stream over all epochs would begin anew in a resumed run, and give it the first epoch's order.
    """
    sampler.set_epoch = lambda epoch: sampler.generator.manual_seed(seed + epoch)
    return sampler
