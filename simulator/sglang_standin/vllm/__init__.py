"""A stand-in for vLLM's processes: command line, titles and GPU memory; a port that says healthy, nothing else."""
