"""Names the user who runs this process."""

import getpass
import os


def user_name() -> str:
    """The name of the user; the number where nobody has named it, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"
