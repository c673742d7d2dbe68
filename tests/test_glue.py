"""Token-exactness: what TRL trains on is what was sampled, on every kind of chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from job.chat import Chat
from tests import grpo_trials, harness, rollouts
from tests.rollouts import LOGPROB, Scripted
from training.glue import GlueRenderer, NoExactGlue, renderer_for

pytestmark = pytest.mark.slow

MAX_TOKENS = 8
# Template, thinking, ends of turn in a user's turn.
TEMPLATES = {
    "qwen3": ("qwen3", False, 1),
    "qwen3-thinking": ("qwen3", True, 1),
    "qwen3.5": ("qwen3_5", False, 1),
    "qwen3.5-thinking": ("qwen3_5", True, 1),
    "llama3": ("llama3", False, 1),
    "chatml": ("chatml", False, 1),
    "trims-whitespace": ("trimming", False, 1),
    "strips-history": ("stripping", True, 0),
    "opens-no-block-in-history": ("inconsistent", False, 1),
}
# Any token may be sampled, but an end of turn only as the last one.
SAMPLED = st.tuples(st.lists(st.integers(0, 10_000), max_size=MAX_TOKENS - 1), st.booleans())
SAID = st.text(st.sampled_from("ab 1\n\t.é{}"), min_size=1, max_size=12)


def tokenizer_with(template: str) -> Any:
    from demo.tiny_model import make_tokenizer

    if template == "llama3":
        return harness.llama_tokenizer()
    tokenizer = make_tokenizer()
    tokenizer.chat_template = harness.template(template)
    return tokenizer


@pytest.fixture(scope="module", params=TEMPLATES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A chat, its rollout of a conversation that says what it is told to, and what that is."""
    import verifiers as vf
    from datasets import Dataset

    template, thinking, user_ends = TEMPLATES[request.param]
    chat, says = Chat(tokenizer_with(template), thinking), list[str]()

    class Told(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [vf.UserMessage(role="user", content=says[len(state["trajectory"]) - 1])]

    def one() -> float:
        return 1.0

    rows = Dataset.from_list([{"question": "x", "answer": ""}])
    env = Told(dataset=rows, rubric=vf.Rubric(funcs=[one]))
    folder = tmp_path_factory.mktemp("rollout")
    rollout = rollouts.make(folder, chat, env, max_tokens=MAX_TOKENS, engine_length=4096, thinking=thinking)
    return chat, rollout, env, says, user_ends


@settings(max_examples=25, deadline=None)
@given(asked=SAID, talk=st.lists(st.tuples(SAMPLED, SAID), min_size=1, max_size=4))
def test_trained_on_is_what_was_sampled(case: Any, asked: str, talk: list[Any]) -> None:
    chat, rollout, env, says, user_ends = case
    samples = [reply(chat, *sampled) for sampled, _ in talk]
    says[:], env.max_turns = [said for _, said in talk], len(talk)
    question = [{"role": "user", "content": asked}]
    rollout.prompts.rows[0] = {**rollout.prompts.rows[0], "prompt": question}
    left = iter(samples)
    played = rollouts.play(rollout, Scripted(chat, lambda request: next(left)))
    seen = [list(request.ids) for request in played.sampler.requests]

    assert played.facts.turns == [len(talk)] and played.facts.breaks == 0, rollout.scores
    assert seen[0] == played.prompt_ids[0] == chat.prompt_ids(question)
    assert played.prompt_ids[0] + played.completion_ids[0] == seen[-1] + samples[-1]
    mask: list[int] = []
    for index, (ids, sample) in enumerate(zip(seen, samples, strict=True)):
        before = seen[index - 1] + samples[index - 1] if index else ids
        assert ids[: len(before)] == before
        glue = ids[len(before) :]
        mask += [0] * len(glue) + [1] * len(sample)
        if index:
            ended = samples[index - 1][-1:] + glue
            assert ended.count(chat.end_of_turn_id) == 1 + user_ends
            first = ended.index(chat.end_of_turn_id)
            assert first <= 1 and says[index - 1].strip() in chat.tokenizer.decode(glue)
    assert played.env_mask[0] == mask
    assert played.logprobs[0] == [LOGPROB * one for one in mask]


def reply(chat: Chat, drawn: list[int], ends: bool) -> list[int]:
    """Drawn numbers as a turn of this tokenizer; one without an end was cut off."""
    ids = [one % len(chat.tokenizer) for one in drawn]
    ids = [one for one in ids if one not in chat.stop_ids]
    return [*ids, chat.end_of_turn_id] if ends or not ids else ids


@pytest.mark.parametrize("template", ["llama3", "chatml"])
def test_plain_templates_render_the_same_conversation(template: str) -> None:
    """Where a template leaves history alone, glue gives its own rendering of the whole conversation."""
    chat = Chat(tokenizer_with(template), False)
    ask, answer, again = (
        {"role": role, "content": text} for role, text in [("user", "1?"), ("assistant", "2"), ("user", "3?")]
    )
    sampled = [*chat.encode("2"), chat.end_of_turn_id]
    bridged = GlueRenderer(chat).bridge_to_next_turn(chat.prompt_ids([ask]), sampled, [again])
    assert bridged.token_ids == chat.prompt_ids([ask, answer, again])


# --- templates that cannot ---


def test_a_template_without_exact_glue_is_refused() -> None:
    chat = Chat(tokenizer_with("endless"), False)
    with pytest.raises(NoExactGlue, match="prefix-preserving") as refused:
        renderer_for(chat, with_tools=False)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("template", ["chatml", "trimming"])
def test_tools_on_a_template_that_teaches_no_format(template: str) -> None:
    chat = Chat(tokenizer_with(template), False)
    with pytest.raises(NoExactGlue, match="teaches no tool format") as refused:
        renderer_for(chat, with_tools=True)
    assert "\n" not in str(refused.value) and "qwen3.5" in str(refused.value)


# --- which renderer ---


def test_a_registered_model_gets_its_own_renderer() -> None:
    tokenizer = tokenizer_with("qwen3")
    tokenizer.name_or_path = "Qwen/Qwen3-0.6B"
    chosen = renderer_for(Chat(tokenizer, True), with_tools=True)
    assert type(chosen).__name__ == "Qwen3Renderer"


@pytest.mark.parametrize(
    ("template", "thinking"),
    [("trimming", True), ("qwen3", False)],  # renderers 0.1.10 keeps the empty think blocks of history
)
def test_a_registered_name_with_another_rendering_gets_the_generic_one(
    template: str, thinking: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tokenizer_with(template)
    tokenizer.name_or_path = "Qwen/Qwen3-0.6B"
    assert isinstance(renderer_for(Chat(tokenizer, thinking), with_tools=False), GlueRenderer)
    assert "differs from its template" in caplog.text


def test_tools_are_part_of_the_comparison() -> None:
    tokenizer = tokenizer_with("chatml")  # renders as Qwen3 does, but leaves tools out
    tokenizer.name_or_path = "Qwen/Qwen3-0.6B"
    with pytest.raises(NoExactGlue, match="teaches no tool format"):
        renderer_for(Chat(tokenizer, True), with_tools=True)


def test_an_unknown_name_gets_the_generic_one() -> None:
    assert isinstance(renderer_for(Chat(tokenizer_with("qwen3"), False), with_tools=True), GlueRenderer)


CALLS = {
    "qwen3": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "qwen3_5": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("template", CALLS)
def test_tool_calls_are_taken_apart(template: str) -> None:
    chat = Chat(tokenizer_with(template), False)
    ids = [*chat.encode("Well. " + CALLS[template]), chat.end_of_turn_id]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": schema}}]
    parsed = renderer_for(chat, with_tools=True).parse_response(ids, tools=tools)
    assert parsed.content.strip() == "Well."
    arguments = parsed.tool_calls[0].arguments
    assert parsed.tool_calls[0].name == "add"
    assert (json.loads(arguments) if isinstance(arguments, str) else arguments)["a"] in (1, "1")


# What a thinking model's turn says: its answer, and how often it calls the tool.
THOUGHTS = {
    "a draft in thought": ("maybe {call} or not</think>\n\nfine", "fine", 0),
    "a call after thought": ("so</think>\n\n{call}", "", 1),
    "a call with thought and words": ("so</think>\n\nWell. {call}", "Well.", 1),
    "a draft that was cut off": ("maybe {call}", "", 0),
    "thought that was cut off": ("maybe", "", 0),
}


def named(name: str) -> Any:
    """A tokenizer with Qwen3.5's template, and with what its own renderer looks for."""
    tokenizer = tokenizer_with("qwen3_5")
    tokenizer.add_tokens(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"], True)
    tokenizer.name_or_path = name
    return tokenizer


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-4B", "somebody/tuned"])
@pytest.mark.parametrize("turn", THOUGHTS)
def test_drafts_in_thought_are_no_calls(turn: str, name: str) -> None:
    """Whether the template's model has a renderer of its own or not; the prompt has opened the block."""
    chat = Chat(named(name), True)
    said, answer, calls = THOUGHTS[turn]
    ids = [*chat.encode(said.format(call=CALLS["qwen3_5"])), chat.end_of_turn_id]
    renderer = renderer_for(chat, with_tools=True)
    assert isinstance(renderer, GlueRenderer) == (name == "somebody/tuned")
    parsed = renderer.parse_response(ids)
    assert (parsed.content.strip(), len(parsed.tool_calls)) == (answer, calls)
    assert parsed.reasoning_content.startswith(said[:2])


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-4B", "somebody/tuned"])
def test_with_thinking_off_the_text_is_untouched(name: str) -> None:
    chat = Chat(named(name), False)
    ids = [*chat.encode("a </think> b"), chat.end_of_turn_id]
    parsed = renderer_for(chat, with_tools=False).parse_response(ids)
    assert (parsed.content, parsed.reasoning_content) == ("a </think> b", None)


# --- against the trainer's model ---


@pytest.fixture(scope="module", params=["vllm", "model"])
def sampling(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Any:
    """A trainer whose adapter is not zero, with vLLM and without."""
    import torch

    folder = tmp_path_factory.mktemp(request.param)
    made = grpo_trials.build(
        grpo_trials.variables(folder, tiny_model, RL_USE_VLLM=int(request.param == "vllm"))
    )
    torch.manual_seed(0)
    for name, one in made.adapter_weights().items():
        if "lora_B" in name:
            torch.nn.init.normal_(one, std=0.05)
    if request.param == "vllm":
        made.engine.sync_weights()
    return made


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_log_probabilities_are_the_trainers(sampling: Any, tmp_path: Path, temperature: float) -> None:
    import torch
    import verifiers as vf
    from datasets import Dataset

    class Twice(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [vf.UserMessage(role="user", content=f"Repeat {len(state['trajectory'])}.")]

    def one() -> float:
        return 1.0

    rows = Dataset.from_list([{"question": f"Repeat {number}.", "answer": ""} for number in range(4)])
    env = Twice(dataset=rows, rubric=vf.Rubric(funcs=[one]), max_turns=3)
    rollout = rollouts.make(tmp_path, sampling.chat, env, group=2, temperature=temperature)
    played = rollouts.play(rollout, sampling.trainer.sampler)
    assert played.facts.turns == [3] * 8

    model = sampling.trainer.model.eval()
    gaps = []
    for prompt, completion, logprobs, mask in zip(
        played.prompt_ids, played.completion_ids, played.logprobs, played.env_mask, strict=True
    ):
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
        mine = logits.float().log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        gaps += [abs(a - b) for a, b, kept in zip(mine.tolist(), logprobs, mask, strict=True) if kept]
    assert len(gaps) >= 24 and max(gaps) < 1e-3
