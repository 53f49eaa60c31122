"""Makes configurations of vLLM that the plugin refuses, and prints why: run in .venv-vllm.

Arguments: the folders of a target and of its EAGLE3 drafter.
"""

import json
import sys
from typing import Any


def main() -> None:
    target, draft = sys.argv[1:3]
    from vllm.engine.arg_utils import EngineArgs

    speculation = {"method": "eagle3", "model": draft, "num_speculative_tokens": 7}
    batches = [(1, 8, 3)]
    cases: dict[str, dict[str, Any]] = {
        "plain": {"speculative_config": None},
        "data parallel": {"data_parallel_size": 2},
        "suffix": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 7}},
        "shorter": {"speculative_config": {**speculation, "num_speculative_tokens": 5}},
        "own schedule": {
            "speculative_config": {**speculation, "num_speculative_tokens_per_batch_size": batches}
        },
        "few sequences": {"max_num_seqs": 2},
        "steered": {},
    }
    said: dict[str, str] = {}
    for name, changes in cases.items():
        arguments = {
            "model": target, "dtype": "float32", "enforce_eager": True, "max_num_seqs": 16,
            "max_model_len": 512, "speculative_config": speculation,
        } | changes  # fmt: skip
        try:
            config = EngineArgs(**arguments).create_engine_config()
        except Exception as error:  # noqa: BLE001  # what it is, the test looks at
            said[name] = f"{type(error).__name__}: {error}"
        else:
            schedule = config.speculative_config.num_speculative_tokens_per_batch_size
            said[name] = json.dumps(schedule)
    print("SAID", json.dumps(said))


if __name__ == "__main__":
    main()
