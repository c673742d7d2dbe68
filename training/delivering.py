"""What a run leaves behind for use: the adapter with its card, and merged weights."""

import logging
from pathlib import Path
from typing import Any

import recipe
from accounting import stack_versions
from delivery import card
from delivery.redaction import redacted
from delivery.store import folder_files
from job import repository
from job.chat import Chat
from job.repository import ModelUnreachable
from job.settings import Settings, SettingsError
from job.weights import WeightsPlan
from training import merging, trainers
from training.inputs import Job
from training.run import Run

log = logging.getLogger(__name__)


def deliver(settings: Settings, run: Run, job: Job, trainer: Any, talk: Chat) -> None:
    """Save the adapter, and merged weights if asked for; return once they are in the store."""
    adapter, merged = settings.output_dir / "adapter", settings.output_dir / "merged"
    trainers.save_adapter(trainer, talk.tokenizer, job.plan, adapter)
    write_card(settings, run, job, trainer, adapter)
    facts = {"train_wall": job.metrics.wall_seconds, "step": run.tally.step}
    run.publisher.upload("adapter/", folder_files(adapter, "adapter"), f"{settings.mode}_trained", **facts)
    if settings.merge:
        merging.merge(settings, job.plan, talk.tokenizer, adapter, merged)
        run.publisher.upload("merged/", folder_files(merged, "merged"), "merged", step=run.tally.step)


def write_card(settings: Settings, run: Run, job: Job, trainer: Any, folder: Path) -> None:
    """Write the adapter's `README.md`, in place of peft's; one that cannot be written costs no adapter."""
    try:
        text = card.render(redacted(card_facts(settings, run, job, trainer), run.redact))
    except Exception:
        log.warning("the adapter has no model card of its own", exc_info=True)
        return
    (folder / "README.md").write_text(text, encoding="utf-8")


def card_facts(settings: Settings, run: Run, job: Job, trainer: Any) -> card.Facts:
    """What the card is made of."""
    plan, notes = job.plan, job.metrics.notes
    adapter = f"{settings.prefix}/adapter" if settings.hf_repo else f"{run.store.location}/adapter"
    return card.Facts(
        prefix=settings.prefix,
        mode=settings.mode,
        base=plan.base,
        revision=plan.base_commit,
        store=settings.hf_repo,
        adapter=adapter,
        environment=job.env.id,
        thinking=settings.thinking,
        served_rank=served_rank(settings),
        is_multimodal=plan.is_multimodal,
        license=license_of(settings, plan),
        training={
            "steps": run.tally.step,
            "seconds": job.metrics.wall_seconds,
            "tokens trained on": job.metrics.train_tokens,
            "tokens generated": job.metrics.generated_tokens,
            "LoRA rank, alpha": f"{settings.lora_rank}, {settings.lora_alpha}",
            "learning rate": f"{settings.learning_rate:g}",
            "precision of the base": "4-bit NF4" if plan.four_bit else plan.dtype,
            "seed": settings.seed,
            "thinking": "on" if settings.thinking else "off",
            "environment": f"{job.env.id} ({job.env.version})",
            "data": f"sha256 {notes['dataset_fingerprint']}",
        },
        versions=stack_versions(),
        history=trainer.state.log_history,
    )


def served_rank(settings: Settings) -> int:
    """The rank that vLLM is told to make room for; 0 when the adapter's is above its largest."""
    try:
        return recipe.served_rank(settings.lora_rank)
    except ValueError:
        return 0


def license_of(settings: Settings, plan: WeightsPlan) -> dict[str, str]:
    """What the base's own card says about its license; nothing when it cannot be read."""
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    try:
        folder = Path(repository.description(settings, plan.base, plan.base_commit))
        found = metadata_load(folder / "README.md") or {}
    except (ModelUnreachable, SettingsError, OSError, ValueError, YAMLError) as error:
        log.debug("the license of %s is not known: %s", plan.base, error)
        return {}
    return {name: found[name] for name in card.LICENSE_FIELDS if isinstance(found.get(name), str)}
