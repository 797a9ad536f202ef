"""An HTTP server on an engine, with OpenAI's API; `moe-jax serve` starts it."""
