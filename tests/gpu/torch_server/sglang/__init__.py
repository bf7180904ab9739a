"""A small server with SGLang's real command line and titles, over real CUDA work (tests/gpu only)."""
