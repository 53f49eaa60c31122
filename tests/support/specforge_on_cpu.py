"""Run with SpecForge's package on the path: its commands, one after the other, without a GPU.

Its trainer chooses gloo where there is no GPU.  Two things of its EAGLE3 loss remain: a Triton
kernel, which Triton's interpreter runs (TRITON_INTERPRET=1) at some milliseconds a row, and
compiled functions (TORCH_COMPILE_DISABLE=1).  Without the interpreter the loss is the package's own
reference implementation, the function from which the kernel was made.
"""

import json
import os
import sys

from specforge.algorithms.eagle3 import model
from specforge.cli import main
from specforge.core import loss


class _ReferenceLoss:
    apply = staticmethod(loss._compute_loss)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        model.LogSoftmaxLoss = _ReferenceLoss
    for folder, words in json.loads(sys.argv[1]):
        os.chdir(folder)
        code = main(words)
        if code:
            sys.exit(code)
