"""Runs engines of vLLM one after the other in one process: `python -m lab.vllm_engine.offline JOB`.

JOB is a JSON file: `{"engines": [{"name": ..., "arguments": {...}, "overlap": false}],
"phases": [[{"prompt": [ids], "new_tokens": n, "extra": {...}, "regex": ..., "stops": [ids]}]],
"output": path, "answered": path}`. The requests of a phase are answered at once. The output has for
each engine the tokens of every request, the seconds of every phase, and vLLM's own counters of
speculation and of tokens. Greedy decoding in float32; regex: a grammar, under which an answer may
end. overlap: with async scheduling, which vLLM by itself never uses on a processor. answered: if it
is named, each engine writes its part of the output to this file, and ends once the caller has
removed the file: the agent of an engine that ends sends no more reports.
"""

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# Everything in this process, so that its memory and its threads end with it.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

_DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 128 << 20,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
    "enable_prefix_caching": False,
}


_PLAN_SECONDS = 60.0


def set_overlap(enabled: bool) -> None:
    """Makes vLLM's CPU platform switch async scheduling on or off; by default it is off."""
    from vllm.platforms.cpu import CpuPlatform

    original = getattr(CpuPlatform, "lab_original", CpuPlatform.check_and_update_config)

    def check_and_update_config(config: Any) -> None:
        original(config)
        config.scheduler_config.async_scheduling = enabled

    CpuPlatform.lab_original = original
    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)


def wait_for_plan(steering: Any) -> None:
    """Waits until the sidecar's first plan has arrived."""
    deadline = time.monotonic() + _PLAN_SECONDS
    while not steering.status()["plans_taken"] and time.monotonic() < deadline:
        steering.poll()
        time.sleep(0.02)


def wait_for_reader(answer_file: Path, results: dict[str, Any]) -> None:
    """Writes a file, and waits until the caller has removed it."""
    part = answer_file.with_suffix(".part")
    part.write_text(json.dumps(results))
    part.rename(answer_file)
    while answer_file.exists():
        time.sleep(0.02)


def run(
    engine: dict[str, Any], phases: list[list[dict[str, Any]]], answer_path: str
) -> dict[str, Any]:
    """Returns one engine's answers and counters.  answer_path: a path, or "" for none."""
    from vllm import LLM

    set_overlap(engine.get("overlap", False))
    llm = LLM(**(_DEFAULTS | engine["arguments"]))
    try:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        steering = getattr(scheduler, "speculation", None)
        if steering is not None:
            wait_for_plan(steering)
        tokens: list[list[int]] = []
        seconds: list[float] = []
        for requests in phases:
            start_time = time.monotonic()
            tokens += answer(llm, requests)
            seconds.append(time.monotonic() - start_time)
        results = {
            "tokens": tokens,
            "seconds": seconds,
            "metrics": {
                metric.name: getattr(metric, "value", None)
                for metric in llm.get_metrics()
                if "spec_decode" in metric.name or "generation_tokens" in metric.name
            },
            "scheduler": type(scheduler).__name__,
            "status": None if steering is None else steering.status(),
        }
        if answer_path:
            wait_for_reader(Path(answer_path), results)
        return results
    finally:
        # Ends the scheduler, and with it the plugin's agent.
        llm.llm_engine.engine_core.shutdown()


def answer(llm: Any, requests: list[dict[str, Any]]) -> list[list[int]]:
    """Returns the tokens of each request."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    def grammar_of(request: dict[str, Any]) -> Any:
        regex = request.get("regex")
        return None if regex is None else StructuredOutputsParams(regex=regex)

    answers = llm.generate(
        [{"prompt_token_ids": request["prompt"]} for request in requests],
        [
            SamplingParams(
                temperature=0,
                max_tokens=request["new_tokens"],
                ignore_eos="regex" not in request,
                stop_token_ids=request.get("stops"),
                structured_outputs=grammar_of(request),
                extra_args=request.get("extra"),
            )
            for request in requests
        ],
        use_tqdm=False,
    )
    return [list(request_output.outputs[0].token_ids) for request_output in answers]


def main() -> None:
    """Runs the job; the output has the error of an engine that fails."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    job = json.loads(Path(sys.argv[1]).read_text())
    results: dict[str, Any] = {}
    for engine in job["engines"]:
        try:
            results[engine["name"]] = run(engine, job["phases"], job.get("answered", ""))
        except Exception as error:  # noqa: BLE001  # for the caller to judge
            traceback.print_exc()
            results[engine["name"]] = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        cleanup_dist_env_and_memory()
        Path(job["output"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
