"""GRPO with the colocated vLLM: the base stays as it was, the engine is always the policy."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import recipe
from tests import grpo_trials, harness
from tests.grpo_trials import Trial
from training import engine
from training.engine import EngineProblem
from training.random_streams import sampler_seed

pytestmark = pytest.mark.slow

STEPS = {"float32": 20, "bfloat16": 6}
SYNCS = ["adapter", "merge"]


@pytest.fixture
def trial(tiny_model: Path, tmp_path: Path) -> Callable[..., Trial]:
    """Return a function that builds a trainer which has made no step yet."""

    def make(*args: Any, model: Path = tiny_model, dtype: str = "float32", **more: Any) -> Trial:
        return grpo_trials.build(grpo_trials.variables(tmp_path, model, *args, **more), dtype=dtype)

    return make


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Trial]]:
    """Return a function that trains once for each sync mode and precision."""

    @functools.cache
    def run(sync: str, dtype: str) -> Trial:
        folder = tmp_path_factory.mktemp(f"{sync}-{dtype}")
        steps = {"steps": STEPS[dtype]}
        env = grpo_trials.variables(folder, tiny_model, train=steps, RL_ADAPTER_SYNC=sync)
        made = grpo_trials.build(env, dtype=dtype)
        made.trainer.train()
        return made

    yield run
    run.cache_clear()


# --- base and policy ---


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("sync", SYNCS)
def test_the_base_is_bit_identical_after_training(
    trained: Callable[..., Trial], tiny_model: Path, sync: str, dtype: str
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    trial = trained(sync, dtype)
    assert trial.trainer.state.global_step == STEPS[dtype]
    loaded = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=dtype)
    before, after = dict(loaded.named_parameters()), trial.base_weights()
    assert before.keys() == after.keys()
    for name, parameter in after.items():
        assert parameter.dtype == getattr(torch, dtype)
        assert torch.equal(parameter, before[name]), name
    assert any(one.any() for name, one in trial.adapter_weights().items() if "lora_B" in name)
    assert trial.tally.has_gradient and trial.tally.nonfinite_steps == 0


@pytest.mark.parametrize("sync", SYNCS)
def test_the_engine_runs_the_newest_adapter(trained: Callable[..., Trial], sync: str) -> None:
    import torch

    trial = trained(sync, "float32")
    gaps = trial.logged("sampling/sampling_logp_difference/max")
    assert len(gaps) == 20 and max(gaps) < 1e-3
    assert max(trial.logged("completions/clipped_ratio")) < 1  # cut-off samples are not measured
    assert trial.engine.version == 20
    rewards = trial.logged("reward")
    assert max(rewards) > rewards[0] + 0.5
    # What a sampler that had stayed behind would have shown.
    batch = trial.sample([0])
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    with torch.no_grad(), trial.trainer.model.disable_adapter():
        base, _, _ = trial.trainer._get_per_token_logps_and_entropies(
            trial.trainer.model, ids, torch.ones_like(ids), batch["completion_ids"].shape[1]
        )
    assert (base - batch["sampling_per_token_logps"]).abs().max() > 1


def test_in_bfloat16_the_sampler_stays_close(trained: Callable[..., Trial]) -> None:
    for sync in SYNCS:
        trial = trained(sync, "bfloat16")
        assert max(trial.logged("sampling/sampling_logp_difference/mean")) < 0.1


def test_the_history_is_the_logged_reward_and_the_samples_own(trained: Callable[..., Trial]) -> None:
    from training.midrun import reward_history

    trial = trained("adapter", "float32")
    means = [sum(batch.rewards) / len(batch.rewards) for batch in trial.batches[:20]]
    history = reward_history(trial.trainer.state)
    assert history == pytest.approx(means)
    assert trial.tally.generated_tokens == sum(len(ids) for batch in trial.batches for ids in batch.ids)
    beats = trial.history.publisher.beats
    assert [beat["step"] for beat in beats] == list(range(1, 21))
    assert beats[-1]["reward_last"] == history[-8:]
    lengths = [len(reply.text) for reply in trial.batches[-1].replies]
    assert beats[0]["rewards"].keys() == {"ones", "length", "num_turns"} and lengths


def test_nothing_is_left_in_shared_memory(trained: Callable[..., Trial]) -> None:
    trained("adapter", "float32")
    assert not list(engine.SHARED_MEMORY.glob("policy-*"))


# --- what the engine is given ---


@pytest.mark.parametrize(
    ("rank", "served"),
    [(1, 8), (8, 8), (9, 16), (16, 16), (32, 32), (33, 64), (100, 128), (129, 256), (257, 320), (321, 512)],
)
def test_the_rank_that_vllm_allocates_for(rank: int, served: int) -> None:
    assert recipe.served_rank(rank) == served


def test_a_rank_above_512_is_refused() -> None:
    assert recipe.served_rank(512) == 512
    with pytest.raises(ValueError, match=r"JobSpec train\.lora_rank=513: vLLM serves ranks up to 512"):
        recipe.served_rank(513)


def test_how_the_engine_is_built(trial: Callable[..., Trial]) -> None:
    options = trial(train={"lora_rank": 12}).engine.options
    memory = recipe.EngineMemory(kv_cache_bytes=1000, share=0.3)
    given = engine.engine_arguments(options, 2, 16, memory)
    assert (given["dtype"], given["enforce_eager"], given["enable_sleep_mode"]) == ("float32", True, False)
    assert (given["enable_lora"], given["max_lora_rank"], given["max_loras"]) == (True, 16, 1)
    assert (given["kv_cache_memory_bytes"], given["gpu_memory_utilization"]) == (1000, 0.3)
    assert (given["max_model_len"], given["max_num_seqs"], given["seed"]) == (options.max_length, 16, 2)
    assert "language_model_only" not in given
    changes = {"text_only": True, "sync": "merge", "sleep": True, "memory_share": 0.6, "dtype": "bfloat16"}
    given = engine.engine_arguments(dataclasses.replace(options, **changes), 0, 16, memory)
    assert given["language_model_only"] is True and "enable_lora" not in given
    assert (given["kv_cache_memory_bytes"], given["gpu_memory_utilization"]) == (None, 0.6)
    assert given["enable_sleep_mode"] is True and given["dtype"] == "bfloat16"


def test_a_tokenizer_that_adds_a_first_token_adds_one(trial: Callable[..., Trial], tmp_path: Path) -> None:
    made = trial(model=harness.build_llama(tmp_path / "llama"), train={"steps": 2})
    made.tally.has_gradient = True  # it never ends a turn, so nothing of it is trained on
    begin = made.chat.tokenizer.bos_token_id
    assert made.chat.tokenizer("x")["input_ids"][0] == begin  # it would add one to a rendered text, too
    asked, generate = [], made.engine.llm.generate

    def watched(prompts: Any, **more: Any) -> Any:
        asked.extend(one["prompt_token_ids"] for one in prompts)
        return generate(prompts, **more)

    made.engine.llm.generate = watched
    made.trainer.train()
    assert len(asked) == 2 * made.batch.sequences
    assert all(ids[0] == begin and ids.count(begin) == 1 for ids in asked)
    known = {tuple(made.chat.encode(text)) for text in made.prompts.texts}
    assert {tuple(ids) for ids in asked} <= known


def test_a_completion_ends_at_a_stop_sequence(trial: Callable[..., Trial]) -> None:
    made = trial(train={"stop_sequences": ["7", "9"], "max_tokens": 3, "steps": 1})
    batch = made.sample(range(16))
    check_stops(made, batch)


def check_stops(made: Trial, batch: dict[str, Any]) -> None:
    """Nothing follows a stop, it is not graded, and no completion is masked for having no end of turn."""
    texts = [made.chat.reply_text(ids) for ids in made.batches[-1].ids]
    stopped = [text for text in texts if "7" in text or "9" in text]
    assert 0 < len(stopped) < len(texts)
    assert all(text[-1] in "79" and not set(text[:-1]) & set("79") for text in stopped)
    graded = [reply.text for reply in made.batches[-1].replies]
    assert graded == [text.rstrip("79") if text in stopped else text for text in texts]
    assert [int(row.sum()) for row in batch["completion_mask"]] == [len(ids) for ids in made.batches[-1].ids]


# --- random streams ---


def test_the_samplers_stream_is_its_own(trial: Callable[..., Trial]) -> None:
    import numpy
    import torch

    def state() -> Any:
        return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()

    torch.manual_seed(5)
    drawn = torch.rand(3).tolist()
    torch.manual_seed(5)
    same = [trial(SEED=3), trial(SEED=3)]
    before = state()
    options = same[0].engine.options
    with engine.in_place_of_trls(options):
        importlib.import_module("trl.trainer.grpo_trainer").VLLMGeneration(
            model=same[0].trainer.model,
            accelerator=same[0].trainer.accelerator,
            processing_class=same[0].chat.tokenizer,
            max_num_seqs=2,
        )
    assert state() == before  # building an engine
    samples = []
    for one in same:
        # TRL's trainer seeds the process when it is built; the samples must not hang on where that stream is.
        torch.manual_seed(len(samples))
        one.sample([0, 1])
        samples.append(one.batches[-1].ids)
    assert samples[0] == samples[1] and drawn
    same[0].trainer.state.global_step += 1
    same[0].sample([0, 1])
    assert same[0].batches[-1].ids != samples[0]  # another step, another stream
    other = trial(SEED=4)
    rows = [other.prompts.texts.index(same[0].prompts.texts[row]) for row in (0, 1)]
    other.sample(rows)
    assert other.batches[-1].ids != samples[0]
    before = state()
    other.engine.generate([other.chat.encode(other.prompts.texts[0])], None, 1)
    assert state() == before  # sampling


def test_the_seed_of_a_step_is_one_of_its_own() -> None:
    seeds = {sampler_seed(seed, step, rank) for seed in range(4) for step in range(20) for rank in range(3)}
    assert len(seeds) == 240 and all(0 <= seed < 2**63 for seed in seeds)
    assert sampler_seed(1, 11, 0) != sampler_seed(11, 1, 0) != sampler_seed(1, 1, 10)
    assert sampler_seed(0, 0, 0) == sampler_seed(0, 0, 0)


# --- an engine that is not the policy ---


def test_an_engine_without_the_policy_refuses(trial: Callable[..., Trial]) -> None:
    made = trial(train={"steps": 2})
    with pytest.raises(EngineProblem, match="before it was given the policy's weights"):
        made.engine.generate([[1, 2, 3]], None, 1)
    made.sample([0])
    made.engine.llm.llm_engine.remove_lora(engine.LORA_ID)
    with pytest.raises(EngineProblem, match="lost the adapter"):
        made.sample([0])


@pytest.mark.parametrize("sync", SYNCS)
def test_an_engine_that_stays_behind_ends_the_run(trial: Callable[..., Trial], sync: str) -> None:
    import torch

    made = trial(train={"steps": 2}, RL_ADAPTER_SYNC=sync)
    made.sample([0])
    with torch.no_grad():
        for name, parameter in made.adapter_weights().items():
            if "lora_B" in name:
                parameter.normal_()
    with pytest.raises(EngineProblem, match=r"disagree by \d+\.\d\d nats a token") as raised:
        made.sample([0])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("method", engine.SEAM_METHODS)
def test_a_seam_that_moved_is_one_line(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    module = importlib.import_module("trl.trainer.grpo_trainer")
    monkeypatch.delattr(module.VLLMGeneration, method)
    with pytest.raises(EngineProblem, match=f"TRL has moved its seam: .*lacks {method}; pin trl") as raised:
        trial()
    assert "\n" not in str(raised.value)


def test_a_seam_that_is_gone_is_one_line(
    trial: Callable[..., Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(importlib.import_module("trl.trainer.grpo_trainer"), "VLLMGeneration")
    with pytest.raises(EngineProblem, match="TRL has moved its seam"):
        trial()


def test_trl_gets_its_own_engine_back(trial: Callable[..., Trial]) -> None:
    module = importlib.import_module("trl.trainer.grpo_trainer")
    original = module.VLLMGeneration
    assert isinstance(trial().engine, engine.PolicyEngine)
    assert module.VLLMGeneration is original and not issubclass(original, engine.PolicyEngine)
