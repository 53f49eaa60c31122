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
from engine_shim.sglang.training.versions import (
    FOLDER_NAME,
    FolderTakenError,
    VersionError,
    Versions,
)
from trainer.adapt import AdaptSettings
from trainer.sd2_command import add_sd2_command, add_settings, run_sd2_command
from trainer.specforge import ExportError, export_signals, import_draft
from trainer.worker import NoEngineError, TrainedEngine, TrainingWorker

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
_EXIT_OK, _EXIT_ERROR, _EXIT_FOLDER_LOCKED = 0, 2, 3


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="speculation-trainer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    read_variable = os.environ.get
    attend_parser = commands.add_parser(
        "attend", help="train when the engine's sidecar asks for it"
    )
    attend_parser.add_argument("--sidecar", default=read_variable("SPECULATION_SIDECAR", ""))
    attend_parser.add_argument("--engine", default=read_variable("SPECULATION_ENGINE_ID", ""))
    attend_parser.add_argument("--device", default="cpu")
    attend_parser.add_argument("--threads", type=int, default=1)
    for name in ("ca", "token-file", "client-certificate", "client-key"):
        variable = f"SPECULATION_{name.replace('-', '_').upper()}"
        attend_parser.add_argument(f"--{name}", default=read_variable(variable, ""))
    add_settings(attend_parser, _DEFAULTS, _HELP)
    export_parser = commands.add_parser("export", help="signals and drafter for `specforge train`")
    export_parser.add_argument("out", type=Path, help="folder to write, new or empty")
    export_parser.add_argument(
        "--target", type=Path, required=True, help="folder of the target model"
    )
    export_parser.add_argument(
        "--version", type=int, default=0, help="version of the drafter to start from; 0: base"
    )
    add_sd2_command(commands)
    import_parser = commands.add_parser("import", help="an exported drafter as the next version")
    import_parser.add_argument(
        "draft", type=Path, help="folder with config.json and model.safetensors"
    )
    for command in (attend_parser, export_parser, import_parser):
        command.add_argument(
            "--signals",
            default=read_variable("SPECULATION_SIGNALS_FOLDER", ""),
            help="the engine's SPECULATION_SIGNALS_FOLDER",
        )
    return parser


def _attend(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    credentials = EngineCredentials(
        options.ca, options.client_certificate, options.client_key, options.token_file
    )
    trained_engine = TrainedEngine(
        options.sidecar, options.engine, Path(options.signals), credentials, options.device
    )
    settings = AdaptSettings(
        **{field.name: getattr(options, field.name) for field in fields(AdaptSettings)}
    )
    asyncio.run(TrainingWorker(trained_engine, settings).run())


def _run_command(options: argparse.Namespace) -> None:
    if options.command == "attend":
        _attend(options)
        return
    if options.command == "sd2":
        run_sd2_command(options)
        return
    signals = Path(options.signals)
    versions = Versions(signals / FOLDER_NAME)
    if options.command == "export":
        count = export_signals(signals, versions, options.version, options.target, options.out)
        train_command = (
            f"cd {shlex.quote(str(options.out))} && specforge train --config specforge.json"
        )
        _log.info("exported", samples=count, train=train_command)
    else:
        version = import_draft(options.draft, versions)
        _log.info("imported", version=version, folder=str(versions.folder))


def main() -> int:
    """Runs the command; returns 2 for an error, 3 when another trainer uses the folder."""
    parser = _build_parser()
    options = parser.parse_args()
    if options.command != "sd2" and not options.signals:
        parser.error("--signals or SPECULATION_SIGNALS_FOLDER must name the folder of signals")
    if options.command == "attend" and not options.sidecar:
        parser.error("--sidecar or SPECULATION_SIDECAR must name the sidecar's address")
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper("iso", utc=True),
            structlog.processors.JSONRenderer(),
        ]
    )
    try:
        _run_command(options)
    except FolderTakenError as error:
        _log.error("stopped", error=str(error))
        return _EXIT_FOLDER_LOCKED
    except (
        NoEngineError, ExportError, VersionError, LinkSettingsError, ValueError, OSError,
    ) as error:  # fmt: skip
        _log.error("stopped", error=str(error))
        return _EXIT_ERROR
    except grpc.aio.AioRpcError as error:
        _log.error("refused_by_the_sidecar", error=error.details(), code=error.code().name)
        return _EXIT_ERROR
    except KeyboardInterrupt:
        pass
    return _EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
