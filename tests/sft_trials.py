"""SFT trainers made by the worker's own functions, and what both kinds of trainer must leave as it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from job import chat, dataset, repository, rules, weights
from job.environment import Environment
from job.settings import identify
from training import merging, trainers, warm_start


@dataclasses.dataclass(frozen=True)
class Trial:
    """An SFT trainer, and what it was made from."""

    settings: Any
    plan: Any
    chat: Any
    trainer: Any


def build(
    env: dict[str, str],
    *,
    policy: Callable[[Any, Any], Any] | None = None,
    batch: Any = None,
    callbacks: Sequence[Any] = (),
) -> Trial:
    """The trainer of a run with these variables; `policy` loads the model from (settings, plan)."""
    identity, problem = identify(env)
    assert problem is None, problem
    settings = rules.resolve(env, identity)
    loaded = Environment.load(settings.job.environment.id, settings.job.environment.params)
    plan = weights.plan_weights(settings, repository.locate(settings), ())
    settings = rules.fit_context(settings, plan.context_length)
    talk = chat.Chat(chat.load_tokenizer(plan.base), settings.thinking)
    rows, _, _ = dataset.sft_rows(settings, loaded, talk)
    batch = batch or trainers.sft_batch(settings, plan)
    model = policy(settings, plan) if policy else None
    trainer = trainers.sft_trainer(settings, plan, talk, rows, batch, callbacks, model)
    return Trial(settings, plan, talk, trainer)


def warm(settings: Any, plan: Any) -> Any:
    """The policy of a run that goes on from an adapter: to be given to `build`, here and for GRPO."""
    return warm_start.load(settings, plan, warm_start.fetch(settings, plan))


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def logits(model: Any) -> Any:
    """Logits of fixed token ids, without dropout."""
    import torch

    ids = torch.arange(20, 60).reshape(2, 20).to(model.device)
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


def check_base(trial: Any) -> None:
    """The frozen weights are bit for bit those that a fresh load has; in 4 bits, so are their scales."""
    import torch

    fresh = trial.plan.load(trial.settings).state_dict()
    named = trial.trainer.model.get_base_model().state_dict().items()
    mine = {name.replace(".base_layer", ""): one for name, one in named if "lora_" not in name}
    assert mine.keys() == fresh.keys()
    assert all(one.dtype == fresh[name].dtype for name, one in mine.items())
    assert [name for name, one in mine.items() if not torch.equal(one, fresh[name])] == []


def check_reload(trial: Any, folder: Path) -> None:
    """The delivered adapter gives the same outputs on a fresh base, and touches nothing that is excluded."""
    import re

    import torch
    from peft import PeftModel
    from safetensors.torch import load_file

    trainers.save_adapter(trial.trainer, trial.chat.tokenizer, trial.plan, folder)
    names = list(load_file(folder / "adapter_model.safetensors"))
    assert names and not [
        one for one in names if re.search(r"visual|vision_tower|mtp|experts\.|\.gate\.", one)
    ]
    reloaded = PeftModel.from_pretrained(trial.plan.load(trial.settings), str(folder))
    if trial.plan.four_bit:  # as TRL casts the adapter of a 4-bit model
        for name, one in reloaded.named_parameters():
            one.data = one.data.to(torch.bfloat16) if "lora_" in name else one.data
    expected = logits(trial.trainer.model)
    assert torch.equal(logits(reloaded), expected)
    with reloaded.disable_adapter():
        assert not torch.allclose(logits(reloaded), expected, atol=1e-2)


def check_merged(trial: Any, adapter: Path, folder: Path) -> None:
    """Merged weights have the base's tensors by name, load like it, and give what the adapter gives on it."""
    from peft import PeftModel
    from safetensors.torch import load_file

    merging.merge(trial.settings, trial.plan, trial.chat.tokenizer, adapter, folder)
    files = (Path(trial.plan.base) / "model.safetensors", folder / "model.safetensors")
    before, after = (load_file(one) for one in files)
    assert {name: one.shape for name, one in before.items()} == {
        name: one.shape for name, one in after.items()
    }
    fresh = trial.plan.unquantised()
    rounded = fresh.load(trial.settings).float()
    base = logits(rounded)
    exact = logits(PeftModel.from_pretrained(rounded, str(adapter)))
    plan = dataclasses.replace(fresh, source=str(folder), commit=None, dtype="float32")
    error, effect = (logits(plan.load(trial.settings)) - exact).abs(), (exact - base).abs()
    if "moe" in plan.model_type:  # rounded weights send single tokens to other experts
        assert error.mean() < 0.2 * effect.mean()
    else:
        assert error.max() < 0.1 * effect.max()
