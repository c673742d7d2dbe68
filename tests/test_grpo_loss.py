"""What a GRPO step optimises: whole groups, centred advantages, and only the samples that count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from job.scoring import Reply
from tests import grpo_trials
from tests.grpo_trials import Trial

pytestmark = pytest.mark.slow


@pytest.fixture
def trial(tiny_model: Path, tmp_path: Path) -> Callable[..., Trial]:
    """Return a function that builds a trainer which samples from its own model."""

    def make(*args: Any, model: Path = tiny_model, **more: Any) -> Trial:
        more = {"RL_USE_VLLM": 0, **more}
        return grpo_trials.build(grpo_trials.variables(tmp_path, model, *args, **more))

    return make


def disturb(made: Trial) -> None:
    """Move the policy away from its reference, so that the KL term has a gradient."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.adapter_weights().items():
            if "lora_B" in name:
                parameter.normal_(std=0.02)


def only(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """The part of a batch that holds these samples."""
    size = len(batch["prompt_ids"])
    return {
        name: value[rows] if value.dim() and len(value) == size else value for name, value in batch.items()
    }


# --- batches ---


@pytest.mark.parametrize(
    ("prompts", "group", "ceiling", "micro", "accumulation"),
    [(3, 4, 8, 6, 2), (5, 8, 16, 10, 4), (1, 2, 8, 2, 1), (4, 2, 1, 1, 8), (2, 3, None, 6, 1)],
)
def test_a_step_optimises_the_prompts_that_were_asked_for(
    trial: Callable[..., Trial], prompts: int, group: int, ceiling: int | None, micro: int, accumulation: int
) -> None:
    more = {"RL_PER_DEVICE_PROMPTS": ceiling} if ceiling else {}
    spec = {"batch_size": prompts, "group_size": group, "steps": 3, "max_tokens": 4}
    made = trial(train=spec, **more)
    arguments = made.trainer.args
    assert arguments.per_device_train_batch_size == made.batch.micro == micro
    assert arguments.gradient_accumulation_steps == made.batch.accumulation == accumulation
    made.trainer.train()
    assert len(made.batches) == made.trainer.state.global_step == 3
    for batch in made.batches:
        counts = Counter(batch.rows)
        assert len(counts) == prompts and set(counts.values()) == {group}
        assert batch.rows == [row for row in counts for _ in range(group)]
    seen = [row for batch in made.batches for row in set(batch.rows)]
    assert len(seen) == len(set(seen)) == 3 * prompts  # no prompt again before all had their turn


def test_each_completion_belongs_to_its_row(trial: Callable[..., Trial]) -> None:
    made = trial()
    batch = made.sample([5, 2])
    texts = made.chat.tokenizer.batch_decode(batch["prompt_ids"])
    assert [made.prompts.texts[row] in text for row, text in zip([5] * 4 + [2] * 4, texts, strict=True)]
    assert made.batches[-1].rows == [5] * 4 + [2] * 4
    with pytest.raises(RuntimeError, match=r"completions 0 to 4 belong to the rows \[1, 2\], not to one"):
        made.reward(completion_ids=[[5]] * 4, row=[1, 1, 1, 2], log_metric=print)


def test_a_tokenizer_that_adds_a_first_token_adds_one(trial: Callable[..., Trial], tmp_path: Path) -> None:
    from tests import harness

    made = trial(model=harness.build_llama(tmp_path / "llama"))
    batch = made.sample([0, 1])
    ids = [
        row[mask.bool()].tolist() for row, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    ]
    assert ids == [made.chat.encode(made.prompts.texts[row]) for row in (0, 0, 0, 0, 1, 1, 1, 1)]
    assert {row.count(made.chat.tokenizer.bos_token_id) for row in ids} == {1}


# --- advantages ---


def test_advantages_are_centred_and_not_scaled(trial: Callable[..., Trial]) -> None:
    made = trial()
    batch = made.sample(range(16))
    assert batch["advantages"].tolist() == pytest.approx(centred(made.batches[-1].rewards))
    assert batch["advantages"].abs().max() > 0.2
    assert (made.trainer.args.loss_type, made.trainer.args.scale_rewards) == ("dr_grpo", "none")


@pytest.mark.parametrize("clip", [0.05, 0.2, 100.0])
def test_the_advantage_clip_clamps(trial: Callable[..., Trial], clip: float) -> None:
    made = trial(train={"advantage_clip": clip})
    batch = made.sample(range(16))
    whole = centred(made.batches[-1].rewards)
    assert batch["advantages"].tolist() == pytest.approx([max(-clip, min(clip, one)) for one in whole])
    assert (max(map(abs, whole)) > clip) == (clip < 1)


def centred(rewards: list[float | None], group: int = 4) -> list[float]:
    """Each reward less the mean of its group's rewards; 0 where there is none."""
    result: list[float] = []
    for start in range(0, len(rewards), group):
        members = rewards[start : start + group]
        there = [one for one in members if one is not None]
        result += [0.0 if one is None else one - sum(there) / len(there) for one in members]
    return result


# --- samples that cannot be scored ---


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_samples_without_a_reward_contribute_no_gradient(trial: Callable[..., Trial], beta: float) -> None:
    import torch

    made = trial("brittle", train={"kl_penalty_coef": beta})
    disturb(made)
    batch = made.sample(range(16))
    rewards = made.batches[-1].rewards
    scored = [index for index, one in enumerate(rewards) if one is not None]
    assert 0 < len(scored) < len(rewards)
    assert batch["advantages"].tolist() == pytest.approx(centred(rewards))
    whole, without = made.gradients(batch), made.gradients(only(batch, scored))
    assert max(one.abs().max() for one in whole.values()) > 0
    for name, gradient in whole.items():
        # dr_grpo divides by the number of samples, those without a reward included
        expected = without[name] * len(scored) / len(rewards)
        assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-7), name
    unscored = [index for index, one in enumerate(rewards) if one is None]
    nothing = made.gradients(only(batch, unscored))
    assert nothing and not any(one.any() for one in nothing.values())


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_batch_of_samples_without_a_reward_has_no_gradient(
    trial: Callable[..., Trial], beta: float
) -> None:
    made = trial("hopeless", train={"kl_penalty_coef": beta})
    disturb(made)
    nothing = made.gradients(made.sample([0, 1]))
    assert nothing and not any(one.any() for one in nothing.values())
    plain = trial("plain", train={"kl_penalty_coef": beta})
    disturb(plain)
    assert any(one.any() for one in plain.gradients(plain.sample(range(16))).values())


def test_they_are_counted_and_logged(trial: Callable[..., Trial]) -> None:
    made = trial("brittle", train={"steps": 3})
    made.trainer.train()
    rewards = [one for batch in made.batches for one in batch.rewards]
    tally = made.tally
    assert tally.unscorable == rewards.count(None) > 0
    assert tally.scored == len(rewards) - tally.unscorable
    assert tally.problems == {"LookupError": tally.unscorable}
    [*_, last] = made.history.publisher.beats
    assert last["unscorable"] == tally.unscorable
    for batch, beat in zip(made.batches, made.history.publisher.beats, strict=True):
        there = [one for one in batch.rewards if one is not None]
        assert beat["reward"] == pytest.approx(sum(there) / len(there))


# --- where a completion ends ---


def test_a_completion_ends_at_a_stop_sequence(trial: Callable[..., Trial]) -> None:
    from tests.test_grpo import check_stops

    made = trial(train={"stop_sequences": ["7", "9"], "max_tokens": 3, "steps": 1})
    check_stops(made, made.sample(range(16)))


def test_a_completion_that_the_budget_cut_off_is_masked(trial: Callable[..., Trial]) -> None:
    made = trial(train={"max_tokens": 3})
    batch = made.sample(range(24))
    ends = [ids[-1] in made.chat.stop_ids for ids in made.batches[-1].ids]
    assert 0 < sum(ends) < len(ends)
    kept = [len(ids) if end else 0 for ids, end in zip(made.batches[-1].ids, ends, strict=True)]
    assert batch["completion_mask"].sum(dim=1).tolist() == kept
    assert [reply.truncated for reply in made.batches[-1].replies] == [not end for end in ends]


def test_a_seed_samples_the_same_and_another_does_not(trial: Callable[..., Trial]) -> None:
    import torch

    samples = []
    for seed in (3, 3, 4):
        made = trial(SEED=seed)
        torch.manual_seed(len(samples))
        state = torch.get_rng_state()
        row = made.prompts.texts.index(min(made.prompts.texts))
        made.sample([row, row])
        assert torch.equal(torch.get_rng_state(), state)
        samples.append(made.batches[-1].ids)
    assert samples[0] == samples[1] != samples[2]


# --- thinking ---


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("coefficient", [0.0, 0.01])
def test_thinking_costs_by_the_token_and_is_not_graded(
    trial: Callable[..., Trial], with_template: Callable[[str], Path], coefficient: float, opened: bool
) -> None:
    made = trial(
        "brittle",
        model=with_template("qwen3_5" if opened else "qwen3"),
        train={"thinking_length_penalty_coef": coefficient, "max_tokens": 64},
        thinking=True,
    )
    assert made.prompts.texts[0].endswith("<think>\n") is opened
    reasoning = "\nfirst 12, then 34\n"
    tokens = len(made.chat.encode(reasoning))
    assert tokens > 8
    start = "" if opened else "<think>"
    texts = [f"{start}{reasoning}</think>\n\n2113", f"{start}{reasoning}", "2113", f"{start}x</think>7"]
    ids = [[*made.chat.encode(text), made.chat.end_of_turn_id] for text in texts]
    rewards = made.reward(completion_ids=ids, row=[0] * 4, log_metric=lambda *_: None)
    answered = Reply("2113") if not opened else Reply("", "2113")
    assert made.batches[-1].replies == [
        Reply("2113", reasoning),
        Reply("", reasoning),
        answered,
        Reply("7", "x"),
    ]
    unanswered = -coefficient * len(made.chat.encode("2113")) if opened else 0.5
    assert rewards == [
        pytest.approx(0.5 - coefficient * tokens),
        pytest.approx(-coefficient * tokens),
        pytest.approx(unanswered),
        None,
    ]


def test_with_thinking_off_nothing_is_cut_or_charged(trial: Callable[..., Trial]) -> None:
    made = trial(train={"thinking_length_penalty_coef": 0.5})
    texts = ["<think>11</think>", "11", "<think>", "</think>2"]
    ids = [[*made.chat.encode(text), made.chat.end_of_turn_id] for text in texts]
    rewards = made.reward(completion_ids=ids, row=[0] * 4, log_metric=lambda *_: None)
    assert [reply.text for reply in made.batches[-1].replies] == texts
    assert rewards == [0.0, 1.0, 0.0, 0.0]
