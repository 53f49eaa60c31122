"""`vllm` as a server, steered by a real `controller serve`, from its start to the sidecar's end.

One server for all tests, which build on each other.
"""

import itertools
import re
import signal
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import eq
from pathlib import Path

import grpc
import pytest

from controller.core.cost.profile import Profile
from lab.harness.processes import free_port
from speculation.v1 import service_pb2, service_pb2_grpc
from tests.support.engine import EAGLE3, running_engine
from tests.support.eventually import eventually
from tests.support.request_kinds import SCHEMA
from tests.support.sidecar_process import SidecarProcess, controller, sidecar_process
from tests.support.vllm_engine import VllmServer, eagle3, vllm_serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

GAMMAS = (0, 1, 3, 5, 7)
NEW_TOKENS = 48
ENGINE = "the-vllm"
_PINS = itertools.count(1)
PINNED_PROMPT = list(range(5, 25))
Counts = dict[str, int]


@dataclass
class Stand:
    """A sidecar and a server of vLLM.  asked: requests that `pinned` has made."""

    folder: Path
    sidecar: SidecarProcess
    server: VllmServer
    metrics_port: int
    asked: int = 0

    @property
    def address(self) -> str:
        return self.sidecar.address

    def engines(self) -> dict[str, service_pb2.EngineStatus]:
        with grpc.insecure_channel(self.address) as channel:
            answer = service_pb2_grpc.InspectionServiceStub(channel).ListEngines(
                service_pb2.ListEnginesRequest(), timeout=30, wait_for_ready=True
            )
        return {status.engine.engine_id: status for status in answer.engines}

    def reports(self) -> int:
        return self.engines()[ENGINE].reports

    def counters(self) -> dict[str, int]:
        """What the sidecar counts of the engine, by name and position."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics") as answer:
            text = answer.read().decode()
        samples = re.findall(
            rf'^speculation_(\w+)_total\{{engine="{ENGINE}"(?:,position="(\d+)")?\}} ([\d.e+]+)$',
            text,
            re.MULTILINE,
        )
        # Delivered tokens are unknown before the first report.
        return Counter({" ".join(filter(None, key)): int(float(value)) for *key, value in samples})

    @contextmanager
    def pinned(self, gamma: int) -> Iterator[None]:
        """An operator's override, for the length of the block, which begins when it is obeyed."""
        # The id of an override that was cleared is not taken again.
        name, where = f"pin-{gamma}-{next(_PINS)}", ("--address", self.address)
        for command in (
            ("set", "--engine", ENGINE, "--gamma", str(gamma), "--id", name, "--reason", "test"),
            ("clear", name, "--reason", "done"),
        ):
            done = controller("override", *command, *where)
            assert done.returncode == 0, done.stderr
            if command[0] == "set":
                self._wait_until_obeyed(name)
                yield

    def _wait_until_obeyed(self, override: str) -> None:
        """Until drafts of a plan with the override have been verified, in a request that is over.

        The first steps under a plan still verify what was drafted before.
        """

        def planned() -> int:
            plan = self.engines()[ENGINE].plan
            return plan.epoch if override in plan.overrides else 0

        epoch = eventually(planned, description=f"a plan with {override}")

        def obeyed() -> bool:
            self.server.generate([PINNED_PROMPT], 8)
            self.asked += 1
            return self.engines()[ENGINE].last_report.plan_epoch >= epoch

        eventually(obeyed, description=f"a step under a plan with {override}")


@pytest.fixture(scope="module")
def stand(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    folder = tmp_path_factory.mktemp("server")
    port = free_port()
    scraped = "--metrics-port", str(port)
    with sidecar_process(folder, *scraped, log=folder / "sidecar.log") as sidecar:
        variables = {
            "SPECULATION_SIDECAR": sidecar.address,
            "SPECULATION_GAMMAS": ",".join(map(str, GAMMAS)),
            "SPECULATION_ENGINE_ID": ENGINE,
            "SPECULATION_GRACE_SECONDS": "0.5",
        }
        with vllm_serving(folder, eagle3(draft), variables) as server:
            stand = Stand(folder, sidecar, server, port)
            eventually(lambda: ENGINE in stand.engines(), description="it introduces itself")
            yield stand


def test_it_introduces_itself_and_is_steered_exactly(
    stand: Stand, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    status = stand.engines()[ENGINE]
    assert status.engine.fingerprint.engine == "vllm"
    assert status.engine.safe_gamma == GAMMAS[-1]
    assert "the-vllm is steered: draft lengths 0,1,3,5,7" in stand.server.log.read_text()

    def is_steered() -> bool:
        stand.server.generate(prompts[:1], 8)
        now = stand.engines()[ENGINE]
        return now.reports > now.unsteered_steps

    # The first plan may come when steps have run already.
    eventually(is_steered, description="a step under a plan")
    before = stand.engines()[ENGINE]
    answers = stand.server.generate(prompts, NEW_TOKENS)
    assert answers == [tokens[:NEW_TOKENS] for tokens in plain]
    eventually(lambda: stand.reports() > before.reports + 8, description="the steps are reported")
    status = stand.engines()[ENGINE]
    assert (status.rejected_reports, status.dropped_reports) == (0, 0)
    unsteered = status.unsteered_steps - before.unsteered_steps
    assert unsteered < (status.reports - before.reports) / 2


def test_an_override_is_obeyed_as_vllms_own_counters_show(
    stand: Stand, prompts: list[list[int]]
) -> None:
    with stand.pinned(3):
        before, reported = stand.server.counters(), stand.reports()
        stand.server.generate(prompts[:4], NEW_TOKENS)
        after = stand.server.counters()
        drafts, tokens = (after[name] - before[name] for name in ("drafts", "draft_tokens"))
        assert drafts > 0
        assert tokens == 3 * drafts
        eventually(lambda: stand.reports() > reported, description="the steps are reported")
        assert "eagle3 3" in controller("engines", "--address", stand.address).stdout
    with stand.pinned(0):
        before = stand.server.counters()
        stand.server.generate(prompts[:2], 16)
        assert stand.server.counters() == before


def test_a_client_can_do_without_drafts(
    stand: Stand, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    with stand.pinned(5):
        before = stand.server.counters()
        answers = stand.server.generate(prompts[:2], NEW_TOKENS, {"speculation": False})
        assert answers == [tokens[:NEW_TOKENS] for tokens in plain[:2]]
        assert stand.server.counters() == before
        stand.server.generate(prompts[:2], 16, {"speculation": True})
        assert stand.server.counters()["drafts"] > before["drafts"]


def test_counts_are_vllms_own(stand: Stand, prompts: list[list[int]]) -> None:
    """Every kind of end, at every draft length, beside each other.

    vLLM's scheduler counts drafts, and its API server tokens: where that ends a request, for a stop
    string or a hang-up, the scheduler may have run another step of it.  So these come last.
    """
    server, reported = stand.server, stand.counters()
    before, asked = server.metrics(), stand.asked
    firsts = answered = 0

    def play() -> list[list[int]]:
        grammar = {"json": SCHEMA}
        asks: list[Callable[[], list[list[int]]]] = [
            lambda: server.complete(prompts[:2], max_tokens=60, structured_outputs=grammar),
            lambda: server.generate(prompts[4:6], 3),
            lambda: server.generate(prompts[:1], 1),
            lambda: server.generate(prompts[:1], 12, {"speculation": False}),
        ]
        with ThreadPoolExecutor(len(asks)) as pool:
            return [tokens for ask in pool.map(lambda ask: ask(), asks) for tokens in ask]

    def counted() -> tuple[Counts, Counts]:
        """Ours, and vLLM's, by our names."""
        after, now = server.metrics(), stand.counters()
        theirs = {
            name: after[f"spec_decode_num_{name}_total"] - before[f"spec_decode_num_{name}_total"]
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        }
        for place in range(GAMMAS[-1]):
            name = f"spec_decode_num_accepted_tokens_per_pos_total {place}"
            theirs[f"accepted_tokens_per_pos {place}"] = after[name] - before[name]
        tokens = after["generation_tokens_total"] - before["generation_tokens_total"]
        theirs["delivered_tokens"] = tokens - firsts - (stand.asked - asked)
        return {name: now[name] - reported[name] for name in theirs}, theirs

    def settled(agree: Callable[[Counts, Counts], bool]) -> tuple[Counts, Counts]:
        eventually(
            lambda: server.metrics()["num_requests_running"] == 0, description="nothing runs"
        )
        with suppress(AssertionError):
            eventually(lambda: agree(*counted()), description="the last reports have arrived")
        return counted()

    def agree_on_drafts(ours: Counts, theirs: Counts) -> bool:
        delivered = ours["delivered_tokens"]
        at_least = delivered >= theirs["delivered_tokens"]
        return at_least and ours == theirs | {"delivered_tokens": delivered}

    for gamma in (7, 1, 0, 3, 5):
        with stand.pinned(gamma):
            answers = play()
            firsts += len(answers)
            answered += sum(map(len, answers))
    ours, theirs = settled(eq)
    assert ours == theirs
    assert 0 < ours["accepted_tokens"] < ours["draft_tokens"]
    # What was cut off at an end was verified, and not delivered.
    now = stand.counters()
    gained = now["generated_tokens"] - reported["generated_tokens"]
    assert gained > ours["delivered_tokens"] >= answered - firsts
    for gamma in (7, 0, 3):
        with stand.pinned(gamma), ThreadPoolExecutor(1) as pool:
            left = pool.submit(server.hang_up, prompts[6], 200)
            stopped = server.complete(prompts[2:4], max_tokens=40, stop=[",", "e", "1"])
            left.result()
            firsts += len(stopped) + 1
    ours, theirs = settled(agree_on_drafts)
    assert ours["delivered_tokens"] >= theirs["delivered_tokens"]
    assert ours | {"delivered_tokens": 0} == theirs | {"delivered_tokens": 0}
    assert stand.counters()["dropped_reports"] == 0


def test_its_steps_are_profiled(stand: Stand) -> None:
    output = stand.folder / "profile.json"
    done = controller(
        "profile", "--engine-url", stand.server.url, "--sidecar", stand.address,
        "--engine-id", ENGINE, "--output", str(output), "--budget", "12",
        "--batch-sizes", "1,4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    profile = Profile.from_json(output.read_text())
    assert profile.fingerprint.engine == "vllm"
    measured_cells = {(cell.gamma, cell.batch_size) for cell in profile.cells}
    assert measured_cells == {(gamma, size) for gamma in GAMMAS for size in (1, 4)}
    assert stand.engines()[ENGINE].profile_id == profile.profile_id


def test_an_engine_of_sglang_beside_it_is_another_engine(
    stand: Stand, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    variables = {"SPECULATION_SIDECAR": stand.address, "SPECULATION_ENGINE_ID": "the-sglang"}
    with running_engine(stand.folder / "sglang", EAGLE3, variables) as other:
        eventually(lambda: "the-sglang" in stand.engines(), description="both are there")
        before = {name: status.reports for name, status in stand.engines().items()}
        mine = stand.server.generate(prompts, NEW_TOKENS)
        theirs = other.generate(prompts, [NEW_TOKENS] * len(prompts))
        assert mine == [tokens[:NEW_TOKENS] for tokens in plain]
        assert mine == [answer.tokens for answer in theirs]

        def both_reported() -> bool:
            return all(s.reports > before[name] for name, s in stand.engines().items())

        eventually(both_reported, description="both report")
        engine_statuses = stand.engines()
    vllm, sglang = engine_statuses[ENGINE].engine, engine_statuses["the-sglang"].engine
    assert (vllm.fingerprint.engine, sglang.fingerprint.engine) == ("vllm", "sglang")
    assert vllm.fingerprint != sglang.fingerprint
    assert (vllm.capabilities.draft_lag, sglang.capabilities.draft_lag) == (1, 0)
    # The profile of one is not the other's, and no report of one was taken for the other's.
    assert engine_statuses[ENGINE].profile_id
    assert not engine_statuses["the-sglang"].profile_id
    assert [status.rejected_reports for status in engine_statuses.values()] == [0, 0]


def test_the_doctor_finds_it_well(stand: Stand) -> None:
    done = controller("doctor", "--address", stand.address, "--engine-url", stand.server.url)
    doctor_text = " ".join(done.stdout.split())
    assert "answers (vLLM)" in doctor_text
    assert "ok plugin" in doctor_text
    # The title of the engine's process hides its environment, and not that it has an agent.
    assert "has no agent" not in doctor_text


def test_without_a_sidecar_it_goes_on_and_is_steered_again_later(
    stand: Stand, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    wanted = [tokens[:NEW_TOKENS] for tokens in plain]
    stand.sidecar.stop(signal.SIGKILL)
    for _ in range(3):
        assert stand.server.generate(prompts, NEW_TOKENS) == wanted
    with sidecar_process(stand.folder, log=stand.folder / "sidecar.log") as again:
        assert again.address == stand.address
        eventually(lambda: ENGINE in stand.engines(), description="it introduces itself again")

        def steered() -> bool:
            assert stand.server.generate(prompts[:2], 16) == [tokens[:16] for tokens in plain[:2]]
            status = stand.engines()[ENGINE]
            return status.steering and status.reports > status.unsteered_steps

        eventually(steered, description="it is steered again")
