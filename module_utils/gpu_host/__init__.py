"""The logic of resets and reports on GPU hosts, in plain Python, one file a concern, each usable alone."""
