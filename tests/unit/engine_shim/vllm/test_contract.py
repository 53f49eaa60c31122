"""What the plugin relies on in vLLM, held against the source of each version that it knows.

`signatures.json` was read from the wheels of these versions by `scripts/vllm_signatures.py`.  A
failure means that vLLM changed under the plugin: read the change, adapt what uses it, then the
tables of `vllm_api` and of `contracts`.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from engine_shim.vllm import vllm_api
from engine_shim.vllm.configuration import METHODS
from engine_shim.vllm.draft_lengths import (
    DRAFT_LENGTH_EFFECTS,
    MULTI_MODULE_MTP,
    DraftedTokens,
    ZeroLengthDrafting,
)
from lab.vllm_engine.environment import VENV, has_environment
from scripts.vllm_signatures import CODE, surface
from tests.support.installed_wheel import Wheel
from tests.unit.engine_shim.vllm import contracts

TABLE: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("signatures.json").read_text(encoding="utf-8")
)
# The schedulers' code: before a step's facts lay elsewhere, which the plugin does not use.
CODES = {
    ("0.26.0", "0.27.0", "0.28.0", "0.29.0", "0.30.0"),
    ("0.31.0", "0.32.0", "0.33.0"),
}
# Where the methods draft that have no entry of their own in the table of facts.
SAME_DRAFTER = {
    ("1", "eagle3"): "eagle", ("1", "mtp"): "eagle", ("1", MULTI_MODULE_MTP): "eagle",
    ("1", "draft_model"): "eagle", ("1", "dflash"): "eagle",
    ("2", "eagle3"): "eagle", ("2", "mtp"): "eagle",
}  # fmt: skip


def without_defaults(parameters: str) -> str:
    return ", ".join(part.partition("=")[0] for part in parameters.split(", "))


def test_every_version_is_in_the_table():
    versions = [version for row in TABLE for version in row["versions"]]
    assert sorted(versions) == sorted({*vllm_api.TESTED, *vllm_api.COMPATIBLE})
    codes: dict[str, list[str]] = {}
    for row in TABLE:
        codes.setdefault(json.dumps(row["code"]), []).extend(row["versions"])
    assert {tuple(sorted(alike)) for alike in codes.values()} == CODES


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["versions"][0])
def test_a_function_takes_what_the_plugin_gives_it(row):
    for target, expected in vllm_api.SIGNATURES.items():
        parameters = without_defaults(row["parameters"][target] or "")
        if target.startswith(vllm_api.PROPOSER):
            assert parameters.startswith(expected), target
        else:
            assert parameters == expected, target


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["versions"][0])
def test_an_object_has_what_the_plugin_reads_or_writes(row):
    for target, fields in contracts.FIELDS.items():
        assert set(row["fields"][target]) == fields, target


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["versions"][0])
def test_a_version_has_one_parser_of_the_servers_flags(row):
    assert len(row["server_parser"]) == 1


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["versions"][0])
@pytest.mark.parametrize("runner", ["1", "2"])
def test_what_a_draft_length_changes_is_what_the_source_says(row, runner):
    """A method follows if its runner hands the length on and its drafter reads it."""
    facts = row["draft_length"][runner]
    for version in row["versions"]:
        table = DRAFT_LENGTH_EFFECTS[version][int(runner)]
        for method in (*METHODS, MULTI_MODULE_MTP):
            drafter = facts["drafters"][SAME_DRAFTER.get((runner, method), method)]
            if drafter is None:
                # 0.26 has one drafter for both kinds of predictor.
                assert method not in table or (version, method) == ("0.26.0", MULTI_MODULE_MTP)
                continue
            reads = facts["is_told"] and drafter["reads"]
            draft_length = table[method]
            if draft_length.drafting is DraftedTokens.BLOCK:
                assert (draft_length.at_zero is not ZeroLengthDrafting.WHOLE) is reads
            else:
                assert (draft_length.drafting is DraftedTokens.SHORTER) is reads
                assert draft_length.is_followed is reads


@pytest.mark.skipif(
    not has_environment(), reason="VLLM IS NOT INSTALLED HERE: make setup-vllm installs it"
)
def test_the_installed_version_is_as_its_wheel():
    (packages,) = (VENV / "lib").glob("python3*/site-packages")
    installed_surface = surface(Wheel("installed", packages))
    (row,) = (row for row in TABLE if vllm_api.TESTED[0] in row["versions"])
    assert installed_surface == {key: value for key, value in row.items() if key != "versions"}
    assert installed_surface["code"].keys() == set(CODE)
