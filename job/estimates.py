"""What a job will take: steps, tokens, memory, disk, hours and cost. Rough estimates, each by one formula."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import recipe
from job.model_size import ModelSize, model_size
from job.settings import Settings
from job.weights import DTYPE_BYTES, WeightsPlan, card_need
from recipe import Batch, Gpu

TRAINING_SHARE, SAMPLING_SHARE = 0.30, 0.10  # of the card's TFLOPS; sampling waits for memory
ADAPTER_BYTES = 16  # float32: weight, gradient and Adam's two moments
CHECKPOINT_BYTES = 12  # float32: weight and Adam's two moments
CHECKPOINTS_ON_DISK = 4  # two of the trainer's, one on its way to the store, one resumed from
LOGITS_COPIES = {"sft": 4, "rl": 2}  # of float32: in bf16 half as large, and once more for gradients
WORKING_LAYERS = 32  # hidden states that one layer holds in its backward pass
CONTEXT_BYTES = 1_500_000_000  # CUDA, kernels, fragmentation
SETUP_HOURS = 0.15
GB = 1e9
FULL_SHARE, NOTABLE_SHARE = 0.95, 0.05
SMALL_GROUP, FEW_STEPS, MANY_PASSES, SHORT_THOUGHT = 4, 10, 20, 1024


@dataclass(frozen=True)
class Data:
    """Sorted tokens of rows (sft) or prompts (rl), how many were too long, tokens an answer may add."""

    lengths: tuple[int, ...]
    over_budget: int
    answer: int


@dataclass(frozen=True)
class Work:
    """What is computed: optimizer steps, their tokens (for rl at most), passes over the rows, evaluations."""

    steps: int
    trained_tokens: int
    generated_tokens: int
    passes: float
    evaluated_tokens: int = 0


@dataclass(frozen=True)
class Machine:
    """What that takes: GB by what needs them, GB of disk, hours and US dollars; None where unknown."""

    memory_gb: Mapping[str, float]
    disk_gb: float
    hours: float | None
    usd: float | None

    @property
    def total_gb(self) -> float:
        return sum(self.memory_gb.values())


def data(settings: Settings, lengths: Sequence[int], over_budget: int, *, multi_turn: bool) -> Data:
    """What is trained on, from its lengths in tokens: of rows (sft) or of prompts (rl)."""
    ordered = tuple(sorted(lengths))
    if settings.mode == "sft":
        return Data(ordered, over_budget, 0)
    room = settings.rl_vllm_max_len - ordered[len(ordered) // 2]
    return Data(ordered, over_budget, room if multi_turn else settings.rl_max_completion)


def work(settings: Settings, batch: Batch, rows: Data) -> Work:
    """Steps and tokens. sft: the rows' own, no padding; rl: at most, every answer as long as it may be."""
    count, mean = len(rows.lengths), sum(rows.lengths) / len(rows.lengths)
    if settings.mode == "sft":
        steps = recipe.sft_steps(count, settings.sft_batch_size, settings.sft_epochs, settings.sft_max_steps)
        seen = steps * settings.sft_batch_size if settings.sft_max_steps else settings.sft_epochs * count
        return Work(steps, round(seen * mean), 0, seen / count)
    answers = settings.rl_steps * batch.sequences * settings.processes
    return Work(
        steps=settings.rl_steps,
        trained_tokens=round(answers * (mean + rows.answer)),
        generated_tokens=answers * rows.answer,
        passes=answers / settings.rl_group_size / count,
    )


def with_evaluations(settings: Settings, todo: Work, questions: int) -> Work:
    """The work and, at most, the tokens of first answers to so many questions every so many steps."""
    times = -(-todo.steps // settings.eval_every_steps)
    return replace(todo, evaluated_tokens=times * questions * settings.eval_tokens)


def machine(settings: Settings, plan: WeightsPlan, batch: Batch, rows: Data, todo: Work) -> Machine | None:
    """Memory, disk, hours and cost; None for a model whose configuration does not say enough."""
    size = model_size(plan.facts)
    if size is None:
        return None
    card = recipe.gpu(settings.job.gpu.type) if settings.device == "cuda" else None
    spent = hours(size, todo, card, settings.processes)
    usd = None if spent is None or card is None else spent * settings.processes * card.usd_per_hour
    memory = memory_gb(settings, plan, size, batch, rows)
    return Machine(memory, disk_gb(settings, plan, size), spent, usd)


def memory_gb(
    settings: Settings,
    plan: WeightsPlan,
    size: ModelSize,
    batch: Batch,
    rows: Data,
) -> dict[str, float]:
    """GB at the peak, by what needs them.

    weights + max(training, engine) + CUDA, or their sum where the engine does not sleep; training is
    16 B * adapter + 4 B * copies * micro * length * vocab + 2 B * micro * length * hidden * (layers + 32).
    """
    dtype = DTYPE_BYTES[plan.dtype]
    own = _weights_bytes(plan, size)
    whole = rows.lengths[-1] + rows.answer
    if settings.mode == "rl":
        whole = min(whole, settings.rl_vllm_max_len)
    found = {
        "weights": own,
        "adapter": ADAPTER_BYTES * size.lora(settings.lora_rank, settings.lora_targets),
        "logits": 4 * LOGITS_COPIES[settings.mode] * batch.micro * (rows.answer or whole) * size.vocab,
        "activations": dtype * batch.micro * whole * size.hidden * (size.layers + WORKING_LAYERS),
        "CUDA": CONTEXT_BYTES if settings.device == "cuda" else 0,
    }
    if settings.mode == "rl":
        engine = _engine_bytes(settings, plan, batch, own, whole)
        training = found["adapter"] + found["logits"] + found["activations"]
        found["vLLM" if settings.rl_use_vllm else "sampling"] = (
            max(0, engine - training) if settings.engine_sleeps else engine
        )
    return {name: count / GB for name, count in found.items() if count}


def _engine_bytes(settings: Settings, plan: WeightsPlan, batch: Batch, own: float, whole: int) -> float:
    """vLLM: weights again, overhead, KV cache of one sequence; else the KV cache of the whole batch."""
    if settings.rl_use_vllm:
        sequence = settings.rl_vllm_max_len * plan.kv_bytes_per_token + plan.state_bytes
        return own + recipe.ENGINE_OVERHEAD_BYTES + sequence
    return batch.sequences * (whole * plan.kv_bytes_per_token + plan.state_bytes)


def _weights_bytes(plan: WeightsPlan, size: ModelSize) -> float:
    return plan.weights_bytes or size.weights_bytes(DTYPE_BYTES[plan.dtype], four_bit=plan.four_bit)


def disk_gb(settings: Settings, plan: WeightsPlan, size: ModelSize) -> float:
    """GB: weights + 4 checkpoints of 12 B * adapter + what merging takes; the image is not counted.

    Merging takes the merged weights, again in a folder store, and the base where others were trained on.
    """
    stored = 0 if plan.is_local else size.weights_bytes(2, four_bit=plan.is_quantised)
    checkpoint = CHECKPOINT_BYTES * size.lora(settings.lora_rank, settings.lora_targets)
    whole = 0
    if settings.merge:
        fetched = plan.source != plan.base and not plan.unquantised().is_local
        whole = 1 + (not settings.hf_repo) + fetched
    return (stored + CHECKPOINTS_ON_DISK * checkpoint + whole * size.params * DTYPE_BYTES["bfloat16"]) / GB


def hours(size: ModelSize, todo: Work, card: Gpu | None, processes: int) -> float | None:
    """0.15 h + (6 * params * trained / 30 % + 2 * params * (generated + evaluated) / 10 %) / FLOPS of all."""
    if card is None:
        return None
    sampled = todo.generated_tokens + todo.evaluated_tokens
    flop = size.active * (6 * todo.trained_tokens / TRAINING_SHARE + 2 * sampled / SAMPLING_SHARE)
    return SETUP_HOURS + flop / (card.tflops * 1e12 * processes) / 3600


# --- what is worth a second look ----------------------------------------------------------------------------


def data_warnings(settings: Settings, rows: Data, todo: Work) -> list[str]:
    """What of the data and its batches was probably not meant."""
    found = _sft_warnings(settings, rows) if settings.mode == "sft" else _rl_warnings(settings, rows)
    if todo.steps < FEW_STEPS:
        found.append(f"only {todo.steps} optimizer steps: little will be learnt; raise epochs or steps")
    if todo.passes > MANY_PASSES:
        found.append(
            f"the run makes {todo.passes:.0f} passes over its {len(rows.lengths)} rows: it may overfit"
        )
    if settings.save_steps >= todo.steps:
        found.append(
            f"no checkpoint before the end (train.save_every is {settings.save_steps}): a machine that is"
            " taken away loses everything"
        )
    return found


def _sft_warnings(settings: Settings, rows: Data) -> list[str]:
    found, count, size = [], len(rows.lengths), settings.sft_batch_size
    cut = sum(length >= settings.sft_max_length for length in rows.lengths) / count
    if cut > NOTABLE_SHARE:
        found.append(
            f"{cut:.0%} of the rows reach train.max_length={settings.sft_max_length} and are cut off there"
        )
    if count < size:
        found.append(f"train.batch_size={size} is more than the {count} rows: each step is a whole pass")
    return found


def _rl_warnings(settings: Settings, rows: Data) -> list[str]:
    found, group = [], settings.rl_group_size
    share = rows.over_budget / (rows.over_budget + len(rows.lengths))
    if share > NOTABLE_SHARE:
        found.append(
            f"{share:.0%} of the prompts are over the budget and left out; raise RL_VLLM_MAX_LEN or lower"
            " RL_MAX_COMPLETION"
        )
    if group < SMALL_GROUP:
        found.append(f"RL_GROUP_SIZE={group}: advantages of so few samples are mostly noise; 8 is usual")
    if settings.thinking and settings.rl_max_completion < SHORT_THOUGHT:
        found.append(
            f"thinking is on and RL_MAX_COMPLETION={settings.rl_max_completion}: reasoning will be cut off;"
            " 1536 is the default"
        )
    return found


def machine_warnings(settings: Settings, plan: WeightsPlan, needs: Machine) -> list[str]:
    """What of the machine that `gpu` asks for does not fit the job."""
    if settings.device == "cpu":
        return []
    wanted, entry = settings.job.gpu, recipe.catalog_model(settings.model)
    card = recipe.gpu(wanted.type)
    if card is None:
        known = ", ".join(recipe.GPUS)
        return [f"gpu.type={wanted.type!r} is not a card known here, which are {known}: no time, no cost"]
    found = []
    refusal = card_need(settings, plan).refusal(f"gpu.type={wanted.type}", card.memory_gb * 2**30)
    if refusal:
        found.append(refusal)
    elif needs.total_gb > FULL_SHARE * card.memory_gb:
        smaller = "" if settings.quant == "4bit-qlora" else ", or set AUTOSLM_QUANT=4bit-qlora"
        found.append(
            f"gpu.type={wanted.type} has {card.memory_gb} GB, the job needs about {needs.total_gb:.0f}: take"
            f" a larger card or shorter rows{smaller}"
        )
    disk = max(needs.disk_gb, entry.min_disk_gb or 0)
    if disk > wanted.disk_gb:
        found.append(f"gpu.disk_gb={wanted.disk_gb}: the job needs about {disk:.0f} GB")
    limit_hours = wanted.max_wall_seconds / 3600
    if needs.hours is not None and needs.hours > limit_hours:
        found.append(
            f"gpu.max_wall_seconds={wanted.max_wall_seconds} is {limit_hours:.1f} hours, the job may need"
            f" {needs.hours:.1f}"
        )
    return found
