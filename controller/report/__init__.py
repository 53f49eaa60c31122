"""Pages and figures that commands write for people."""
