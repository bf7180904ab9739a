"""The parts of the real-GPU session that `tests/gpu/run.py` drives."""
