"""Methods that no model of this package uses by default. No other room of the package imports this one."""
