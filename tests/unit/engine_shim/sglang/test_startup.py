"""What the ranks of one engine compare before they serve."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.sglang.api import ranks
from engine_shim.sglang.api.settings import PluginSettings
from engine_shim.sglang.startup import AGREED_SETTINGS, agreement_facts

# Another value of every setting that all ranks must have alike.
OTHERS: dict[str, Any] = {
    "gammas": (0, 1, 3, 7),
    "graph_limits": {7: 4},
    "safe_gamma": 1,
    "grace_seconds": 3.0,
    "sleep_positions": 0,
    "dflash_model_path": "drafts/other",
    "dflash_revision": "5a1c0de",
    "learner": "dflash",
    "lookup": True,
    "online_updates": True,
    "online_scope": "request",
    "signals_folder": "/var/lib/signals",
}
# Rank 0 alone has the link, and writes signals; all read versions from their folder.
RANK_0 = {
    "sidecar", "ca", "client_certificate", "client_key", "token_file", "engine_id",
    "lease_max_seconds", "report_buffer", "report_interval_ms", "agent_nice", "classes",
    "class_key_file", "class_prompt_tokens",
    "signals_megabytes", "signals_device_megabytes", "signals_top",
    "signals_final_states",
}  # fmt: skip
# Rank 0 alone has the trainer.
TRAINERS = {name for name in PluginSettings.model_fields if name.startswith("online_")}
TRAINERS -= {"online_updates", "online_scope"}
# They only decide whether a rank starts; where one does not, no rank serves.
STARTS_OR_NOT = {"allow_unknown_version", "require_drafters"}


def gathered(monkeypatch: pytest.MonkeyPatch, *facts: dict[str, Any]) -> None:
    """As many ranks as there are facts, which all of them have sent."""
    group = SimpleNamespace(cpu_group=None)
    parallel = SimpleNamespace(tp_size=len(facts), tp_rank=0, tp_group=group)
    monkeypatch.setattr(ranks, "get_parallel", lambda: parallel)

    def gather(gathered_facts: list[Any], _: Any, *, group: Any) -> None:
        gathered_facts[:] = facts

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)


def test_every_setting_is_compared_or_need_not_be() -> None:
    free = RANK_0 | TRAINERS | STARTS_OR_NOT
    assert not free & set(AGREED_SETTINGS)
    assert free | set(AGREED_SETTINGS) == set(PluginSettings.model_fields)
    assert set(OTHERS) == set(AGREED_SETTINGS)


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_ranks_that_differ_in_a_setting_do_not_start(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    mine = agreement_facts(PluginSettings(), "1.0")
    theirs = agreement_facts(PluginSettings(**{name: OTHERS[name]}), "1.0")
    gathered(monkeypatch, mine, mine, theirs)
    with pytest.raises(
        UnsupportedEngineError, match=rf"the ranks disagree: SPECULATION_{name.upper()} is .*rank 2"
    ):
        ranks.require_agreement(mine)


def test_ranks_with_other_versions_of_the_plugin_do_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, theirs = (agreement_facts(PluginSettings(), version) for version in ("1.0", "1.1"))
    gathered(monkeypatch, mine, theirs)
    with pytest.raises(UnsupportedEngineError, match=r"the installed plugin is 1\.0 on rank 0"):
        ranks.require_agreement(mine)


def test_ranks_that_agree_start(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = agreement_facts(PluginSettings(), "1.0")
    gathered(monkeypatch, mine, dict(mine))
    ranks.require_agreement(mine)
