"""Names what the engines of a check run on."""

from enum import Enum

from lab.harness.measured import gpus


class Device(Enum):
    """A GPU, SGLang's CUDA paths on a processor, or SGLang's CPU paths."""

    GPU = "GPU"
    EMULATED = "emulated CUDA"
    CPU = "CPU"

    @property
    def server_module(self) -> str:
        """The module that serves: SGLang's own, or a stand-in with the same options."""
        return {
            Device.GPU: "sglang.launch_server",
            Device.EMULATED: "lab.cpu_engine.serve_emulated_cuda",
            Device.CPU: "lab.cpu_engine.serve",
        }[self]

    @property
    def takes_cuda_options(self) -> bool:
        """Whether engines are given the options of a GPU: memory, backends, graphs."""
        return self is not Device.CPU

    @property
    def overlaps(self) -> bool:
        """Whether SGLang has the overlap schedule there."""
        return self is not Device.CPU

    def names(self) -> list[str]:
        """Lists the devices, as a result file has them; empty without a GPU."""
        return gpus() if self is Device.GPU else []
