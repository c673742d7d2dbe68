"""The model card of an adapter: what it is, how it came about, and how to load and serve it."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from delivery import report
from delivery.curves import MEASURE
from delivery.markdown import is_number, table

METHODS = {"sft": "supervised fine-tuning", "rl": "GRPO"}
QUESTION = '[{"role": "user", "content": "Hello!"}]'
LICENSE_FIELDS = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class Facts:
    """All that a card says, as plain values.

    `base` is a Hub id or a folder, `revision` its commit, None for a folder; `store` a Hub dataset
    repository, "" for a folder; `adapter` the adapter's path there. `training` and `versions` are shown as
    they are, in order; `history` is the trainer's log. A `served_rank` of 0 says that vLLM cannot serve it.
    """

    prefix: str
    mode: str
    base: str
    revision: str | None
    store: str
    adapter: str
    environment: str
    thinking: bool
    served_rank: int
    is_multimodal: bool = False
    license: Mapping[str, str] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    history: Sequence[Mapping[str, Any]] = ()

    @property
    def is_on_the_hub(self) -> bool:
        """Whether the base has an id that the Hub knows; a folder's path is none."""
        return self.revision is not None


def render(facts: Facts) -> str:
    """The text of the card: metadata that the Hub accepts, then Markdown."""
    from huggingface_hub import ModelCard

    parts = [introduction(facts), training(facts), evaluation(facts), usage(facts)]
    return str(ModelCard(f"---\n{metadata(facts)}\n---\n\n" + "\n\n".join(parts) + "\n"))


def metadata(facts: Facts) -> str:
    """The card's YAML; a base that is not on the Hub is left out, as a path is no model id."""
    from huggingface_hub import ModelCardData

    base = {"base_model": facts.base, "base_model_relation": "adapter"} if facts.is_on_the_hub else {}
    method = "grpo" if facts.mode == "rl" else facts.mode
    return ModelCardData(
        **base,
        **{name: facts.license[name] for name in LICENSE_FIELDS if name in facts.license},
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["lora", method, "trl", "verifiers"],
    ).to_yaml()


def introduction(facts: Facts) -> str:
    base = (
        f"[{facts.base}](https://huggingface.co/{facts.base})" if facts.is_on_the_hub else f"`{facts.base}`"
    )
    license = facts.license.get("license_name") or facts.license.get("license")
    return (
        f"# {facts.prefix}\n\nA LoRA adapter of {base}, made by {METHODS[facts.mode]} on the verifiers"
        f" environment `{facts.environment}`. The base model's license is {license or 'not known'}."
    )


def training(facts: Facts) -> str:
    """Settings and figures of the run, and how its loss or reward moved."""
    key, title = MEASURE[facts.mode]
    shown = {name: str(value) for name, value in facts.training.items()}
    if moved := report.trend(report.values(facts.history, key)):
        shown[title] = moved
    shown["libraries"] = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    return "## Training\n\n" + table(("", ""), shown.items())


def evaluation(facts: Facts) -> str:
    """The report's table of evaluations, without those that were skipped."""
    made = [one for one in facts.history if is_number(one.get("eval_reward"))]
    return report.evaluations(made) or "## Evaluation\n\nNone was made."


def usage(facts: Facts) -> str:
    """How to load it in peft and to serve it with vLLM, as code that runs."""
    parts = [
        f"## Use\n\nWith peft:\n\n```python\n{with_peft(facts)}\n```",
        f"With vLLM:\n\n```python\n{with_vllm(facts)}\n```\n\nas a server:\n\n```sh\n{as_server(facts)}\n```",
    ]
    return "\n\n".join(parts if facts.served_rank else parts[:1])


def with_peft(facts: Facts) -> str:
    """Python that generates an answer with transformers and peft."""
    kind = "AutoModelForImageTextToText" if facts.is_multimodal else "AutoModelForCausalLM"
    return f"""from peft import PeftModel
from transformers import {kind}, AutoTokenizer
{fetching(facts)}
tokenizer = AutoTokenizer.from_pretrained(adapter)
base = {kind}.from_pretrained({facts.base!r}{revision(facts)}, dtype="auto")
model = PeftModel.from_pretrained(base, adapter)
messages = {QUESTION}
inputs = tokenizer.apply_chat_template(
    messages,
    add_generation_prompt=True,
    enable_thinking={facts.thinking},
    return_dict=True,
    return_tensors="pt",
)
output = model.generate(**inputs, max_new_tokens=64)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))"""


def with_vllm(facts: Facts) -> str:
    """Python that generates an answer with vLLM."""
    text_only = "\n    language_model_only=True," if facts.is_multimodal else ""
    return f"""from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
{fetching(facts)}
llm = LLM(
    {facts.base!r}{revision(facts)},
    tokenizer=adapter,
    enable_lora=True,
    max_lora_rank={facts.served_rank},{text_only}
)
[output] = llm.chat(
    {QUESTION},
    SamplingParams(temperature=0.0, max_tokens=64),
    lora_request=LoRARequest("adapter", 1, adapter),
    chat_template_kwargs={{"enable_thinking": {facts.thinking}}},
)
print(output.outputs[0].text)"""


def as_server(facts: Facts) -> str:
    """Shell commands that serve it under the name `adapter`."""
    adapter = shlex.quote(facts.adapter)
    fetch = f"hf download {facts.store} --repo-type dataset --include '{facts.adapter}/*' --local-dir .\n"
    pinned = f" --revision {facts.revision}" if facts.revision else ""
    text_only = " --language-model-only" if facts.is_multimodal else ""
    return (
        (fetch if facts.store else "")
        + f"vllm serve {shlex.quote(facts.base)}{pinned} --tokenizer {adapter}{text_only} \\\n"
        f"    --enable-lora --max-lora-rank {facts.served_rank} --lora-modules adapter={adapter}"
    )


def fetching(facts: Facts) -> str:
    """Python that binds `adapter` to the adapter's local folder."""
    if not facts.store:
        return f"\nadapter = {facts.adapter!r}"
    return f"""from huggingface_hub import snapshot_download

runs = snapshot_download({facts.store!r}, repo_type="dataset", allow_patterns="{facts.adapter}/*")
adapter = f"{{runs}}/{facts.adapter}\""""


def revision(facts: Facts) -> str:
    return f", revision={facts.revision!r}" if facts.revision else ""
