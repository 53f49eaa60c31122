"""CUDA graphs on a CPU: SGLang's own graph runners capture and replay operators on fixed memory.

    recorder         records the operators of a capture, and refuses what would wait for a device
    graph            replays them on the memory of the capture; takes the place of torch's graphs
    attention        gives SGLang's CPU attention backend metadata in buffers that never move
    patches          has SGLang believe that its CPU has graphs and can overlap its schedule
    late             has copies between host and device happen later than they are asked for
    synchronisations lists the lines of the plugin that would wait for a device

CPU_ENGINE_GRAPHS=1 switches graphs on.  CPU_ENGINE_OVERLAP=1 keeps the overlap schedule.
CPU_ENGINE_HOST_LENGTHS=0 withholds context lengths from the host, as FlashAttention does.
CPU_ENGINE_SYNCHRONISATIONS names the file for the list.  CPU_ENGINE_LATE_COPIES=3 has an event of
the plugin's side streams occur when it is asked for the third time.
"""
