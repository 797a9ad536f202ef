"""Tiny models, references and settings of every test, which several tests share."""
