"""One async call for conversations: token ids in, sampled token ids and log-probabilities out.

Two backends: the colocated vLLM engine, and the trainer's own model. Whatever is waiting is sampled together,
so that conversations never wait for each other's environments.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from job.settings import Settings
from training.engine import PolicyEngine
from training.fitting import InParts, keeping_checkpointing
from training.random_streams import sampler_seed, seeded

# Said, because what is not said is taken from the model's own generation config.
PLAIN: dict[str, Any] = {
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
}


def stop_arguments(settings: Settings) -> dict[str, Any]:
    """vLLM's sampling argument for stop strings; none where there are none."""
    return {"stop": list(settings.stop_sequences)} if settings.stop_sequences else {}


@dataclass(frozen=True)
class Request:
    """One model turn to sample: prompt ids, and how."""

    ids: Sequence[int]
    max_tokens: int
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """A sampled turn: ids with the token that ended it, one log-probability a token."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]


class Sampler(Protocol):
    """What a rollout samples from."""

    def session(self) -> Any:
        """An async context in which `sample` works; nothing of it outlives the context, also on error."""
        ...

    async def sample(self, request: Request) -> Sample: ...


class Waiting:
    """Requests on their way, and the one task that serves them while there are any."""

    def __init__(self, serve: Callable[[], Any]):
        self.serve = serve
        self.futures: dict[str, tuple[Request, asyncio.Future[Sample]]] = {}
        self.task: asyncio.Task[None] | None = None
        self.failure: Exception | None = None
        self.count = 0

    def add(self, request: Request) -> tuple[str, "asyncio.Future[Sample]"]:
        if self.task is not None and self.task.done():
            self.task.result()  # what sampling failed with, if it did
        self.count += 1
        key, future = f"turn-{self.count}", asyncio.get_running_loop().create_future()
        self.futures[key] = (request, future)
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._run())
        return key, future

    def deliver(self, key: str, sample: Sample) -> None:
        _, future = self.futures.pop(key)
        if not future.done():
            future.set_result(sample)

    async def _run(self) -> None:
        try:
            while self.futures:
                await asyncio.sleep(0)  # let conversations that became ready ask
                self.serve()
        finally:
            for _, future in self.futures.values():
                if not future.done():
                    future.cancel()

    @asynccontextmanager
    async def served(self, abort: Callable[[list[str]], None] = lambda keys: None) -> AsyncIterator[None]:
        """A session of a sampler; raises what sampling failed with, which else looks like a cancellation.

        `abort` is given the keys of requests that were still on their way at its end.
        """
        cancelled = None
        try:
            yield
        except asyncio.CancelledError as error:
            cancelled = error
        finally:
            abort(await self.close())
        self.check()
        if cancelled is not None:
            raise cancelled

    async def close(self) -> list[str]:
        """Stop serving; returns the keys of requests that were still on their way."""
        left = list(self.futures)
        self.futures.clear()
        self.failure = None
        if self.task is not None:
            self.task.cancel()
            results = await asyncio.gather(self.task, return_exceptions=True)
            self.task = None
            self.failure = next((one for one in results if isinstance(one, Exception)), None)
        return left

    def check(self) -> None:
        """Raise what sampling failed with: conversations without an engine are no unscorable samples."""
        if self.failure is not None:
            raise self.failure


class EngineSampler:
    """Samples with the colocated vLLM: requests join the running batch whenever they come."""

    def __init__(self, engine: PolicyEngine):
        self.engine = engine
        self.waiting = Waiting(self._step)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        with self.engine.awake(), self.engine.seeded():
            async with self.waiting.served(self._abort):
                yield

    def _abort(self, keys: list[str]) -> None:
        if keys:
            self.engine.llm.llm_engine.abort_request(keys)

    async def sample(self, request: Request) -> Sample:
        key, future = self.waiting.add(request)
        try:
            self.engine.submit(key, request)
            return await future
        finally:  # refused by the engine, or nobody waits for it any more
            if self.waiting.futures.pop(key, None):
                self._abort([key])

    def _step(self) -> None:
        for out in self.engine.llm.llm_engine.step():
            if out.finished and out.request_id in self.waiting.futures:
                one = out.outputs[0]
                logprobs = [
                    step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)
                ]
                reason: Literal["stop", "length"] = "length" if one.finish_reason == "length" else "stop"
                self.waiting.deliver(out.request_id, Sample(list(one.token_ids), logprobs, reason))


class ModelSampler:
    """Samples with the trainer's own model: left-padded batches of whatever is waiting."""

    def __init__(
        self,
        trainer: Any,
        cut_at: Callable[[Sequence[int], Sequence[str]], list[int]],
        check: Callable[[], None],
    ):
        """`check` is called before every token, and raises when the run has to stop."""
        self.trainer, self.cut_at, self.check = trainer, cut_at, check
        self.waiting = Waiting(self._step)
        self.in_parts = InParts()
        self.batches = 0

    @asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        self.batches = 0  # of this step, whose random streams a resumed run draws again
        async with self.waiting.served():
            yield

    async def sample(self, request: Request) -> Sample:
        key, future = self.waiting.add(request)
        try:
            return await future
        except asyncio.CancelledError:
            self.waiting.futures.pop(key, None)
            raise

    def _step(self) -> None:
        """Sample the oldest request and all that are waiting and want the same."""
        keys = list(self.waiting.futures)
        first = self.waiting.futures[keys[0]][0]
        wanted = (first.temperature, first.top_p, first.stop_ids)
        batch = {
            key: request
            for key, (request, _) in self.waiting.futures.items()
            if (request.temperature, request.top_p, request.stop_ids) == wanted
        }
        samples = self.in_parts(list(batch.values()), self._sample)
        for key, sample in zip(batch, samples, strict=True):
            self.waiting.deliver(key, sample)

    def _sample(self, requests: Sequence[Request]) -> list[Sample]:
        import torch
        from transformers import GenerationConfig, LogitsProcessorList
        from trl.models import unwrap_model_for_generation

        trainer, tokenizer = self.trainer, self.trainer.processing_class
        longest = max(len(one.ids) for one in requests)
        pad = tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (longest - len(one.ids)) + list(one.ids) for one in requests])
        mask = torch.tensor([[0] * (longest - len(one.ids)) + [1] * len(one.ids) for one in requests])
        recorder = sampled_logprobs(requests[0].temperature, requests[0].top_p)
        config = GenerationConfig(
            max_new_tokens=max(one.max_tokens for one in requests),
            do_sample=requests[0].temperature > 0,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            **PLAIN,
            pad_token_id=pad,
            eos_token_id=list(requests[0].stop_ids),
            disable_compile=True,
        )
        seed = sampler_seed(trainer.args.seed, trainer.state.global_step, trainer.accelerator.process_index)
        self.batches += 1
        with (
            torch.no_grad(),
            seeded(seed + self.batches),
            keeping_checkpointing(trainer),
            unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
            ) as model,
            interruptible(model, self.check),
        ):
            device = trainer.accelerator.device
            out = model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                generation_config=config,
                logits_processor=LogitsProcessorList([recorder]),
            )
        recorder.finish(out)
        completions, logprobs = out[:, longest:].tolist(), torch.stack(recorder.logprobs, dim=1).tolist()
        return [self._cut(*three) for three in zip(requests, completions, logprobs, strict=True)]

    def _cut(self, request: Request, ids: list[int], logprobs: list[float]) -> Sample:
        """A request's own part of a batch that went on for the longest."""
        ends = [index for index, one in enumerate(ids) if one in request.stop_ids]
        length = min(ends[0] + 1 if ends else len(ids), request.max_tokens)
        kept = self.cut_at(ids[:length], request.stop)
        stopped = kept[-1] in request.stop_ids or len(kept) < length
        return Sample(kept, logprobs[: len(kept)], "stop" if stopped else "length")


@contextmanager
def interruptible(model: Any, check: Callable[[], None]) -> Iterator[None]:
    """Call `check` before every forward pass, which is before every token of a generation.

    The generation of a model with an adapter calls the base model, past the module that holds both.
    """
    from peft import PeftModel

    called = model.get_base_model() if isinstance(model, PeftModel) else model
    hook = called.register_forward_pre_hook(lambda *_: check())
    try:
        yield
    finally:
        hook.remove()


def sampled_logprobs(temperature: float, top_p: float) -> Any:
    """A logits processor that scales and cuts like the engine, and keeps the sampled log-probabilities.

    It sees a token one call after the scores it was drawn from; `finish` adds the last one.
    """
    import torch
    from transformers import LogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

    warpers: list[Any] = [TemperatureLogitsWarper(temperature)] if temperature not in (0.0, 1.0) else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1.0 else []

    class Recorder(LogitsProcessor):
        def __init__(self) -> None:
            self.logprobs: list[Any] = []
            self.before: Any = None

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self.finish(input_ids)
            for warp in warpers:
                scores = warp(input_ids, scores)
            self.before = torch.log_softmax(scores.float(), dim=-1)
            return scores

        def finish(self, input_ids: Any) -> None:
            if self.before is not None:
                self.logprobs.append(self.before.gather(1, input_ids[:, -1:]).squeeze(1))
                self.before = None

    return Recorder()
