"""SGLang's CUDA code paths on a CPU: an emulated device that says so in its name.

    torch      torch.cuda, tensors on "cuda", streams, events, graphs, and what waits for a device
    library    the operators of sgl_kernel's compiled library, in torch
    jit        the kernels that SGLang compiles itself, in torch
    attention  SGLang's Triton attention kernels in torch
    packages   what stands for packages that are not installed
    patches    puts them in place in torch and in SGLang

EMULATED_CUDA=1 switches it on, in every process that finds this folder's parent on its path.
Graphs are those of `cpu_graphs`.  Triton's kernels run in Triton's interpreter.
"""
