"""An engine that forks itself while it is steered, as a program: `python -m ... ADDRESS`.

The fork acts as if it were the engine: it reports steps, asks for choices, and ends as a program
does.  Prints one line of JSON with what both of them saw.
"""

import json
import os
import sys

from engine_shim.link.plan_follower import Source
from tests.support.eventually import eventually
from tests.support.linked_engine import LinkedEngine, linked_engine
from tests.support.step_reports import send, step_report

ENGINE_ID = "forking"
# Of the fork, far behind those of the engine: each would be refused as stale.
_FORKED_STEPS = 500
_STEPS = 400


def main() -> None:
    """Runs both to their ends."""
    with linked_engine(sys.argv[1], ENGINE_ID, agent_nice=0) as engine:
        engine.run(_STEPS)
        agent = engine.link.status().agent_pid
        reading, writing = os.pipe()
        if not os.fork():
            os.close(reading)
            with os.fdopen(writing, "w") as to_engine:
                json.dump(_act_as_engine(engine), to_engine)
            # The end of an interpreter: whatever is registered for it runs.
            sys.exit(0)
        os.close(writing)
        engine.run(_STEPS)
        with os.fdopen(reading) as from_fork:
            forked = json.load(from_fork)
        _, code = os.wait()
        engine.run(_STEPS)
        engine.wait_for_a_plan()
        before = engine.link.status().plans_taken

        def goes_on() -> bool:
            engine.run(20)
            return engine.link.status().plans_taken > before

        eventually(goes_on, timeout_seconds=60.0, description="plans continue")
        status = engine.link.status()
        outcome = {
            "forked": forked,
            "fork_ended_with": code,
            "agent_is_the_same": status.agent_pid == agent,
            "agent_starts": status.agent_starts,
            "steps": engine.step,
            "sent": status.reports_sent,
            "lapses": status.lapses,
            "steered": status.source is Source.PLAN,
        }
        print(json.dumps(outcome), flush=True)
        sys.stdin.read()


def _act_as_engine(engine: LinkedEngine) -> dict[str, object]:
    link = engine.link
    reported = sum(
        send(link, step_report(step + 1, (1, 3), kv_tokens=2048)) for step in range(_FORKED_STEPS)
    )
    sources = {link.choose(4).source.value for _ in range(_FORKED_STEPS)}
    link.close()
    return {"reported": reported, "sources": sorted(sources)}


if __name__ == "__main__":
    main()
