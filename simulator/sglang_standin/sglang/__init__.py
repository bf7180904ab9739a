"""A stand-in for SGLang: its processes, log, endpoints and failures, without its work. See standin/settings.py."""
