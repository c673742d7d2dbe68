"""GRPO trainers made by the worker's own functions, for the tests that have to look inside one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accounting import Tally
from job import chat, dataset, repository, rules, weights
from job.environment import Environment
from job.scoring import Scorer
from job.settings import identify
from training import midrun, rewards, trainers
from training.conversations import Way
from training.history import MetricsStream


@dataclass(frozen=True)
class Batch:
    """What the reward function was given and gave back, one entry a completion."""

    rows: list[int]
    ids: list[list[int]]
    rewards: list[float | None]
    replies: list[Any]


class WatchedScorer(Scorer):
    """Remembers the newest replies that the environment was shown."""

    def score(self, groups: Sequence[Any]) -> Any:
        self.replies = [reply for _, replies in groups for reply in replies]
        return super().score(groups)


class WatchedReward(rewards.EnvironmentReward):
    """Remembers every batch."""

    def __call__(self, completion_ids: Any, row: Any, **more: Any) -> list[float | None]:
        given = super().__call__(completion_ids=completion_ids, row=row, **more)
        self.batches = [
            *vars(self).get("batches", []),
            Batch(list(row), [list(ids) for ids in completion_ids], given, self.scorer.replies),
        ]
        return given


@dataclass(frozen=True)
class Trial:
    """A GRPO trainer, and what it was made from."""

    settings: Any
    plan: Any
    chat: Any
    prompts: Any
    batch: Any
    reward: Any
    history: Any
    guard: Any
    trainer: Any

    @property
    def engine(self) -> Any:
        return self.trainer.vllm_generation

    @property
    def tally(self) -> Any:
        return self.reward.tally

    @property
    def batches(self) -> list[Batch]:
        return self.reward.batches

    def logged(self, name: str) -> list[Any]:
        """A column of the trainer's log, one value a step."""
        return [entry[name] for entry in self.trainer.state.log_history if name in entry]

    def sample(self, rows: Sequence[int]) -> dict[str, Any]:
        """Sample and score a group for each of these rows; the batch that the loss would be given."""
        group = self.settings.rl_group_size
        inputs = [{"prompt": self.prompts.texts[row], "row": row} for row in rows for _ in range(group)]
        self.trainer.model.train()
        self.trainer.current_gradient_accumulation_steps = 1
        return self.trainer._generate_and_score_completions(inputs)

    def gradients(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Gradients of the trainer's own loss on a batch, by parameter name."""
        model = self.trainer.model
        model.zero_grad()
        self.trainer.compute_loss(model, batch).backward()
        grads = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        model.zero_grad()
        return grads

    def base_weights(self) -> dict[str, Any]:
        """The frozen weights by their checkpoint names."""
        named = self.trainer.model.get_base_model().named_parameters()
        return {name.replace(".base_layer", ""): one for name, one in named if "lora_" not in name}

    def adapter_weights(self, adapter: str = "default") -> dict[str, Any]:
        named = self.trainer.model.named_parameters()
        return {name: one for name, one in named if f".{adapter}." in name}


class Silent:
    """A publisher for trials: beats are kept in a list."""

    def __init__(self) -> None:
        self.beats: list[dict[str, Any]] = []

    def beat(self, stage: str, files: Any = None, **extras: Any) -> None:
        self.beats.append({"stage": stage, **extras})


def variables(
    folder: Path, model: Path | str, kind: str = "plain", train: dict[str, Any] | None = None, **more: Any
) -> dict[str, str]:
    """The environment of a quick GRPO run on the CPU that writes below `folder`.

    Lower-case names are fields of the JobSpec, the others variables.
    """
    spec = {
        **{"model": str(model), "model_policy": "allow", "algorithm": "grpo", "thinking": False},
        **{"run_id": "r1", "environment": {"id": "toy-rewards", "params": {"kind": kind}}},
        **{name: value for name, value in more.items() if name.islower()},
        "train": {
            **{"lora_rank": 8, "lora_alpha": 16, "learning_rate": 1e-2, "steps": 3},
            **{"batch_size": 4, "group_size": 4, "max_tokens": 8, "temperature": 1.5},  # varied samples
            **(train or {}),
        },
    }
    return {
        "RUN_MODE": "rl",
        "AUTOSLM_DEVICE": "cpu",
        "AUTOSLM_LOG_FLUSH_S": "0",
        "AUTOSLM_WORK_DIR": str(folder / "work"),
        "AUTOSLM_STORE_DIR": str(folder / "store"),
        "AUTOSLM_JOB_SPEC_JSON": json.dumps(spec),
        **{name: str(value) for name, value in more.items() if not name.islower()},
    }


def build(env: dict[str, str], *, dtype: str = "float32", policy: Any = None) -> Trial:
    """The trainer of a run with these variables; `policy` loads the model from (settings, plan)."""
    identity, problem = identify(env)
    assert problem is None, problem
    settings = rules.resolve(env, identity)
    loaded = Environment.load(settings.job.environment.id, settings.job.environment.params)
    plan = dataclasses.replace(weights.plan_weights(settings, repository.locate(settings), ()), dtype=dtype)
    settings = rules.fit_context(settings, plan.context_length)
    talk = chat.Chat(chat.load_tokenizer(plan.base), settings.thinking)
    prompts = dataset.rl_prompts(settings, loaded, talk)
    batch = trainers.rl_batch(settings, plan, loaded, len(prompts.rows))
    tally = Tally()
    reward = WatchedReward(settings, talk, prompts, WatchedScorer(loaded), tally)
    history = midrun.as_callback(midrun.Rewards, Silent(), MetricsStream(str), tally)
    guard = midrun.as_callback(midrun.GradientGuard, tally)
    model = policy(settings, plan) if policy else None
    trainer = trainers.grpo_trainer(
        settings,
        plan,
        talk,
        prompts,
        batch,
        Way(tally, reward.scorer, reward),
        [history, guard],
        policy=model,
    )
    return Trial(settings, plan, talk, prompts, batch, reward, history, guard, trainer)
