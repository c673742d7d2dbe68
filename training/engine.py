"""Token generation over colocated vLLM, whose weights follow the policy and never touch the frozen base.

TRL's own colocated sync merges the adapter into the base and takes it out again at every step, which changes
a bf16 base and destroys a 4-bit one. Here the adapter is handed to vLLM as LoRA (`adapter`), or `base +
delta` is computed out of place (`merge`). The one seam is the name `VLLMGeneration` that TRL's GRPO trainer
looks up.
"""

import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recipe
from training.random_streams import kept_random_state, sampler_seed, seeded

log = logging.getLogger(__name__)

CPU_KV_ROOM_BYTES = 1 << 30
LORA_ID, LORA_NAME = 1, "policy"
LOADED = "/nowhere"  # a path the engine has no need of any more
SHARED_MEMORY = Path("/dev/shm")
SEAM = ("trl.trainer.grpo_trainer", "VLLMGeneration")
SEAM_METHODS = ("_init_vllm", "sync_weights", "generate")


class EngineProblem(RuntimeError):
    """The engine cannot be built, or would sample from something that is not the policy."""


@dataclass(frozen=True)
class EngineOptions:
    """How the engine is built, from two folders, and fed; lengths are tokens, sizes bytes."""

    weights: str
    tokenizer: str
    dtype: str
    sync: str
    lora_rank: int
    max_length: int
    kv_bytes_per_token: int
    state_bytes: int
    memory_share: float | None
    eager: bool
    sleep: bool
    text_only: bool
    four_bit: bool
    stop_ids: tuple[int, ...]
    seed: int


@contextmanager
def in_place_of_trls(options: EngineOptions) -> Iterator[None]:
    """Let a GRPO trainer built inside the context build our engine; EngineProblem when TRL's seam moved."""
    import importlib

    module_name, name = SEAM
    module = importlib.import_module(module_name)
    original = vars(module).get(name)
    missing = [method for method in SEAM_METHODS if original is None or method not in vars(original)]
    if original is None or missing:
        raise EngineProblem(
            f"TRL has moved its seam: {module_name}.{name} lacks {', '.join(missing)}; pin trl==1.16.0"
        )
    setattr(module, name, type("PolicyEngine", (PolicyEngine, original), {"options": options}))
    try:
        yield
    finally:
        setattr(module, name, original)


class PolicyEngine:
    """What TRL's `VLLMGeneration` becomes; a mixin, as importing TRL imports torch."""

    options: EngineOptions
    model: Any
    accelerator: Any

    def _init_vllm(self) -> None:
        from trl.trainer.utils import ensure_master_addr_port
        from vllm import LLM

        options, rank = self.options, self.accelerator.process_index
        # vLLM's in-process executor takes its place among the processes from these.
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(self.accelerator.local_process_index),
            WORLD_SIZE=str(self.accelerator.num_processes),
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
        )
        # TRL tries a few fixed ports: two workers that start on one machine at a time take the same.
        ensure_master_addr_port(port=free_port() if self.accelerator.num_processes == 1 else None)
        with kept_random_state():
            self.llm = LLM(**engine_arguments(options, rank, self.max_num_seqs, self._memory()))  # type: ignore[attr-defined]
        self.rank, self.version = rank, 0
        self.current_step: Callable[[], int] = lambda: 0
        self.check: Callable[[], None] = lambda: None
        self._check_between_steps()
        self.weights_asleep = options.sleep
        if options.sleep:
            self.llm.sleep(level=1)
        self.accelerator.wait_for_everyone()

    def _check_between_steps(self) -> None:
        """A rollout of minutes is no reason to overstay the grace time of a preempted machine."""
        engine_step = self.llm.llm_engine.step

        def step() -> Any:
            self.check()
            return engine_step()

        self.llm.llm_engine.step = step

    def _memory(self) -> recipe.EngineMemory:
        import torch

        weights = sum(one.numel() * one.element_size() for one in self.model.parameters())
        free, card = torch.cuda.mem_get_info() if torch.cuda.is_available() else (CPU_KV_ROOM_BYTES, None)
        return recipe.engine_memory(
            sequences=self.max_num_seqs,  # type: ignore[attr-defined]
            length=self.options.max_length,
            kv_bytes_per_token=self.options.kv_bytes_per_token,
            state_bytes=self.options.state_bytes,
            weights_bytes=weights,
            free_bytes=free,
            card_bytes=card,
        )

    def sync_weights(self) -> None:
        """Give the engine the policy's newest weights."""
        self._wake_weights()
        if self.options.sync == "adapter":
            self._load_adapter()
        else:
            self._load_merged()
        self.version += 1
        self.llm.reset_prefix_cache()

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], None]:
        """Sample one completion per prompt (repeated prompts are samples of one group).

        Returns prompt ids, completion ids (B, T), log-probabilities of sampled tokens (B, T, 1), and None.
        """
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        with profiler or nullcontext(), self.awake(), self.seeded():
            outputs = self.llm.generate(
                requests, sampling_params=self._sampling(), lora_request=self._lora(), use_tqdm=False
            )
        samples = [one.outputs[0] for one in outputs]
        logprobs = [
            [[step[token].logprob] for token, step in zip(one.token_ids, one.logprobs, strict=True)]
            for one in samples
        ]
        return [list(ids) for ids in prompts], [list(one.token_ids) for one in samples], logprobs, None

    def submit(self, key: str, request: Any) -> None:
        """Let a request of `training.sampler` join the running batch."""
        from vllm import SamplingParams

        how = SamplingParams(
            n=1,
            temperature=request.temperature,
            top_p=request.top_p,
            max_tokens=request.max_tokens,
            logprobs=0,
            stop=list(request.stop),
            stop_token_ids=list(request.stop_ids),
        )
        prompt = {"prompt_token_ids": list(request.ids)}
        self.llm.llm_engine.add_request(key, prompt, how, lora_request=self._lora())

    def seeded(self) -> AbstractContextManager[None]:
        """A context in which the engine draws from this step's own random stream."""
        return seeded(sampler_seed(self.options.seed, self.current_step(), self.rank))

    def check_policy(self) -> None:
        """Raise EngineProblem unless the engine runs the adapter."""
        if self.version == 0:
            raise EngineProblem("the engine was asked to sample before it was given the policy's weights")
        if self.options.sync == "adapter" and LORA_ID not in self.llm.llm_engine.list_loras():
            raise EngineProblem("the engine has lost the adapter and would sample from the bare base model")

    # --- weights ---

    def _load_adapter(self) -> None:
        from vllm.lora.request import LoRARequest

        # Gone again once it is loaded: the process leaves by a hard exit, and an engine that loses the
        # adapter cannot quietly bring back an old one.
        shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        with tempfile.TemporaryDirectory(prefix="policy-", dir=shared) as folder:
            write_adapter(self.model, Path(folder))
            request = LoRARequest(LORA_NAME, LORA_ID, folder, load_inplace=True)
            if not self.llm.llm_engine.add_lora(request):
                raise EngineProblem("vLLM did not take the adapter; RL_ADAPTER_SYNC=merge serves any module")

    def _load_merged(self) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": merged_weights(self.model)})

    def _lora(self) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(LORA_NAME, LORA_ID, LOADED) if self.options.sync == "adapter" else None

    def _sampling(self) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            n=1,
            temperature=self.temperature,  # type: ignore[attr-defined]
            top_p=self.top_p,  # type: ignore[attr-defined]
            max_tokens=self.max_completion_length,  # type: ignore[attr-defined]
            logprobs=0,
            stop_token_ids=list(self.options.stop_ids),
            **self.generation_kwargs,  # type: ignore[attr-defined]
        )

    # --- sleep ---

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Weights and KV cache in place inside the context, and given back after it, also on error."""
        self.check_policy()
        if not self.options.sleep:
            yield
            return
        self._wake_weights()
        self.llm.wake_up(tags=["kv_cache"])
        try:
            yield
        finally:
            self.llm.sleep(level=1)  # level 2 would throw the base away
            self.weights_asleep = True

    def _wake_weights(self) -> None:
        if self.weights_asleep:
            import torch

            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["weights"])
            self.weights_asleep = False


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def engine_arguments(
    options: EngineOptions, rank: int, sequences: int, memory: recipe.EngineMemory
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`."""
    arguments = {
        "model": options.weights,
        "tokenizer": options.tokenizer,
        "dtype": options.dtype,
        "max_model_len": options.max_length,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": 4096,
        "kv_cache_memory_bytes": None if options.memory_share else memory.kv_cache_bytes,
        "gpu_memory_utilization": options.memory_share or memory.share,
        "enforce_eager": options.eager,
        "enable_sleep_mode": options.sleep,
        "seed": rank,
        "logprobs_mode": "processed_logprobs",
        "distributed_executor_backend": "external_launcher",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if options.sync == "adapter":
        served = recipe.served_rank(options.lora_rank)
        arguments |= {"enable_lora": True, "max_lora_rank": served, "max_loras": 1, "max_cpu_loras": 1}
    if options.text_only:
        arguments["language_model_only"] = True
    if options.four_bit:
        arguments["quantization"] = "bitsandbytes"
    return arguments


def write_adapter(model: Any, folder: Path) -> None:
    """Write the trained adapter alone (TRL may hold a reference one besides) the way peft saves it."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    state = get_peft_model_state_dict(model, adapter_name="default", save_embedding_layers=False)
    save_file(
        {name: tensor.contiguous().cpu() for name, tensor in state.items()},
        folder / "adapter_model.safetensors",
    )
    model.peft_config["default"].save_pretrained(folder)


def merged_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield every weight under its checkpoint name, with the adapter's delta added out of place."""
    import torch
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model()
    deltas = {
        f"{name}.weight": module.get_delta_weight
        for name, module in base.named_modules()
        if isinstance(module, LoraLayer) and "default" in module.lora_A
    }
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if "lora_" in name:
                continue
            plain = name.replace(".base_layer", "")
            if plain in deltas:
                total = parameter.float() + deltas[plain]("default").float()
                yield plain, total.to(parameter.dtype)
            else:
                yield plain, parameter.detach()
