from collections.abc import Iterator

import pytest

from controller.profiling.engine_http import EngineHttp
from controller.profiling.errors import EngineUnreachableError, ProfilingUsageError
from tests.support.answering import serve_answers
from tests.support.closing_server import ClosingServer


async def test_no_request_is_sent_on_a_connection_that_the_server_may_be_closing():
    with ClosingServer() as server:
        engine = EngineHttp(server.url)
        for _ in range(3):
            assert await engine.call("POST", "/flush_cache", {}) == (200, {})
    assert server.reused == 0


async def test_every_sequence_of_a_load_is_aborted_on_a_connection_of_its_own():
    with ClosingServer(aborts=3) as server:
        generation = EngineHttp(server.url).generate([[1], [2], [3]], ["a", "b", "c"], 8)
        await generation.stop()
        assert generation.has_ended
    assert server.requests.count("/abort_request") == 3
    assert server.reused == 0


@pytest.fixture
def engine() -> Iterator[dict[str, object]]:
    """Answers by path; "" is the URL."""
    answers: dict[str, object] = {}
    with serve_answers(answers) as url:
        answers[""] = url
        yield answers


async def test_a_redirect_is_not_followed(engine: dict[str, object]):
    engine["/server_info"] = {"never": "read"}
    refused = pytest.raises(EngineUnreachableError, match="/server_info answers 302")
    with serve_answers({}, redirect=f"{engine['']}/server_info") as url, refused:
        await EngineHttp(url, "secret").limits()


@pytest.mark.parametrize("host", ["127.evil.example", "10.0.0.1", "[::2]", "engine"])
def test_a_key_never_goes_over_an_open_line(host: str):
    with pytest.raises(ProfilingUsageError, match="sent unencrypted") as error:
        EngineHttp(f"http://{host}:1", "the-key")
    assert "the-key" not in str(error.value)
    EngineHttp(f"https://{host}:1", "the-key")
    EngineHttp(f"http://{host}:1")


def test_a_key_that_is_no_text_is_refused():
    with pytest.raises(ProfilingUsageError, match="must be printable"):
        EngineHttp("http://127.0.0.1:1", "a\r\nHost: b")


async def test_an_answer_without_an_end_is_not_kept(engine: dict[str, object]):
    engine["/server_info"] = b" " * (9 << 20)
    with pytest.raises(EngineUnreachableError, match="answers more than"):
        await EngineHttp(str(engine[""])).limits()
