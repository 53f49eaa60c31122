"""`python -m controller.cli`: the `controller` script where it is not on the path."""

from controller.cli import main

main()
