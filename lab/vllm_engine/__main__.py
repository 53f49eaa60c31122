"""Shows vLLM steered, in two minutes: `make demo-vllm`.

The same requests are answered by three engines on this machine's processor: without speculation,
with one static draft length, and steered by a real `controller serve`.  No step is paced, so the
figures are those of small models on a processor; every token is compared.
"""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab.cpu_engine.engine_command import MODELS
from lab.cpu_engine.models.prompts import held_out_prompts
from lab.harness.engine_environment import steered_by
from lab.harness.engines import Workplace, launch_sidecar, wait_serving
from lab.harness.sidecar import SidecarHandle
from lab.vllm_engine.convert import convert_eagle3
from lab.vllm_engine.environment import PYTHON, has_environment, vllm_env

STATIC = 3
LONGEST = 7
ENGINE_ID = "vllm-demo"
NEW_TOKENS = 96
# What is generated, and how many sequences at once.  Twice, so that there is something to learn.
PHASES = (("json", 1), ("json", 8), ("prose", 8), ("csv", 4), ("prose", 2)) * 2


def main() -> int:
    """Returns the exit code: 1 if a token differs, 2 without vLLM."""
    if not has_environment():
        print("there is no .venv-vllm: make setup-vllm makes it")
        return 2
    with TemporaryDirectory(prefix="vllm-demo-") as scratch:
        results = _play(Path(scratch))
    _print(results)
    exact = all(
        engine_result["tokens"] == results["off"]["tokens"] for engine_result in results.values()
    )
    print("every token is plain decoding's" if exact else "TOKENS DIFFER")
    return 0 if exact else 1


def _play(scratch: Path) -> dict[str, dict[str, Any]]:
    draft = scratch / "draft"
    convert_eagle3(MODELS / "draft-mixed", draft)
    drafting = {"method": "eagle3", "model": str(draft)}
    results = _run(scratch, "off", None, {})
    results |= _run(scratch, "static", drafting | {"num_speculative_tokens": STATIC}, {})
    place = Workplace(scratch, scratch)
    with ExitStack() as stack:
        handle = stack.enter_context(SidecarHandle(place.address, ENGINE_ID))
        wait_serving(stack.enter_context(launch_sidecar(place)), handle)
        variables = steered_by(place.address, ENGINE_ID)
        steered = drafting | {"num_speculative_tokens": LONGEST}
        results |= _run(scratch, "steered", steered, variables)
    return results


def _run(
    scratch: Path, name: str, speculation: dict[str, Any] | None, variables: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Runs one engine in a process of its own."""
    print(f"{name}: starting vLLM ...", flush=True)
    arguments: dict[str, Any] = {"model": str(MODELS / "target")}
    if speculation is not None:
        arguments["speculative_config"] = speculation
    warm_up = [{"prompt": held_out_prompts("code", 1, 32, seed=9)[0], "new_tokens": 16}]
    job: dict[str, Any] = {
        "engines": [{"name": name, "arguments": arguments}],
        "phases": [warm_up, *map(_requests, range(len(PHASES)))],
        "output": str(scratch / f"{name}.json"),
    }
    job_file = scratch / f"{name}-job.json"
    job_file.write_text(json.dumps(job))
    log = scratch / f"{name}.log"
    with log.open("wb") as output:
        code = subprocess.run(
            [str(PYTHON), "-m", "lab.vllm_engine.offline", str(job_file)],
            env=vllm_env() | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    result = Path(job["output"])
    results = json.loads(result.read_text()) if result.exists() else {}
    if code or "error" in results.get(name, {"error": ""}):
        sys.exit(f"{name}: vLLM failed\n{log.read_text(errors='replace')[-3000:]}")
    return dict(results)


def _requests(phase: int) -> list[dict[str, Any]]:
    domain, size = PHASES[phase]
    return [
        {"prompt": prompt, "new_tokens": NEW_TOKENS}
        for prompt in held_out_prompts(domain, size, 64, seed=phase)
    ]


def _print(results: dict[str, dict[str, Any]]) -> None:
    names = {"off": "off", "static": f"static {STATIC}", "steered": "steered"}
    print("\ntokens a second      " + "".join(f"{name:>12}" for name in names.values()))
    for phase, (domain, size) in enumerate(PHASES):
        rates = [size * NEW_TOKENS / results[name]["seconds"][phase + 1] for name in names]
        print(f"{domain:>6}, {size} at once   " + "".join(f"{rate:12.0f}" for rate in rates))
    tokens = NEW_TOKENS * sum(size for _, size in PHASES)
    total_rates = [tokens / sum(results[name]["seconds"][1:]) for name in names]
    print("           all       " + "".join(f"{rate:12.0f}" for rate in total_rates))
    status = results["steered"]["status"]
    print(
        f"\nthe sidecar: {status['plans_taken']} plans taken, {status['reports_sent']} steps "
        f"reported, {status['reports_dropped']} dropped"
    )


if __name__ == "__main__":
    sys.exit(main())
