"""Consumers: configuration, position, acknowledgements, redelivery, and delivery by pull and push."""
