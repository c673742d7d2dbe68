"""What TRL's GRPO trainer lacks, as a mixin: inheriting from TRL's class here would import torch."""

from typing import Any

from job.chat import Chat
from job.settings import Settings
from training.conversations import Way
from training.engine import EngineProblem
from training.fitting import keeping_checkpointing
from training.random_streams import by_epoch, sampler_seed, seeded
from training.sampler import EngineSampler, ModelSampler, interruptible

DISAGREEMENT_NATS = 1.0  # bf16 noise is below 0.1


class PolicyTrainer:
    """Prompt ids are the worker's own; samples without a reward leave the loss, not only the baseline.

    Centred advantages can be clamped, generated tokens are counted, a sampler that is another model is found.
    """

    def follow(self: Any, settings: Settings, chat: Chat, way: Way) -> None:
        """Take what the methods below need; called once, before training."""
        self.settings, self.chat, self.tally = settings, chat, way.tally
        self.check_run = way.scorer.check
        self.tool_schemas = way.tool_schemas
        self.eos_token_ids = sorted({*self.eos_token_ids, *chat.stop_ids})
        if settings.rl_use_vllm:
            self.vllm_generation.current_step = lambda: self.state.global_step
            self.vllm_generation.check = self.check
            self.sampler: Any = EngineSampler(self.vllm_generation)
        else:
            self.generation_config.eos_token_id = self.generation_kwargs["eos_token_id"] = self.eos_token_ids
            self.sampler = ModelSampler(self, chat.cut_at, self.check)

    @property
    def tokens_so_far(self: Any) -> int:
        return self.tally.generated_tokens

    def check(self: Any) -> None:
        """Called before every token of a generation: it has not hung, and may have to stop."""
        self.sampling_passes += 1
        self.check_run()

    def _get_train_sampler(self: Any, dataset: Any = None) -> Any:
        return by_epoch(super()._get_train_sampler(dataset), self.args.seed)  # type: ignore[misc]

    def _tokenize_prompts(self: Any, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        texts = [one if isinstance(one, str) else self.chat.render(one, self.tool_schemas) for one in prompts]
        return [self.chat.encode(one) for one in texts], None, {}

    def _generate_single_turn(self: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        generate = super()._generate_single_turn  # type: ignore[misc]
        if self.settings.rl_use_vllm:
            return generate(prompt_ids, *args, **kwargs)

        def sample(part: Any) -> Any:
            with keeping_checkpointing(self):
                return generate(part, *args, **kwargs)[0]

        seed = sampler_seed(self.args.seed, self.state.global_step, self.accelerator.process_index)
        with seeded(seed), interruptible(self.model, self.check):
            ids = self.sampler.in_parts(prompt_ids, sample)
        return [self.chat.cut_at(one, self.settings.stop_sequences) for one in ids], None

    def _generate(self: Any, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)  # type: ignore[misc]
        completion_ids, env_mask = generated[1], generated[2]
        self.tally.generated_tokens += (
            sum(map(len, completion_ids)) if env_mask is None else sum(map(sum, env_mask))
        )
        return generated

    def _calculate_rewards(self: Any, inputs: Any, *args: Any) -> Any:
        rewards = super()._calculate_rewards(inputs, *args)  # type: ignore[misc]
        first = self.accelerator.process_index * len(inputs)
        self.unscorable = rewards.isnan().all(dim=1)[first : first + len(inputs)]
        return rewards

    def _generate_and_score_completions(self: Any, inputs: Any) -> dict[str, Any]:
        self.batch_rows = [one["row"] for one in inputs]
        batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        self._check_sampler()
        batch["completion_mask"] = batch["completion_mask"] * ~self.unscorable.unsqueeze(1)
        if self.settings.advantage_clip:
            batch["advantages"] = batch["advantages"].clamp(
                -self.settings.advantage_clip, self.settings.advantage_clip
            )
        return batch

    def _check_sampler(self: Any) -> None:
        gaps = self._metrics["train"]["sampling/sampling_logp_difference/mean"]
        if gaps and gaps[-1] > DISAGREEMENT_NATS:
            raise EngineProblem(
                f"sampler and trainer disagree by {gaps[-1]:.2f} nats a token: the engine does not run the"
                " policy (RL_ADAPTER_SYNC)"
            )
