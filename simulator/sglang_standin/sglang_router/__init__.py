"""A stand-in for SGLang's router, which is no server: it holds no GPU."""
