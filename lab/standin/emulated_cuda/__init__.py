"""SGLang's CUDA code paths on a CPU, over a device whose name says that it is emulated.

    torch      torch.cuda, tensors on "cuda", streams, events, graphs, and what waits for a device
    library    the operators of sgl_kernel's compiled library, in torch
    jit        the kernels that SGLang compiles itself, in torch
    attention, triton_kernels
               SGLang's Triton kernels: those of every step in torch, the others interpreted
    patches    puts them in place in torch and in SGLang, and what stands for packages that are not
               installed

EMULATED_CUDA=1 switches it on, in every process that finds this folder's parent on its path.
EMULATED_CUDA_TRITON=interpreted has every Triton kernel run in Triton's interpreter, which takes
minutes for what otherwise takes seconds.  EMULATED_CUDA_MEMORY_MIB says how much memory the device
has, an H100's by default.  Graphs are those of `cpu_graphs`.
"""
