"""`jaxllm bench train`: training and serving on one accelerator: attention, speed, memory, resuming, levels.

Each check runs in a process of its own, so that each has the whole device. `steps` measures training, and
`resuming` kills runs and compares what resumes, and measures serving by its commands. It needs neither a
network nor data. `projection` says what a preparation costs at the measured rates.
"""
