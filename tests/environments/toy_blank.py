"""A module that is no environment: it has no `load_environment`."""
