"""`--check`: all of a run that needs no GPU and no weights, and what it would take."""

from collections.abc import MutableMapping
from typing import TextIO

from accounting import Tally
from delivery.hub_client import export_token
from delivery.redaction import redactor
from job import cli, estimates, rules
from job.settings import identify
from training import inputs


def rehearse(env: MutableMapping[str, str], out: TextIO) -> None:
    """Resolve everything, and write what it is and what it will take."""
    identity, problem = identify(env)
    if problem is not None:
        raise problem
    redact = redactor(identity.secrets)
    with cli.Heard() as heard:
        settings = rules.resolve(env, identity)
        export_token(env, identity.token)
        job, settings = inputs.load(settings, redact, [], download=False)
        if settings.mode == "sft":
            _, rows, batch = inputs.for_sft(settings, job, lambda: None)
            lengths, over_budget = [len(row.ids) for row in rows], 0
        else:
            talk, prompts, batch, _ = inputs.for_rl(settings, job, Tally(), lambda: None)
            lengths, over_budget = [len(talk.encode(text)) for text in prompts.texts], prompts.over_budget
    cli.print_table(settings, out)
    found = estimates.data(settings, lengths, over_budget, multi_turn=job.env.multi_turn)
    todo = estimates.work(settings, batch, found)
    if job.examiner:
        todo = estimates.with_evaluations(settings, todo, len(job.examiner.exam.rows))
    needs = estimates.machine(settings, job.plan, batch, found, todo)
    cli.print_facts(settings, job.metrics.notes, batch, found, todo, out)
    cli.print_machine(settings, needs, out)
    odd = estimates.data_warnings(settings, found, todo)
    odd += estimates.machine_warnings(settings, job.plan, needs) if needs else []
    cli.print_warnings([redact(one) for one in [*heard.messages, *odd]], out)
