"""What the command line prints, and what it does not import to print it."""

import io
import json

import pytest

from job import cli
from job.knobs import SettingsError, declared
from job.settings import Settings
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

# Every variable of the contract's tables that the worker reads.
CONTRACT = """
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


def test_help_names_every_variable_of_the_contract():
    assert {*CONTRACT.split()} - {*help_text().replace("(", " ").split()} == set()


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
    import worker

    out = io.StringIO()
    with pytest.raises(ValueError, match=message) as caught:
        worker.check(env, out)
    assert isinstance(caught.value, SettingsError) == (message != "must be valid JSON")
    assert out.getvalue() == ""


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
