"""docs/lifecycle.md says what the code says: settings, what reloads, services."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from controller.core.training.selective_training import TrainingSettings
from controller.service.views.readiness import SERVICES, STORE
from controller.settings.settings import GROUPS, RELOADED, Settings
from controller.settings.sources import variable_name
from tests.support.setting_texts import setting_texts

PAGE = (Path(__file__).parents[3] / "docs" / "lifecycle.md").read_text(encoding="utf-8")


def shown(value: object) -> str:
    if value is None or value == ():
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) and value < 1e5 else f"`{value}`"


def rows() -> Iterator[str]:
    texts = setting_texts(Settings)
    for name, field in Settings.model_fields.items():
        if name not in GROUPS:
            when = "SIGHUP" if name in RELOADED else "restart"
            yield (
                f"| `{name}` | `{variable_name(name)}` | {shown(field.default)} | {when} | "
                f"{texts[name]} |"
            )


def test_the_page_has_every_setting_as_it_is():
    wanted = list(rows())
    setting_lines = [
        line for line in PAGE.splitlines() if line.startswith("| `") and "CONTROLLER_" in line
    ]
    assert setting_lines == wanted, "it should be\n" + "\n".join(wanted)


def test_the_page_has_every_constant_of_training_with_its_default():
    unwrapped_page = " ".join(PAGE.split())
    for constant in dataclasses.fields(TrainingSettings):
        assert f"`training.{constant.name}` {shown(constant.default)}" in unwrapped_page


def test_the_page_links_to_the_constants_of_the_decision():
    assert "](decision-settings.md)" in PAGE


def test_the_page_names_every_service_of_the_health_checks():
    assert all(f"`{service}`" in PAGE for service in (*SERVICES, STORE))
