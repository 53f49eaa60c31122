"""The controller of one engine: it decides, explains its decisions and audits its predictions."""
