"""What the command line prints, and what it does not import to print it."""

import io
import json
import logging

import pytest

import recipe
from job import cli
from job.estimates import Data, Machine, Work
from job.knobs import SettingsError, declared
from job.settings import Settings
from recipe import Batch
from spec import JobSpec
from tests.harness import start_python

HEAVY = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "datasets",
    "verifiers",
    "renderers",
    "vllm",
    "huggingface_hub",
)

# Every variable that launchers and people know the worker to read.
PROMISED = """
RUN_MODE PHASE RUN_ID SEED AUTOSLM_JOB_SPEC_JSON AUTOSLM_JOB_SPEC_PATH BENCH_HF_MODEL
AUTOSLM_THINKING AUTOSLM_ARM
HF_REPO HUGGINGFACE_TOKEN HF_TOKEN HF_HUB_ENABLE_HF_TRANSFER
AUTOSLM_HEARTBEAT_MIN_S AUTOSLM_QUANT AUTOSLM_QUANT_REPO AUTOSLM_TEXT_ONLY LORA_TARGETS
SFT_EPOCHS SFT_MAX_STEPS SFT_MAX_EXAMPLES SFT_PER_DEVICE_BS SFT_SAVE_STEPS SFT_PACKING SFT_LIGER
RL_STEPS RL_PROMPTS_PER_STEP RL_GROUP_SIZE RL_PER_DEVICE_PROMPTS RL_MAX_COMPLETION RL_VLLM_MAX_LEN
RL_VLLM_GPU_UTIL RL_VLLM_SLEEP RL_USE_VLLM RL_SAVE_STEPS
AUTOSLM_EVAL_EVERY_STEPS AUTOSLM_EVAL_NUM AUTOSLM_EVAL_MAX_NEW AUTOSLM_EVAL_PASS_THRESHOLD
AUTOSLM_WORK_DIR AUTOSLM_STORE_DIR AUTOSLM_DEVICE AUTOSLM_UPLOAD_DEADLINE_S AUTOSLM_GRACE_S
AUTOSLM_LOG_FLUSH_S AUTOSLM_LOG_LEVEL AUTOSLM_REPORT_TO AUTOSLM_MERGE
SFT_COMPLETION_ONLY RL_ADAPTER_SYNC RL_VLLM_EAGER RL_TOOL_LOOP
"""


def help_text() -> str:
    out = io.StringIO()
    cli.print_help(out)
    return out.getvalue()


def test_help_names_every_promised_variable():
    assert {*PROMISED.split()} - {*help_text().replace("(", " ").split()} == set()


def test_help_describes_every_declared_variable_once():
    text = help_text()
    entries = [line.strip() for line in text.splitlines() if line.startswith("  ") and line[2:3].isalpha()]
    variables = [one.name for one in declared(Settings) if one.is_variable]
    assert entries == ["AUTOSLM_JOB_SPEC_JSON", "AUTOSLM_JOB_SPEC_PATH", *variables]
    assert max(map(len, text.splitlines())) <= 110


def test_a_description_holds_meaning_type_default_spec_field_and_mode():
    by_name = {one.name: cli.described(one) for one in declared(Settings)}
    assert (
        by_name["SFT_EPOCHS"] == "epochs [whole number >= 1; default JobSpec train.epochs, else 2; sft only]"
    )
    assert by_name["AUTOSLM_MERGE"].endswith("[on | off (1 true yes, 0 false no none); default off]")
    assert "default Qwen/Qwen3.5-4B" in by_name["BENCH_HF_MODEL"]


def test_schema_is_the_job_specs():
    out = io.StringIO()
    cli.print_schema(out)
    schema = json.loads(out.getvalue())
    assert schema == JobSpec.model_json_schema()
    assert {"model", "environment", "train", "gpu"} <= {*schema["properties"]}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "a run needs a JobSpec"),
        ({"AUTOSLM_JOB_SPEC_JSON": "{"}, "must be valid JSON"),
        ({"SEED": "one"}, "SEED='one'"),
        ({"SFT_EPOCHS": "two"}, "SFT_EPOCHS='two'"),
    ],
)
def test_check_refuses_before_it_loads_anything(env, message):
    from training import rehearsal

    out = io.StringIO()
    with pytest.raises(ValueError, match=message) as caught:
        rehearsal.rehearse(env, out)
    assert isinstance(caught.value, SettingsError) == (message != "must be valid JSON")
    assert out.getvalue() == ""


# --- what --check prints ---


@pytest.mark.parametrize(
    ("lengths", "lines"),
    [
        ([7], [f"7-7 |{'#' * 71} 1"]),
        (
            [1, 1, 1, 3],
            ["1-1 |" + "#" * 71 + " 3", "2-2 |" + " " * 71 + " 0", "3-3 |" + "#" * 24 + " " * 47 + " 1"],
        ),
    ],
)
def test_a_histogram_of_few_lengths(lengths, lines):
    assert cli.histogram(lengths) == lines


def test_a_histogram_of_many_lengths_counts_each_once_and_fits():
    lengths = sorted([*range(20, 2048), *[2048] * 5000])
    lines = cli.histogram(lengths)
    assert len(lines) == 10 and {len(line) for line in lines} == {cli.WIDTH - 2}
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == len(lengths)
    assert lines[0].startswith("  20-222  |#") and lines[-1].startswith("1847-2049 |##")


def printed(write, *args) -> list[str]:
    out = io.StringIO()
    write(*args, out)
    assert max(map(len, out.getvalue().splitlines())) <= 80
    return out.getvalue().splitlines()


NOTES = {"environment": "toy", "environment_version": "1.0", "model_id": "acme/m", "model_commit": "abc"}
ROWS = Data((10, 20, 30), 2, 0)


def of_mode(algorithm: str) -> Settings:
    return Settings.read({}, JobSpec.parse({"algorithm": algorithm, "environment": {"id": "x"}}))


def test_facts_of_a_supervised_run():
    notes = {**NOTES, "rows": {"source": 6, "without_target": 2, "target_cut_off": 1, "kept": 3}}
    lines = printed(cli.print_facts, of_mode("sft"), notes, Batch(2, 4), ROWS, Work(12, 1234, 0, 2.0))
    assert lines[3:5] == [
        "train on: 3 rows, 2 without target, 1 cut off",
        "tokens of a row, prompt and answer: median 20, longest 30",
    ]
    assert lines[-3:] == ["batch: 2 x 4", "steps: 12, 2.0 passes over the data", "tokens: 1,234"]


def test_facts_of_grpo():
    lines = printed(
        cli.print_facts,
        of_mode("grpo"),
        {**NOTES, "model_commit": None, "rows": {"source": 5, "kept": 3}},
        Batch(8, 2),
        ROWS,
        Work(12, 1234, 900, 2.0),
    )
    assert lines[2:5] == [
        "model: acme/m at a local folder",
        "train on: 3 prompts, 2 over the budget",
        "tokens of a prompt: median 20, longest 30",
    ]
    assert lines[-1] == "tokens: at most 1,234, of which 900 sampled"


def test_estimates_name_the_card_and_what_needs_its_memory():
    job = Settings.read({}, JobSpec.parse({"environment": {"id": "x"}, "gpu": {"type": "RTX 4090"}}))
    needs = Machine({"weights": 9.4, "adapter": 0.51}, 12.3, 2.04, 1.4)
    price = recipe.GPUS["RTX 4090"].usd_per_hour
    assert printed(cli.print_machine, job, needs) == [
        "",
        "rough estimates, for orientation:",
        "  memory: 9.9 GB of the 24 GB of RTX 4090: weights 9.4, adapter 0.5",
        "  disk: 12.3 GB of 60, the image not counted",
        "  time: at most 2.0 hours",
        f"  cost: at most $1.40 at ${price:.2f} an hour",
    ]
    on_cpu = Settings.read({"AUTOSLM_DEVICE": "cpu"}, job.spec)
    assert printed(cli.print_machine, on_cpu, Machine({"weights": 1.0}, 1.0, None, None))[2:] == [
        "  memory: 1.0 GB: weights 1.0",
        "  disk: 1.0 GB of 60, the image not counted",
    ]
    assert "not estimated" in printed(cli.print_machine, job, None)[0]


def test_warnings_are_heard_and_printed_as_a_list():
    with cli.Heard() as heard:
        logging.getLogger("job.dataset").warning("thinking is on and %d", 3)
        logging.getLogger("job.dataset").info("quiet")
    logging.getLogger("job.dataset").warning("too late")
    assert heard.messages == ["thinking is on and 3"]
    lines = printed(cli.print_warnings, [*heard.messages, "word " * 30])
    assert lines[1:3] == ["warnings:", "  - thinking is on and 3"] and len(lines) == 5
    assert printed(cli.print_warnings, []) == ["", "no warnings"]


# --- the process ---

SECRET = "open-sesame"
ASKED = (["--help"], ["-h"], ["--schema"], [f"--{SECRET}"], ["--help", "--schema"], ["--check"])
PROGRAM = f"""
import contextlib, io, json, sys
import worker
answers = []
for arguments in {ASKED!r}:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = worker.command(arguments, {{"HF_TOKEN": {SECRET!r}}})
    answers.append([code, out.getvalue()])
print(json.dumps([answers, sorted(sys.modules)]))
"""


@pytest.mark.slow
def test_the_command_line_imports_nothing_heavy(tmp_path):
    ended = start_python(["-c", PROGRAM], {}, tmp_path)
    assert ended.code == 0, ended.err
    answers, modules = json.loads(ended.out)
    assert [code for code, _ in answers] == [0, 0, 0, 1, 1, 1]
    texts = [text for _, text in answers]
    assert texts[0] == texts[1] == help_text()
    assert json.loads(texts[2]) == JobSpec.model_json_schema()
    assert texts[3:] == ["", "", ""]
    assert {name.partition(".")[0] for name in modules} & {*HEAVY} == set()
    assert SECRET not in ended.err
    refused, refused_two, without_spec = ended.err.splitlines()
    assert "unknown arguments '--***'" in refused and "unknown arguments '--help --schema'" in refused_two
    assert "a run needs a JobSpec" in without_spec
