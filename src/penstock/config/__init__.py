"""The configuration file: models, validation, secrets."""
