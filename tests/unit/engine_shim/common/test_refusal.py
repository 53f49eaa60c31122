"""An error of a plugin ends the process with its reason, and nothing else does."""

import pytest

from engine_shim.common.errors import UnsupportedEngineError, register_or_exit
from engine_shim.common.settings import ShimSettings


def test_any_error_ends_the_process_with_the_reason():
    def fail() -> None:
        raise ImportError("no module named what was moved")

    with pytest.raises(SystemExit, match="does not start: ImportError: no module named"):
        register_or_exit(fail)
    register_or_exit(lambda: None)


def test_a_version_that_was_not_tested_is_refused_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
):
    with pytest.raises(UnsupportedEngineError, match=r"An engine of unknown version .* 1\.0 and 2"):
        ShimSettings.load().require_version("An engine", "", ("1.0", "2.0"))
    ShimSettings.load().require_version("An engine", "2.0", ("1.0", "2.0"))
    monkeypatch.setenv("SPECULATION_ALLOW_UNKNOWN_VERSION", "1")
    ShimSettings.load().require_version("An engine", "3.0", ("1.0", "2.0"))


def test_a_version_that_is_alike_starts_with_a_warning(caplog: pytest.LogCaptureFixture):
    ShimSettings.load().require_version("An engine", "1.9", ("2.0",), ("1.8", "1.9"))
    assert "An engine 1.9 has what the plugin uses" in caplog.text
