"""Pure decisions: frozen values in, frozen values out.

No I/O, no gRPC, no clock but the one passed in, no randomness: the same reports at the same
times give the same plans, so any decision can be replayed.
"""

from controller.core.engine_controller import EngineController
from controller.core.profile import Profile, ProfileCell
from controller.core.settings import PlannerSettings

__all__ = ["EngineController", "PlannerSettings", "Profile", "ProfileCell"]
