"""Atomic batches, fast batches, and what a gap does to a fast batch."""
