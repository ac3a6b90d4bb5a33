"""Publishing: the checks of a published message, single messages, atomic batches and fast batches."""
