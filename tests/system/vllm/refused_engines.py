"""Makes configurations of vLLM that the plugin refuses, and prints why: run in .venv-vllm.

Arguments: the folders of a target, of its EAGLE3 drafter, and of targets by name whose layers are
recurrent; the last ones are tried as another version of vLLM, too, whose number comes last.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    target, draft, recurrent, older = sys.argv[1:]
    from vllm.engine.arg_utils import EngineArgs

    from engine_shim.vllm import vllm_api

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
        "several at once": {
            "speculative_config": {
                "method": "draft_model", "model": target, "num_speculative_tokens": 7,
                "parallel_drafting": True,
            }
        },
        "steered": {},
    }  # fmt: skip
    for folder in sorted(Path(recurrent).iterdir()):
        drafted = {"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 7}
        changes = {"model": str(folder), "skip_tokenizer_init": True, "speculative_config": drafted}
        cases |= {folder.name: changes, f"{folder.name}, older": changes}
    installed = vllm_api.vllm_version
    outcomes: dict[str, str] = {}
    for name, changes in cases.items():
        arguments = {
            "model": target, "dtype": "float32", "enforce_eager": True, "max_num_seqs": 16,
            "max_model_len": 512, "speculative_config": speculation,
        } | changes  # fmt: skip
        vllm_api.vllm_version = (lambda: older) if name.endswith(", older") else installed
        try:
            config = EngineArgs(**arguments).create_engine_config()
        except Exception as error:  # noqa: BLE001  # what it is, the test looks at
            outcomes[name] = f"{type(error).__name__}: {error}"
        else:
            schedule = config.speculative_config.num_speculative_tokens_per_batch_size
            outcomes[name] = json.dumps(schedule)
    print("SAID", json.dumps(outcomes))


if __name__ == "__main__":
    main()
