"""The commands that `controller` has where the simulator is installed.

They import what they need when they run, so that `--help` is instant.
"""

from collections.abc import Callable, Mapping

from simulator.commands.advise import advise
from simulator.commands.convert import convert
from simulator.commands.simulate import simulate

# By their names on the command line.
COMMANDS: Mapping[str, Callable[..., None]] = {
    "simulate": simulate,
    "convert": convert,
    "advise": advise,
}
