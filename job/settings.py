"""Environment variable > JobSpec > catalog > recipe, resolved once into one frozen `Settings`.

Every variable the worker knows is one entry of the tables below: its name, type, range and meaning. `--help`,
`--check`, the README and the error messages are all read off them.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, SettingsConfigDict

import recipe
from job import knobs
from job.given import read_spec, secret_values
from job.knobs import Bool, Float, SettingsError, knob
from spec import JobSpec, RepoId

SEED_LIMIT = 2**32
SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
Tracker = Literal["wandb", "trackio", "tensorboard", "mlflow"]


def _mode_of(data: Mapping[str, Any]) -> str:
    return data["spec"].phase if data["spec"] is not None else "sft"


class Identity(BaseSettings):
    """Which run this is and where its files go: all that is needed to report a failure."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        frozen=True, extra="ignore", arbitrary_types_allowed=True, protected_namespaces=(),
        validate_default=False,  # `check_names` judges the seed: it can say where it is from
    )  # fmt: skip

    spec: JobSpec | None = Field(default=None, exclude=True)
    origins: dict[str, str] = Field(default_factory=dict, exclude=True)
    secrets: tuple[str, ...] = Field(default=(), exclude=True, repr=False)

    mode: Annotated[Literal["sft", "rl"], BeforeValidator(knobs.lower)] = knob(
        "RUN_MODE", "which trainer", _mode_of, shown="spec phase, else sft"
    )
    phase: str = knob(
        "PHASE",
        "first part of the prefix in the store",
        lambda data: data["spec"].phase if data["spec"] else data["mode"],
        shown="spec phase, else mode",
    )
    run_id: str = knob("RUN_ID", "second part of the prefix", "local", spec="run_id")
    seed: int = knob(
        "SEED",
        "third part of the prefix; trainer seed; shuffle seed",
        lambda data: data["spec"].train.seeds[0] if data["spec"] else 0,
        shown="first of train.seeds, else 0",
        ge=0,
        lt=SEED_LIMIT,
    )
    hf_repo: RepoId = knob(
        "HF_REPO",
        "the store, a Hub dataset repository owner/name; empty = a folder",
        "",
        spec="train.hf_repo",
    )
    store_dir: Path = knob(
        "AUTOSLM_STORE_DIR", "the folder store, used when no repository is named", Path("artifacts")
    )
    work_dir: Annotated[Path, AfterValidator(Path.absolute)] = knob(
        "AUTOSLM_WORK_DIR", "root of every local file", Path("/tmp")
    )
    token: Annotated[str, Field(pattern=knobs.TOKEN)] = knob(
        "HF_TOKEN", "token for all Hub traffic (HUGGINGFACE_TOKEN is the same)", "", repr=False
    )
    endpoint: Annotated[str, Field(pattern=knobs.ADDRESS)] = knob(
        "HF_ENDPOINT", "the Hub's address", "", shown="the client's own"
    )
    heartbeat_min_s: Float = knob(
        "AUTOSLM_HEARTBEAT_MIN_S",
        "minimum seconds between commits of throttled beats",
        60.0,
        lenient=True,
        ge=0,
    )
    upload_deadline_s: Float = knob(
        "AUTOSLM_UPLOAD_DEADLINE_S", "seconds a required upload may keep trying", 1800.0, gt=0, le=604_800
    )
    grace_s: Float = knob(
        "AUTOSLM_GRACE_S", "seconds a preempted worker may take to leave", 25.0, gt=0, le=86_400
    )
    log_flush_s: Float = knob(
        "AUTOSLM_LOG_FLUSH_S", "seconds to wait for log collectors after a failure", 10.0, ge=0, le=600
    )

    @classmethod
    def read(cls, env: Mapping[str, str], spec: JobSpec | None) -> Self:
        """Resolve the table from `env` and `spec`; raises SettingsError with one line."""
        sources = knobs.sources(cls, env, spec)
        origins = knobs.origins(sources)
        given = {"spec": spec, "origins": origins, "secrets": secret_values(env)}
        knobs.check_overruled(cls, env)
        try:
            return cls(_build_sources=((*sources, InitSettingsSource(cls, given)), {}))
        except ValidationError as error:
            raise SettingsError(knobs.one_line(cls, error, origins)) from None

    @property
    def prefix(self) -> str:
        """Where this run's files lie in the store."""
        return f"{self.phase}/{self.run_id}/seed{self.seed}"

    def check_names(self) -> None:
        """Refuse a phase or run id that is no plain file name: both are part of every path the run writes."""
        for variable, value in (("PHASE", self.phase), ("RUN_ID", self.run_id)):
            if not SAFE_NAME.fullmatch(value):
                raise SettingsError(
                    f"{variable}={value[:80]!r}: it names a folder, so use 1 to 128 letters, digits,"
                    " dots, dashes or underscores, and begin with a letter, digit or underscore"
                )
        if not 0 <= self.seed < SEED_LIMIT:
            raise SettingsError(f"JobSpec train.seeds={self.seed}: a seed must be >= 0 and < 2**32")


def identify(env: Mapping[str, str]) -> tuple[Identity, ValueError | None]:
    """Return who this run is, and what is wrong with that if anything; never raises on bad input.

    With a problem the identity holds what could be read, made safe for file names: enough to report.
    """
    spec = None
    try:
        spec = read_spec(env)
        identity = Identity.read(env, spec)
        identity.check_names()
        return identity, None
    except ValueError as problem:
        return _fallback(env, spec), problem


def _fallback(env: Mapping[str, str], spec: JobSpec | None) -> Identity:
    token = env.get("HF_TOKEN", "").strip() or env.get("HUGGINGFACE_TOKEN", "")
    env = {**env, "HF_TOKEN": token, "HUGGINGFACE_TOKEN": ""}

    def given(name: str) -> str:
        return env.get(name, "").strip()

    fields = {one.name: Identity.model_fields[one.field] for one in knobs.declared(Identity)}
    wrong = [name for name, field in fields.items() if given(name) and not knobs.accepts(field, given(name))]
    identity = Identity.read({name: text for name, text in env.items() if name not in wrong}, spec)
    mode = "" if spec else given("RUN_MODE")
    safe = {
        "phase": _safe(given("PHASE") or mode or identity.phase),
        "run_id": _safe(given("RUN_ID") or identity.run_id),
        "seed": _file_name_characters(given("SEED")) if "SEED" in wrong else identity.seed,
    }
    return identity.model_copy(update=safe)


def _safe(name: str) -> str:
    return _file_name_characters(name).lstrip(".-") or "_"


def _file_name_characters(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)[:128]


class Settings(Identity):
    """Everything the run needs to know, resolved and validated."""

    model: str = knob(
        "BENCH_HF_MODEL", "model id or local folder, only read without a JobSpec", recipe.MODEL, spec="model",
        spec_wins=True, min_length=1,
    )  # fmt: skip
    thinking: Bool = knob(
        "AUTOSLM_THINKING",
        "thinking flag, only read without a JobSpec",
        True,
        spec="thinking",
        spec_wins=True,
    )
    arm: str = knob("AUTOSLM_ARM", "copied to metrics `arm`", "runpod")
    device: Annotated[Literal["cuda", "cpu"], BeforeValidator(knobs.lower)] = knob(
        "AUTOSLM_DEVICE", "cpu: float32, eager vLLM, no GPU wait", "cuda"
    )
    processes: int = knob("WORLD_SIZE", "processes of the run, set by `accelerate launch`", 1, ge=1)
    quant: Annotated[Literal["bf16", "4bit-qlora"], BeforeValidator(knobs.lower)] = knob(
        "AUTOSLM_QUANT", "weights' precision", "bf16", catalog="quant", shown="catalog, else bf16"
    )
    quant_repo: RepoId = knob(
        "AUTOSLM_QUANT_REPO", "pre-quantised weights, read only in the 4-bit tier", "", catalog="quant_repo",
        shown="catalog, else empty",
    )  # fmt: skip
    text_only: Bool = knob("AUTOSLM_TEXT_ONLY", "ask vLLM to load multimodal models as text", True)
    lora_targets: Annotated[str | tuple[str, ...], BeforeValidator(knobs.name_list)] = knob(
        "LORA_TARGETS", "module names that get an adapter, comma list", "all-linear", min_length=1
    )
    lora_rank: int = knob("", "LoRA rank", recipe.LORA.rank, spec="train.lora_rank", ge=1)
    lora_alpha: int = knob("", "LoRA alpha", recipe.LORA.alpha, spec="train.lora_alpha", ge=1)
    init_from_adapter: str = knob("", "adapter to go on from", "", spec="train.init_from_adapter")
    learning_rate: Float = knob(
        "", "peak learning rate",
        lambda data: (recipe.SFT if data["mode"] == "sft" else recipe.RL).learning_rate,
        spec="train.learning_rate", shown="sft 1e-4, rl 1e-5", gt=0,
    )  # fmt: skip
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(knobs.lower)] = knob(
        "AUTOSLM_LOG_LEVEL", "at debug the libraries' own logs are shown", "info"
    )
    report_to: Annotated[tuple[Tracker, ...], BeforeValidator(knobs.comma_list)] = knob(
        "AUTOSLM_REPORT_TO", "experiment trackers, comma list", (), shown="none"
    )
    merge: Bool = knob("AUTOSLM_MERGE", "also write and upload merged weights", False)
    hf_transfer: str = knob("HF_HUB_ENABLE_HF_TRANSFER", "echoed in metrics, otherwise ignored", "")
    eval_every_steps: int = knob(
        "AUTOSLM_EVAL_EVERY_STEPS", "mid-run evaluation cadence, 0 = off", 0, lenient=True, ge=0
    )
    eval_num: int = knob("AUTOSLM_EVAL_NUM", "held-out rows used by an evaluation", 64, lenient=True, ge=0)
    eval_max_new: int | None = knob(
        "AUTOSLM_EVAL_MAX_NEW",
        "tokens per evaluated turn",
        None,
        lenient=True,
        shown="completion budget",
        ge=1,
    )
    eval_pass_threshold: float | None = knob(
        "AUTOSLM_EVAL_PASS_THRESHOLD", "pass mark", None, lenient=True, shown="environment's, else 0.5",
        allow_inf_nan=False,
    )  # fmt: skip

    sft_epochs: int = knob("SFT_EPOCHS", "epochs", recipe.SFT.epochs, spec="train.epochs", mode="sft", ge=1)
    sft_max_steps: int = knob("SFT_MAX_STEPS", "cap on optimizer steps, 0 = none", 0, mode="sft", ge=0)
    sft_max_examples: int = knob(
        "SFT_MAX_EXAMPLES", "keep the first N source rows, before shuffling, 0 = all", 0, mode="sft", ge=0
    )
    sft_batch_size: int = knob(
        "", "sequences per optimizer step", recipe.SFT.batch_size, spec="train.batch_size", mode="sft", ge=1
    )
    sft_max_length: int = knob(
        "", "tokens per row", lambda data: recipe.SFT.max_length(data["thinking"]), spec="train.max_length",
        mode="sft", shown="1024, thinking 2048", ge=1,
    )  # fmt: skip
    sft_per_device_bs: int = knob(
        "SFT_PER_DEVICE_BS", "micro-batch ceiling, sequences", recipe.SFT.per_device_batch_size, mode="sft",
        ge=1,
    )  # fmt: skip
    sft_save_steps: int = knob(
        "SFT_SAVE_STEPS", "checkpoint interval, steps", recipe.SFT.save_steps, spec="train.save_every",
        mode="sft", ge=1,
    )  # fmt: skip
    sft_packing: Bool = knob("SFT_PACKING", "pack rows; needs flash attention", False, mode="sft")
    sft_liger: Bool = knob("SFT_LIGER", "fused kernels; needs liger-kernel", False, mode="sft")
    sft_completion_only: Bool = knob(
        "SFT_COMPLETION_ONLY", "off = loss on every token of the row", True, mode="sft"
    )

    rl_steps: int = knob("RL_STEPS", "optimizer steps", recipe.RL.steps, spec="train.steps", mode="rl", ge=1)
    rl_prompts_per_step: int = knob(
        "RL_PROMPTS_PER_STEP", "unique prompts per optimizer step", recipe.RL.prompts_per_step,
        spec="train.batch_size", mode="rl", ge=1,
    )  # fmt: skip
    rl_group_size: int = knob(
        "RL_GROUP_SIZE", "completions per prompt", recipe.RL.group_size, spec="train.group_size", mode="rl",
        ge=1,
    )  # fmt: skip
    rl_per_device_prompts: int | None = knob(
        "RL_PER_DEVICE_PROMPTS", "micro-batch ceiling, counted in completions", None, mode="rl",
        shown="2 thinking, 8 not, lowered by logits memory", ge=1,
    )  # fmt: skip
    rl_max_completion: int = knob(
        "RL_MAX_COMPLETION", "completion budget, tokens",
        lambda data: recipe.RL.max_completion(data["thinking"]),
        spec="train.max_tokens", mode="rl", shown="1536 thinking, 320 not", ge=1,
    )  # fmt: skip
    rl_vllm_max_len: int = knob(
        "RL_VLLM_MAX_LEN", "engine length, tokens",
        lambda data: recipe.engine_length(recipe.RL.max_prompt_length, data["rl_max_completion"]),
        mode="rl", shown="max(1024, 2048 + completion)", ge=1,
    )  # fmt: skip
    rl_vllm_gpu_util: float | None = knob(
        "RL_VLLM_GPU_UTIL", "vLLM's share of GPU memory", None, mode="rl", shown="sized, else 0.45",
        gt=0, lt=1,
    )  # fmt: skip
    rl_vllm_sleep: Bool = knob("RL_VLLM_SLEEP", "vLLM frees its memory between rollouts", True, mode="rl")
    rl_vllm_eager: Bool = knob(
        "RL_VLLM_EAGER", "no graph capture, no compilation", lambda data: data["device"] == "cpu", mode="rl",
        shown="on with cpu, else off",
    )  # fmt: skip
    rl_use_vllm: Bool = knob(
        "RL_USE_VLLM", "off = generate with the trainer's own model", True, mode="rl",
        catalog="grpo_use_vllm", shown="catalog, else on",
    )  # fmt: skip
    rl_adapter_sync: Annotated[Literal["adapter", "merge"], BeforeValidator(knobs.lower)] = knob(
        "RL_ADAPTER_SYNC", "how vLLM gets new weights", "adapter", mode="rl"
    )
    rl_tool_loop: Annotated[Literal["env", "trl"], BeforeValidator(knobs.lower)] = knob(
        "RL_TOOL_LOOP", "who runs the tool loop of a plain ToolEnv", "env", mode="rl"
    )
    rl_save_steps: int = knob(
        "RL_SAVE_STEPS", "checkpoint interval, steps", recipe.RL.save_steps, spec="train.save_every",
        mode="rl", ge=1,
    )  # fmt: skip
    temperature: Float = knob(
        "", "sampling temperature", recipe.RL.temperature, spec="train.temperature", mode="rl", ge=0
    )
    kl_penalty_coef: Float = knob("", "KL beta", 0.0, spec="train.kl_penalty_coef", mode="rl", ge=0)
    advantage_clip: Float = knob(
        "", "advantage clamp, 0 = none", 0.0, spec="train.advantage_clip", mode="rl", ge=0
    )
    thinking_length_penalty_coef: Float = knob(
        "", "reward lost per thinking token", 0.0, spec="train.thinking_length_penalty_coef", mode="rl",
        ge=0, le=1,
    )  # fmt: skip
    stop_sequences: tuple[str, ...] = knob(
        "", "stop strings", (), spec="train.stop_sequences", mode="rl", shown="none"
    )

    @property
    def job(self) -> JobSpec:
        """The JobSpec; `validate_run` has made sure that there is one."""
        assert self.spec is not None
        return self.spec

    @property
    def save_steps(self) -> int:
        return self.sft_save_steps if self.mode == "sft" else self.rl_save_steps

    @property
    def eval_tokens(self) -> int:
        """Tokens of an evaluated turn."""
        return self.eval_max_new or self.rl_max_completion

    @property
    def engine_sleeps(self) -> bool:
        return self.rl_vllm_sleep and self.device == "cuda"

    @property
    def output_dir(self) -> Path:
        """The trainer's output folder; the adapter is written to its `adapter/`."""
        return self.work_dir / f"{self.mode}_seed{self.seed}"

    def table(self) -> list[tuple[str, str, str]]:
        """(name, value, origin) of every setting of this mode, in declaration order."""
        return [
            (one.name, one.shown(getattr(self, one.field)), self.origins.get(one.name, "default"))
            for one in knobs.declared(type(self))
            if one.mode in ("", self.mode)
        ]
