"""Makes the stand-in importable here, as it is in a process started with `cpu_engine_env`.

Only while it is imported: the folder also holds a torchvision stub and entry points, which the
other tests of the session shall not see.
"""

import sys
from collections.abc import Iterator

import pytest
import torch

from lab.cpu_engine.environment import STANDIN_FOLDER

sys.path.insert(0, str(STANDIN_FOLDER))
try:
    import sgl_kernel  # noqa: F401
finally:
    sys.path.remove(str(STANDIN_FOLDER))


@pytest.fixture(autouse=True)
def _one_thread_and_no_gradients() -> Iterator[None]:
    """As in the engine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)
