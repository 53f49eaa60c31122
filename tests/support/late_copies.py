"""The emulation of late copies (lab/standin/cpu_graphs/late.py), in a test's process.

The folder of the stand-in is importable only meanwhile: it also holds stubs, which the other tests
of the session shall not see.
"""

import sys

from lab.cpu_engine.environment import STANDIN_FOLDER

sys.path.insert(0, str(STANDIN_FOLDER))
try:
    from cpu_graphs.late import install
finally:
    sys.path.remove(str(STANDIN_FOLDER))

__all__ = ["install"]
