"""Settings of the sidecar: flags over the environment over one YAML file over defaults."""
