"""Web pages of a run and of a server, each one HTML document that loads nothing from elsewhere."""
