"""The reset on a real GPU (README.md)."""
