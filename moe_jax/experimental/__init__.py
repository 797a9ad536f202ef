"""Published methods that no model of ours uses by default. Nothing else in the package imports this room."""
