"""Serving: many prompts at once, their keys and values in pages, as requests come and go."""
