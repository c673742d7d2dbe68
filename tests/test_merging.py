"""What merged weights are made from; that they are right is asserted where adapters are trained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from job.settings import Settings, SettingsError
from spec import JobSpec
from tests.test_layout import PLAN
from training import merging


def settings(**env: str) -> Settings:
    return Settings.read({"AUTOSLM_QUANT": "4bit-qlora", **env}, JobSpec.parse({"environment": {"id": "x"}}))


def test_weights_that_are_4_bit_themselves_are_refused():
    plan = replace(PLAN, four_bit=True, is_quantised=True)
    with pytest.raises(
        SettingsError, match=r"AUTOSLM_MERGE=on: the weights of 'b' are 4-bit.*AUTOSLM_QUANT_REPO"
    ):
        merging.check(settings(AUTOSLM_MERGE="1"), plan)
    merging.check(settings(), plan)
    merging.check(settings(AUTOSLM_MERGE="1"), replace(plan, source="quantised"))
    merging.check(settings(AUTOSLM_MERGE="1"), replace(PLAN, four_bit=True))


def test_an_adapter_goes_into_the_models_own_weights_in_bfloat16():
    plan = replace(PLAN, source="quantised", commit="c1", base_commit="c0", four_bit=True, is_quantised=True)
    assert plan.unquantised() == replace(PLAN, commit="c0", base_commit="c0", dtype="bfloat16")
