"""Faults: the rules of a fault plan, and the injector that applies them."""
