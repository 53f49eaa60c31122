from controller.profiling.engine_http import EngineHttp
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
        assert generation.ended
    assert server.requests.count("/abort_request") == 3
    assert server.reused == 0
