"""Real SGLang on a CPU, deployed and reset by the playbooks: see README.md."""
