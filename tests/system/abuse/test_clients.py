"""What commands and the client meet where something else answers in the place of a sidecar."""

import pytest
from typer.testing import CliRunner

from controller.cli import app
from controller.client.client import Client
from controller.client.paging import LIST_BYTES_MAX, PAGES_MAX, EndlessListError
from controller.util.exit_codes import Exit
from tests.support.hostile_sidecar import hostile_sidecar

LISTS = (
    ("top", "--once"), ("top", "--once", "--fleet"), ("engines",), ("engines", "--fleet"),
    ("profile", "list"), ("override", "log"), ("doctor", "--engine-url", ""),
    ("profile", "--engine-url", "http://127.0.0.1:1"),
)  # fmt: skip


def ran(address: str, *words: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    option = "--sidecar" if words[:2] == ("profile", "--engine-url") else "--address"
    found = CliRunner().invoke(app, [*words, option, address])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.exit_code, found.output


@pytest.mark.parametrize("words", LISTS, ids=" ".join)
def test_a_list_that_names_the_same_page_for_ever_ends_every_command(words: tuple[str, ...]):
    with hostile_sidecar(lambda _: ("again", 0)) as sidecar:
        code, output = ran(sidecar.address, *words)
    assert code != 0
    assert "names a page as the next one" in output
    assert sidecar.pages == 2


def test_a_list_that_always_has_a_next_page_takes_no_more_memory_than_a_limit():
    page = 3 << 20
    with hostile_sidecar(lambda number: (str(number), page)) as sidecar:
        code, output = ran(sidecar.address, "top", "--once")
    assert code == Exit.FAILED
    assert f"more than {LIST_BYTES_MAX} bytes" in output
    assert sidecar.pages == LIST_BYTES_MAX // page + 1


def test_a_list_of_empty_pages_ends_too():
    with hostile_sidecar(lambda number: (str(number), 0)) as sidecar:
        with Client(sidecar.address) as client, pytest.raises(EndlessListError):
            client.profiles()
        assert sidecar.pages == PAGES_MAX + 1
    with hostile_sidecar(lambda number: (str(number), 0)) as sidecar:
        with Client(sidecar.address) as client, pytest.raises(EndlessListError):
            list(client.audit())
        assert sidecar.pages == PAGES_MAX + 1


@pytest.mark.parametrize(
    "form", [(), ("-o", "wide"), ("-o", "json"), ("-o", "yaml"), ("-o", "name")]
)
@pytest.mark.parametrize("words", LISTS[:-2], ids=" ".join)
def test_words_of_a_stranger_command_no_terminal(words: tuple[str, ...], form: tuple[str, ...]):
    hostile = "a\x1b]0;x\x07\x1b[2J\x9b31m\u202eb\u2066\u2028\x7f\r"
    with hostile_sidecar(lambda _: ("", 0), hostile) as sidecar:
        code, output = ran(sidecar.address, *words, *form)
    assert code == 0
    assert output.strip()
    assert all(line.isprintable() for line in output.split("\n")), output
