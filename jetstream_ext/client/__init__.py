"""The asyncio shell: thin classes that carry bytes between nats-py's connection and the machines in `protocol`."""
