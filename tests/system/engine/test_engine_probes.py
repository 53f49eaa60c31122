"""The probes of the manifests at a real server: healthy, and not a token for it."""

import urllib.request
from pathlib import Path

import pytest

from tests.support.engine import START_SECONDS, running_engine
from tests.support.eventually import eventually
from tests.unit.deploy.manifests import containers, variables

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

SETTING = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
# What SGLang logs for the one token of a health check.
GENERATED = "Prefill batch"


def test_the_probes_of_the_manifests_generate_nothing(tmp_path: Path):
    container = containers("demo")["sglang"]
    setting = {SETTING: variables(container)[SETTING]}
    paths = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness")}
    paths.add(container["livenessProbe"]["httpGet"]["path"])
    # SGLang reads the variable while it is imported.
    with running_engine(tmp_path, variables=setting, fresh=True) as engine:
        log = tmp_path / "engine.log"
        before = log.stat().st_size

        def manifest_text() -> str:
            return log.read_text(errors="replace")[before:]

        for path in sorted(paths) * 3:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{engine.port}{path}", timeout=START_SECONDS
            ) as answer:
                assert answer.status == 200
        # One that generates is seen, and nothing before it.
        with urllib.request.urlopen(
            f"http://127.0.0.1:{engine.port}/health_generate", timeout=START_SECONDS
        ):
            pass
        eventually(
            lambda: GENERATED in manifest_text(),
            timeout_seconds=START_SECONDS,
            description="the token is logged",
        )
        assert manifest_text().count(GENERATED) == 1
