"""A stand-in for SGLang: its processes, log lines, endpoints and failures, without its work. See standin/settings.py."""
