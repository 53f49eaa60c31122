"""Makes torch take the emulated device for a GPU.

    places     which memory lies on the device, and how much of it is taken
    functions  sends every call of torch to the CPU, and keeps where its results belong
    waits      names the calls that wait for the device
    streams    streams, events, and graphs
    runtime    takes the place of `torch.cuda`

A tool that looks for the innermost frame outside torch skips folders of that name, this one too.
"""
