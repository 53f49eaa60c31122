"""Imports, for a fork server, what a server of SGLang on a CPU imports before it starts.

Or what one on an emulated GPU imports, in a process with its environment.
"""

import os
import warnings

from lab.cpu_engine.environment import EMULATION, enter_cpu_environment, enter_emulated_cuda

if EMULATION in os.environ:
    enter_emulated_cuda()
else:
    enter_cpu_environment()

with warnings.catch_warnings():
    # They are about features that a CPU lacks.
    warnings.simplefilter("ignore")
    import grpc  # noqa: F401
    import setproctitle
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401

# Finds the title's place in memory, which can be done only before the environment changes.
setproctitle.getproctitle()
