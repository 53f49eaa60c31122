"""The command `speculation-trainer` trains drafters, and exports them to SpecForge.

All subcommands but `sd2` need the folder of the engine's signals.  None of them needs SGLang.
"""

import argparse
import asyncio
import os
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import grpc.aio
import structlog
import torch

from engine_shim.link.credentials import EngineCredentials
from engine_shim.link.errors import LinkSettingsError
from engine_shim.sglang.training.versions import FOLDER, FolderTakenError, VersionError, Versions
from trainer.adapt import AdaptSettings
from trainer.sd2_command import add_sd2_command, add_settings, run_sd2_command
from trainer.specforge import ExportError, export_signals, import_draft
from trainer.worker import NoEngineError, TrainingWorker, WorkerTarget

_log = structlog.get_logger(__name__)

_DEFAULTS = AdaptSettings()
_HELP = {
    "passes": "passes over the signals of a round",
    "batch": "signals in an optimiser step",
    "depth": "drafts that are unrolled from a position",
    "learning_rate": "learning rate of AdamW",
    "held_out": "one of this many signals is used for evaluation and not for training",
    "seed": "seed of the order of the signals",
    "teach_prompts": "also train on the positions of prompts, with the next token as label",
}
_DONE, _CANNOT, _TAKEN = 0, 2, 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="speculation-trainer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    environment = os.environ.get
    attend = commands.add_parser("attend", help="train when the engine's sidecar asks for it")
    attend.add_argument("--sidecar", default=environment("SPECULATION_SIDECAR", ""))
    attend.add_argument("--engine", default=environment("SPECULATION_ENGINE_ID", ""))
    attend.add_argument("--device", default="cpu")
    attend.add_argument("--threads", type=int, default=1)
    for name in ("ca", "token-file", "client-certificate", "client-key"):
        variable = f"SPECULATION_{name.replace('-', '_').upper()}"
        attend.add_argument(f"--{name}", default=environment(variable, ""))
    add_settings(attend, _DEFAULTS, _HELP)
    export = commands.add_parser("export", help="signals and drafter for `specforge train`")
    export.add_argument("out", type=Path, help="folder to write, new or empty")
    export.add_argument("--target", type=Path, required=True, help="folder of the target model")
    export.add_argument(
        "--version", type=int, default=0, help="version of the drafter to start from; 0: base"
    )
    add_sd2_command(commands)
    back = commands.add_parser("import", help="an exported drafter as the next version")
    back.add_argument("draft", type=Path, help="folder with config.json and model.safetensors")
    for command in (attend, export, back):
        command.add_argument(
            "--signals",
            default=environment("SPECULATION_SIGNALS_FOLDER", ""),
            help="the engine's SPECULATION_SIGNALS_FOLDER",
        )
    return parser


def _attend(asked: argparse.Namespace) -> None:
    torch.set_num_threads(asked.threads)
    credentials = EngineCredentials(
        asked.ca, asked.client_certificate, asked.client_key, asked.token_file
    )
    where = WorkerTarget(
        asked.sidecar, asked.engine, Path(asked.signals), credentials, asked.device
    )
    settings = AdaptSettings(**{f.name: getattr(asked, f.name) for f in fields(AdaptSettings)})
    asyncio.run(TrainingWorker(where, settings).run())


def _run(asked: argparse.Namespace) -> None:
    if asked.command == "attend":
        _attend(asked)
        return
    if asked.command == "sd2":
        run_sd2_command(asked)
        return
    signals = Path(asked.signals)
    versions = Versions(signals / FOLDER)
    if asked.command == "export":
        count = export_signals(signals, versions, asked.version, asked.target, asked.out)
        train = f"cd {shlex.quote(str(asked.out))} && specforge train --config specforge.json"
        _log.info("exported", samples=count, train=train)
    else:
        version = import_draft(asked.draft, versions)
        _log.info("imported", version=version, folder=str(versions.folder))


def main() -> int:
    """Runs the command; returns 2 for an error, 3 when another trainer uses the folder."""
    parser = _parser()
    asked = parser.parse_args()
    if asked.command != "sd2" and not asked.signals:
        parser.error("--signals or SPECULATION_SIGNALS_FOLDER must name the folder of signals")
    if asked.command == "attend" and not asked.sidecar:
        parser.error("--sidecar or SPECULATION_SIDECAR must name the sidecar's address")
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper("iso", utc=True),
            structlog.processors.JSONRenderer(),
        ]
    )
    try:
        _run(asked)
    except FolderTakenError as error:
        _log.error("stopped", error=str(error))
        return _TAKEN
    except (
        NoEngineError, ExportError, VersionError, LinkSettingsError, ValueError, OSError,
    ) as error:  # fmt: skip
        _log.error("stopped", error=str(error))
        return _CANNOT
    except grpc.aio.AioRpcError as error:
        _log.error("refused_by_the_sidecar", error=error.details(), code=error.code().name)
        return _CANNOT
    except KeyboardInterrupt:
        pass
    return _DONE


if __name__ == "__main__":
    sys.exit(main())
