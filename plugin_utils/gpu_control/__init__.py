"""What runs on the control node besides Ansible itself: the lean transport, the run records, the table."""
