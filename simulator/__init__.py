"""A simulated GPU host: an NVML double, an nvidia-smi double and a stand-in for SGLang."""
