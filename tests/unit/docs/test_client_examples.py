"""Runs the examples of docs/client.md in their order against a real sidecar and a real link."""

import doctest
import re
from pathlib import Path

import pytest

from controller.client import Client
from tests.support.eventually import eventually
from tests.support.linked_engine import linked_engine
from tests.support.sidecar_process import sidecar_process

PAGE = Path(__file__).resolve().parents[3] / "docs" / "client.md"


def test_every_example_prints_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```pycon\n(.*?)```", text, re.DOTALL)
    assert text.count("```") == 2 * len(blocks) > 0
    test = doctest.DocTestParser().get_doctest("".join(blocks), {}, PAGE.name, str(PAGE), 0)
    assert len(test.examples) > len(blocks)
    complaints: list[str] = []
    with (
        sidecar_process(tmp_path, environment={"CONTROLLER_READY_WITH": "guess"}) as sidecar,
        linked_engine(sidecar.address, "pod-7:30000", agent_nice=0) as engine,
    ):
        monkeypatch.setenv("CONTROLLER_ADDRESS", sidecar.address)
        client = Client()

        def is_steered() -> bool:
            engine.run(60)
            return client.overview()[0].link == "steered"

        eventually(is_steered, description="the page's engine reports, and is steered")
        doctest.DocTestRunner().run(test, out=complaints.append)
    assert not complaints, "".join(complaints)
