"""Real processes that share a host with a server and must survive its reset."""
