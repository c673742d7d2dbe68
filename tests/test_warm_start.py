"""Going on from a stored adapter: it is really the one that is trained, or the run says why not."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import grpo_trials, harness, sft_trials
from tests.grpo_trials import Trial
from tests.harness import Finished, strict
from tests.hub_server import Fault, HubServer
from training import warm_start
from training.midrun import as_callback

pytestmark = pytest.mark.slow

FROM = "sft/r1/seed0"


@pytest.fixture(scope="module")
def taught(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a finished SFT run: a few seconds of spelling backwards."""
    folder = tmp_path_factory.mktemp("taught")
    spec = {"train": {"lora_rank": 8, "lora_alpha": 16, "learning_rate": 1e-2}}
    ended = harness.run_main(harness.variables(folder, tiny_model, "toy-words", spec, SFT_EPOCHS=4))
    assert ended.error is None, ended.error
    return folder / "store"


@pytest.fixture
def store(taught: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(taught, tmp_path / "store"))


@pytest.fixture
def trial(tiny_model: Path, store: Path, tmp_path: Path) -> Callable[..., Trial]:
    """Return a function that builds a trainer which goes on from the taught adapter."""

    def make(train: dict[str, Any] | None = None, **more: Any) -> Trial:
        train = {"init_from_adapter": FROM, **(train or {})}
        env = grpo_trials.variables(tmp_path, tiny_model, train=train, **more)
        return grpo_trials.build(env, policy=sft_trials.warm)

    return make


@pytest.fixture
def run(tiny_model: Path, store: Path, tmp_path: Path) -> Callable[..., Finished]:
    """Return a function that runs the worker from the taught adapter, without vLLM unless it says so."""

    def make(train: dict[str, Any] | None = None, **more: Any) -> Finished:
        train = {"init_from_adapter": FROM, **(train or {})}
        env = grpo_trials.variables(tmp_path, tiny_model, train=train, **{"RL_USE_VLLM": 0, **more})
        return harness.run_main(env)

    return make


def plainly_loaded(model: Path, store: Path) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), store / FROM / "adapter")


# --- it is the adapter ---


def test_the_first_step_samples_from_the_finished_adapter(
    trial: Callable[..., Trial], tiny_model: Path, store: Path
) -> None:
    import torch

    made = trial()
    plain = plainly_loaded(tiny_model, store)
    batch = made.sample([0, 1])
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        mine, expected = (one(ids, attention_mask=mask).logits for one in (made.trainer.model, plain))
        with plain.disable_adapter():
            base = plain(ids, attention_mask=mask).logits
    assert torch.equal(mine, expected)
    assert not torch.allclose(mine, base, atol=1)
    length = batch["completion_ids"].shape[1]
    logps = (mine / 1.5).log_softmax(-1)[:, -length - 1 : -1]  # the run samples at temperature 1.5
    mine = logps.gather(2, batch["completion_ids"].unsqueeze(2)).squeeze(2)
    gap = (mine - batch["sampling_per_token_logps"]) * batch["completion_mask"]
    assert batch["completion_mask"].any() and gap.abs().max() < 1e-3


def test_it_is_the_one_trainable_part(trial: Callable[..., Trial], tiny_model: Path, store: Path) -> None:
    import torch

    made = trial(RL_USE_VLLM=0)
    start = {name: one.detach().clone() for name, one in made.adapter_weights().items()}
    base = {name: one.detach().clone() for name, one in made.base_weights().items()}
    assert list(made.trainer.model.peft_config) == ["default"]
    trained = {name for name, one in made.trainer.model.named_parameters() if one.requires_grad}
    assert trained == start.keys()
    made.trainer.train()
    assert any(not torch.equal(one, start[name]) for name, one in made.adapter_weights().items())
    assert all(torch.equal(one, base[name]) for name, one in made.base_weights().items())


def test_a_whole_run_says_where_it_came_from(run: Callable[..., Finished], store: Path) -> None:
    ended = run(RL_USE_VLLM=1)
    assert ended.error is None, ended.error
    stored = store / "rl" / "r1" / "seed0"
    notes = strict((stored / "metrics.json").read_text())["notes"]
    assert notes["grpo_recipe"]["init_from_adapter"] == FROM
    config = json.loads((stored / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 16)


# --- the reference of the KL term ---


def test_the_reference_is_the_loaded_adapter(trial: Callable[..., Trial], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from training.engine import write_adapter

    made = trial({"kl_penalty_coef": 0.1, "steps": 4}, RL_USE_VLLM=0)
    assert set(made.trainer.model.peft_config) == {"default", "ref"}
    start = {name: one.detach().clone() for name, one in made.adapter_weights().items()}

    def reference() -> dict[str, Any]:
        return {name.replace(".ref.", ".default."): one for name, one in made.adapter_weights("ref").items()}

    assert reference().keys() == start.keys()
    made.trainer.train()
    assert all(torch.equal(one, start[name]) for name, one in reference().items())
    assert any(not torch.equal(one, start[name]) for name, one in made.adapter_weights().items())
    distances = made.logged("kl")
    assert distances[0] == pytest.approx(0, abs=1e-6) and distances[-1] > 1e-4
    with pytest.raises(warm_start.AdapterProblem, match="TRL keeps no frozen copy of "):
        warm_start.check_reference(made.settings, made.trainer.model)  # it has moved away from the copy
    write_adapter(made.trainer.model, tmp_path)
    written = load_file(tmp_path / "adapter_model.safetensors")
    trained = {name.replace(".default", ""): one for name, one in made.adapter_weights().items()}
    assert written.keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in written.items())


def test_a_run_with_kl_delivers_the_trained_adapter_alone(run: Callable[..., Finished], store: Path) -> None:
    ended = run({"kl_penalty_coef": 0.1})
    assert ended.error is None, ended.error
    delivered = store / "rl" / "r1" / "seed0" / "adapter"
    assert not [path for path in delivered.rglob("*") if "ref" in path.name]
    assert (delivered / "adapter_model.safetensors").stat().st_size == (
        store / FROM / "adapter" / "adapter_model.safetensors"
    ).stat().st_size


def test_the_reference_is_still_that_adapter_after_a_resume(
    trial: Callable[..., Trial], store: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    from training import saving

    kept = tmp_path / "kept"

    class Keep:
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                shutil.copytree(Path(args.output_dir) / "checkpoint-2", kept)

    first = trial({"kl_penalty_coef": 0.1, "steps": 4}, RL_USE_VLLM=0, RL_SAVE_STEPS=2)
    first.trainer.add_callback(as_callback(Keep))
    first.trainer.train()
    assert (kept / "ref" / "adapter_model.safetensors").is_file()
    second = trial({"kl_penalty_coef": 0.1, "steps": 4}, RL_USE_VLLM=0)
    known_as_saved = []

    class Look:
        def on_train_begin(self, *args: Any, **_: Any) -> None:
            known_as_saved.append(second.trainer.saved_step)

    second.trainer.add_callback(as_callback(Look))
    saving.train(second.trainer, kept)
    assert known_as_saved == [2]  # a run that is stopped before its next step has nothing to save
    loaded = load_file(store / FROM / "adapter" / "adapter_model.safetensors")
    reference = {name.replace(".ref.", "."): one for name, one in second.adapter_weights("ref").items()}
    assert reference.keys() == loaded.keys()
    assert all(torch.equal(one, loaded[name]) for name, one in reference.items())
    trained = {name: one for name, one in second.trainer.model.named_parameters() if one.requires_grad}
    assert trained.keys() == second.adapter_weights().keys()
    assert second.trainer.state.global_step == 4 and second.logged("kl") == first.logged("kl")


def test_sft_goes_on_from_it(tiny_model: Path, store: Path, tmp_path: Path) -> None:
    import torch

    train = {"lora_rank": 8, "lora_alpha": 16, "init_from_adapter": FROM}
    env = harness.variables(
        tmp_path, tiny_model, "toy-words", {"train": train, "run_id": "r2"}, SFT_MAX_STEPS=10
    )
    made = sft_trials.build(env, policy=sft_trials.warm)
    plain = plainly_loaded(tiny_model, store)
    assert torch.equal(sft_trials.logits(made.trainer.model), sft_trials.logits(plain))
    ended = harness.run_main(env)
    assert ended.error is None, ended.error


# --- it is not there, or not what it says ---


def spoil_weights(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    def spoil(adapter: Path) -> None:
        from safetensors.torch import load_file, save_file

        path = adapter / "adapter_model.safetensors"
        save_file(change(load_file(path)), path)

    return spoil


def spoil_config(**fields: Any) -> Callable[[Path], None]:
    def spoil(adapter: Path) -> None:
        path = adapter / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return spoil


def without(name: str) -> Callable[[Path], None]:
    return lambda adapter: (adapter / name).unlink()


def overwritten(name: str, content: bytes) -> Callable[[Path], None]:
    def spoil(adapter: Path) -> None:
        (adapter / name).write_bytes(content)

    return spoil


def drop_one(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in weights.items() if name != min(weights)}


def rename(weights: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("q_proj", "query"): tensor for name, tensor in weights.items()}


def zero_b(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor * ("lora_B" not in name) for name, tensor in weights.items()}


def nan_a(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor * (float("nan") if "lora_A" in name else 1) for name, tensor in weights.items()}


SPOILT = {
    "nan": (spoil_weights(nan_a), "holds NaN or infinity: its training failed"),
    "no-weights": (without("adapter_model.safetensors"), "has no adapter_model.safetensors"),
    "no-config": (without("adapter_config.json"), "has no adapter_config.json"),
    "config-unreadable": (overwritten("adapter_config.json", b"{"), "adapter_config.json cannot be read"),
    "weights-unreadable": (
        overwritten("adapter_model.safetensors", b"torn"),
        "adapter_model.safetensors cannot be read",
    ),
    "other-rank": (spoil_config(r=4), "its rank is 4, train.lora_rank is 8; make them equal"),
    "unmatched": (spoil_weights(rename), "of its tensors match nothing in "),
    "one-missing": (spoil_weights(drop_one), "1 of its tensors match nothing in "),
    "no-tensors": (spoil_weights(lambda _: {}), "of its tensors match nothing in "),
    "never-trained": (spoil_weights(zero_b), "every lora_B in it is zero: it was never trained"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILT.values(), ids=SPOILT.keys())
def test_a_spoilt_adapter_is_one_clear_line(
    run: Callable[..., Finished], store: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(store / FROM / "adapter")
    check_refused(run(), message)


def check_refused(ended: Finished, message: str) -> None:
    assert type(ended.error).__name__ == "AdapterProblem"
    text = str(ended.error)
    assert text.startswith("JobSpec train.init_from_adapter=") and message in text and "\n" not in text
    assert ended.stages[-1] == "error_rl" and "rl_train_start" not in ended.stages


def test_tensors_that_contradict_the_config(run: Callable[..., Finished], store: Path) -> None:
    spoil_config(r=4)(store / FROM / "adapter")
    check_refused(run({"lora_rank": 4}), "its config says rank 4, but base_model")


def test_another_rank_in_the_spec(run: Callable[..., Finished]) -> None:
    check_refused(run({"lora_rank": 16}), "its rank is 8, train.lora_rank is 16; make them equal")


def test_another_alpha_in_the_spec_is_said_to_be_ignored(
    run: Callable[..., Finished], caplog: pytest.LogCaptureFixture
) -> None:
    ended = run({"lora_alpha": 64})
    assert ended.error is None, ended.error
    assert "train.lora_alpha=64 is not used: the adapter of train.init_from_adapter has 16" in caplog.text
    caplog.clear()


def test_its_dropout_is_not_taken_over(
    trial: Callable[..., Trial], store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil_config(lora_dropout=0.5)(store / FROM / "adapter")
    made = trial({"kl_penalty_coef": 0.1}, RL_USE_VLLM=0)
    assert "was trained with a dropout of 0.5; this run has none" in caplog.text
    assert made.trainer.model.peft_config["default"].lora_dropout == 0.0
    dropouts = [one for name, one in made.trainer.model.named_modules() if "lora_dropout." in name]
    assert dropouts and {type(one).__name__ for one in dropouts} == {"Identity"}


@pytest.mark.parametrize("prefix", ["sft/nobody/seed0", "sft/r1", "rl/r1/seed0"])
def test_a_prefix_that_holds_no_adapter(run: Callable[..., Finished], prefix: str) -> None:
    ended = run({"init_from_adapter": prefix})
    check_refused(ended, "has no adapter_config.json and no adapter_model.safetensors")
    assert prefix in str(ended.error)


def test_from_a_repository_on_the_hub(
    run: Callable[..., Finished], store: Path, hub: HubServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    adapter = store / FROM / "adapter"
    hub.create_repo("acme/adapters", kind="dataset", private=True)
    hub.push(
        "acme/adapters",
        {f"{FROM}/adapter/{path.name}": path.read_bytes() for path in adapter.iterdir()},
    )
    hub.faults += [
        Fault(r"GET .*/acme/adapters/tree", status=503, times=1),
        Fault(r"GET .*/acme/adapters/.*adapter_config", status=503, times=1),
        Fault(r"GET .*/acme/adapters/.*adapter_model", drop=True, times=2),
    ]
    where = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_test"}
    ended = run({"init_from_adapter": f"acme/adapters:{FROM}", "steps": 2}, **where)
    assert ended.error is None, ended.error
    assert f"going on from acme/adapters:{FROM}" in caplog.text
    check_refused(
        run({"init_from_adapter": "acme/adapters:sft/other/seed0"}, SEED=1, **where),
        "acme/adapters/sft/other/seed0/adapter has no adapter_config.json",
    )
