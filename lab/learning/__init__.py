"""The papers' effects on small real models: `make lab`."""
