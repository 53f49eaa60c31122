import asyncio

from tests.support.closing_server import ClosingServer
from tools.soak.load import Load, pool


async def test_no_request_of_the_load_is_sent_on_a_connection_that_the_server_may_be_closing():
    with ClosingServer() as server:
        load = Load(server.url, pool(), seed=1)
        await asyncio.wait_for(load.play(0.3), 60)
    assert load.answers
    assert load.lost_requests == []
    assert server.reused == 0


async def test_a_lost_request_is_counted_and_the_load_continues():
    with ClosingServer(lose=1) as server:
        load = Load(server.url, pool(), seed=1)
        await asyncio.wait_for(load.play(0.3), 60)
    assert load.answers
    (text,) = load.lost_requests
    assert text.startswith("request soak-")
