"""A server that could not be steered does not start, and says why."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.engine import (
    DFLASH,
    DFLASH_ONLY,
    DRAFT,
    EAGLE3,
    MODES,
    START_SECONDS,
    install_plugin,
    started_engine,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

SABOTAGE = "tests.system.engine.sabotage"


def last_words(
    folder: Path, arguments: Sequence[str], sabotage: str = "", mode: str = "eager", **settings: str
) -> str:
    """What a server prints that ends by itself, with an error.  settings: SPECULATION_*."""
    variables = {"SPECULATION_SIDECAR": f"unix:{folder / 'absent.sock'}", **MODES[mode]}
    variables |= {f"SPECULATION_{name.upper()}": value for name, value in settings.items()}
    if sabotage:
        plugins = install_plugin(folder / "sabotage", f"{SABOTAGE}:{sabotage}", name="zz_sabotage")
        variables["PYTHONPATH"] = str(plugins)
    with started_engine(folder, arguments, variables) as engine:
        try:
            assert engine.process.wait(START_SECONDS) != 0
        except subprocess.TimeoutExpired:
            pytest.fail(f"it started:\n{engine.tail()}")
        return engine.log.read_text(errors="replace")


def test_a_configuration_that_cannot_be_steered(tmp_path: Path) -> None:
    own = ("--speculative-adaptive", "--speculative-adaptive-config", "own.json")
    words = last_words(tmp_path, (*EAGLE3, *own))
    assert "--speculative-adaptive-config and SPECULATION_SIDECAR exclude each other" in words


def test_prefill_graphs_that_belong_to_one_draft_length(tmp_path: Path) -> None:
    words = last_words(tmp_path, (*EAGLE3, "--cuda-graph-backend-prefill", "full"))
    assert "SPECULATION_SIDECAR is set, but --cuda-graph-backend-prefill is full" in words
    assert "breakable or disabled is needed" in words


def test_adapters(tmp_path: Path) -> None:
    words = last_words(tmp_path, (*EAGLE3, "--lora-paths", "name=path"))
    assert "SPECULATION_SIDECAR is set, but LoRA is on (--enable-lora, --lora-paths)" in words
    assert "serve without adapters, or unset SPECULATION_SIDECAR" in words


def test_a_block_that_the_engine_keeps_no_room_for(tmp_path: Path) -> None:
    settings = {"dflash_model_path": str(DFLASH), "gammas": "0,1,3,5"}
    words = last_words(tmp_path, EAGLE3, **settings)
    assert "the DFlash drafter drafts blocks of 8" in words
    assert "add 7 to SPECULATION_GAMMAS" in words


def test_a_second_drafter_of_another_kind(tmp_path: Path) -> None:
    words = last_words(tmp_path, EAGLE3, dflash_model_path=str(DRAFT))
    assert "is not a DFlash checkpoint" in words


def test_a_required_drafter_that_cannot_draft(tmp_path: Path) -> None:
    settings = {"dflash_model_path": str(DFLASH), "require_drafters": "1"}
    words = last_words(tmp_path, EAGLE3, "break_block_drafter", **settings)
    assert f"the DFlash drafter {DFLASH} cannot draft: MemoryError: sabotaged" in words


def test_an_only_drafter_that_cannot_draft(tmp_path: Path) -> None:
    words = last_words(tmp_path, DFLASH_ONLY, "break_block_drafter")
    assert f"the DFlash drafter {DFLASH} cannot draft: MemoryError: sabotaged" in words


@pytest.mark.parametrize("alone", [False, True])
def test_a_drafter_whose_graphs_cannot_be_captured(tmp_path: Path, *, alone: bool) -> None:
    """What a failed capture leaves behind is unknown, so no request is served on top of it."""
    settings = {} if alone else {"dflash_model_path": str(DFLASH)}
    arguments = DFLASH_ONLY if alone else EAGLE3
    words = last_words(tmp_path, arguments, "break_block_capture", "graphs", **settings)
    assert f"the graphs of the DFlash drafter {DFLASH} cannot be captured: " in words
    assert "sabotaged; leave memory for them" in words
    assert "no longer drafts" not in words


def test_a_shorter_block_than_was_trained(tmp_path: Path) -> None:
    words = last_words(tmp_path, (*DFLASH_ONLY, "--speculative-num-draft-tokens", "4"))
    assert "--speculative-num-draft-tokens 4: the checkpoint drafts blocks of 8" in words


def test_a_hook_that_sglang_could_not_apply(tmp_path: Path) -> None:
    words = last_words(tmp_path, EAGLE3, "break_telemetry_hook")
    assert "SGLang could not apply the plugin's hook" in words
    assert "_resolve_spec_v2_tokens" in words


def test_a_policy_that_was_never_constructed(tmp_path: Path) -> None:
    words = last_words(tmp_path, EAGLE3, "bring_back_sglangs_policy")
    assert "SGLang never constructed the plugin's policy" in words
    assert "found AdaptiveSpeculativeParams" in words
