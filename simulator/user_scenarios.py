"""Makes scenarios from the files and names that a user gives: acceptance, costs, arrivals."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from controller.core.step_report import MAX_STEP_SECONDS
from simulator import published
from simulator.curves import parse_acceptance
from simulator.engine import EngineOptions
from simulator.errors import InvalidInputError
from simulator.scenarios.cost import ProfileSection
from simulator.scenarios.fields import FieldLocations
from simulator.scenarios.scenario_file import Scenario
from simulator.sources import ClosedSource, OpenSource, PhaseSpec, read_arrivals
from simulator.step_costs import read_profile
from simulator.surface import DRAFTER_KINDS_BY_NAME, CostSurface, csv_surface, profile_surface
from simulator.workload import AcceptanceSource

_DEFAULT_DRAFTER = "mtp"
# Oracle segments of an arrival file.
_ORACLE_SEGMENTS = 40


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """The inputs of a simulation that a user gives.

    acceptance: see `parse_acceptance`.  cost: PATH.csv, DRAFTER=PATH.csv (several), PATH.json (a
    profile) or the name of a published surface.  drafter: the drafter of a cost table without name.
    concurrency: batch sizes of the closed loop (empty: several up to the largest).  profile_error:
    factor on the drafting cells of the controller's profile; None: it has no profile.
    profile_noise: standard deviation of the logarithm of each of its cells.
    catch_up_seconds_per_token, catch_up_pass_seconds: a drafter's cost of catching up; None: the
    value of the costs, or one derived from a table.
    """

    acceptance: str
    cost: tuple[str, ...]
    arrivals: Path | None = None
    drafter: str = ""
    concurrency: tuple[int, ...] = ()
    tokens_per_sequence: int = 5000
    max_batch_size: int | None = None
    limit: int | None = None
    speed: float = 1.0
    profile_error: float | None = 1.0
    profile_noise: float = 0.01
    catch_up_seconds_per_token: float | None = None
    catch_up_pass_seconds: float | None = None
    seconds_per_kv_token: float = 0.0
    seeds: int = 3
    options: EngineOptions = field(default_factory=EngineOptions)


def make_scenarios(request: SimulationRequest) -> list[Scenario]:
    """Makes the scenarios of one run on the user's files.  Raises InvalidInputError."""
    if request.tokens_per_sequence < 1 or request.seeds < 1:
        raise InvalidInputError("--tokens, --seeds", 0, "at least 1 is needed")
    surface, acceptance = _read_inputs(request)
    surface = _with_prices(surface, request)
    error = request.profile_error
    if error is not None and not 0.1 <= error <= 10:
        raise InvalidInputError("--profile-error", 0, f"factor {error} must be in [0.1, 10]")
    if not 0 <= request.profile_noise < 2:
        raise InvalidInputError("--profile-noise", 0, f"{request.profile_noise} must be in [0, 2)")
    profile_text = {None: "no profile", 1.0: f"costs measured to {request.profile_noise:.1%}"}.get(
        error, f"drafting costs off by a factor of {error}"
    )
    limit = surface.max_batch_size
    profile = None
    if error is not None:
        section = ProfileSection(drafting=error, noise=request.profile_noise)
        profile = section.make_profile(surface, FieldLocations("--profile-error"))

    def scenario(
        name: str, description: str, workload: ClosedSource | OpenSource, *, shifting: bool
    ) -> Scenario:
        full_description = (
            f"{description}; {request.acceptance} on {', '.join(request.cost)}; {profile_text}"
        )
        return Scenario(
            name, "given", full_description, surface, workload, profile, limit, shifting,
            request.seeds,
            request.options,
        )  # fmt: skip

    if request.arrivals is not None:
        arrivals = read_arrivals(request.arrivals, request.limit, request.speed)
        seconds = arrivals.arrival_seconds
        last_arrival_seconds = float(seconds[-1])
        source = OpenSource(
            acceptance, seconds, arrivals.context_tokens, arrivals.output_tokens, limit,
            max(1.0, last_arrival_seconds / _ORACLE_SEGMENTS),
        )  # fmt: skip
        text = (
            f"{len(seconds)} requests over {last_arrival_seconds:.0f} s (speed {request.speed:g})"
        )
        return [scenario(f"arrivals/{request.arrivals.stem}", text, source, shifting=True)]

    sizes = request.concurrency or tuple(b for b in (1, 4, 16, 64, 256, 1024) if b <= limit)
    for b in sizes:
        if not 1 <= b <= limit:
            raise InvalidInputError("--concurrency", 0, f"{b} must be in [1, {limit}]")
    # Small batches are noisy: give them more tokens.
    tokens = {b: b * request.tokens_per_sequence * (3 if b < 4 else 1) for b in sizes}
    phase = {b: PhaseSpec(f"x{b}", acceptance, b, tokens[b]) for b in sizes}
    made_scenarios = [
        scenario(f"closed/B={b}", f"{b} sequences at a time", ClosedSource((phase[b],), None, None),
                 shifting=False)
        for b in sizes
    ]  # fmt: skip
    if len(sizes) > 1:
        concurrency_schedule = (*sizes, *sizes[-2::-1])
        moving = ClosedSource(tuple(phase[b] for b in concurrency_schedule), None, None)
        text = f"concurrency {' '.join(map(str, concurrency_schedule))}"
        made_scenarios.append(scenario("closed/moving", text, moving, shifting=True))
    return made_scenarios


def _with_prices(surface: CostSurface, request: SimulationRequest) -> CostSurface:
    catch_up_token, catch_up_pass = (
        request.catch_up_seconds_per_token,
        request.catch_up_pass_seconds,
    )
    for value in (catch_up_token, catch_up_pass):
        if value is not None and not 0 <= value <= MAX_STEP_SECONDS:
            fault = f"{value} is out of range: seconds, 0 to {MAX_STEP_SECONDS:g}"
            raise InvalidInputError("--catch-up-seconds, --catch-up-pass-seconds", 0, fault)
    return replace(
        surface,
        catch_up_seconds_per_token=surface.catch_up_seconds_per_token
        if catch_up_token is None
        else catch_up_token,
        catch_up_pass_seconds=surface.catch_up_pass_seconds
        if catch_up_pass is None
        else catch_up_pass,
    )


def _read_inputs(request: SimulationRequest) -> tuple[CostSurface, AcceptanceSource]:
    """Reads costs and acceptance that name the same drafters."""
    if not request.cost:
        raise InvalidInputError(
            "--cost", 0, f"a table or one of {', '.join(published.surface_names())} is needed"
        )
    cost_name = request.cost[0]
    size = request.max_batch_size
    if len(request.cost) == 1 and cost_name in published.surface_names():
        surface = published.published_surface(
            cost_name, max_batch_size=size, extrapolate=size is not None
        )
    elif len(request.cost) == 1 and cost_name.lower().endswith(".json"):
        surface = profile_surface(
            Path(cost_name).name, read_profile(cost_name), DRAFTER_KINDS_BY_NAME, size
        )
    else:
        return _read_tables(request)
    acceptance = parse_acceptance(request.acceptance, [d.name for d in surface.drafters])
    return _match_drafters(surface, acceptance, request.drafter), acceptance


def _read_tables(request: SimulationRequest) -> tuple[CostSurface, AcceptanceSource]:
    pairs = [_split_drafter(text) for text in request.cost]
    for _, path in pairs:
        if not Path(path).exists():
            raise InvalidInputError(
                "--cost", 0,
                f"{path!r} is neither a file nor a published cost table; the published tables are "
                f"{', '.join(published.surface_names())}",
            )  # fmt: skip
    names = [name for name, _ in pairs if name]
    acceptance = parse_acceptance(
        request.acceptance, names or [request.drafter or _DEFAULT_DRAFTER]
    )
    if not names and len(pairs) == 1:
        name = request.drafter or acceptance.drafters[0]
        pairs = [(name, pairs[0][1])]
    elif len(names) < len(pairs):
        raise InvalidInputError(
            pairs[0][1], 0, "several tables need their drafters: --cost DRAFTER=PATH"
        )
    surface = csv_surface(
        dict(pairs),
        DRAFTER_KINDS_BY_NAME,
        request.max_batch_size,
        seconds_per_kv_token=request.seconds_per_kv_token,
    )
    return _match_drafters(surface, acceptance, request.drafter), acceptance


def _split_drafter(text: str) -> tuple[str, str]:
    name, sign, path = text.partition("=")
    return (name, path) if sign and "/" not in name else ("", text)


def _match_drafters(
    surface: CostSurface, acceptance: AcceptanceSource, selected_drafter: str
) -> CostSurface:
    """Keeps the drafters whose acceptance is known; a single drafter takes that name."""
    if selected_drafter and selected_drafter not in acceptance.drafters:
        raise InvalidInputError(
            "--drafter",
            0,
            f"{selected_drafter!r} has no acceptance; there are {list(acceptance.drafters)}",
        )
    drafter_names = (selected_drafter,) if selected_drafter else acceptance.drafters
    common = [d.name for d in surface.drafters if d.name in drafter_names]
    if common:
        return surface.with_drafters(*common)
    if len(surface.drafters) == 1:
        return replace(surface, drafters=(replace(surface.drafters[0], name=drafter_names[0]),))
    raise InvalidInputError(
        surface.name, 0,
        f"costs are of {[d.name for d in surface.drafters]}, acceptance of {list(drafter_names)}: "
        "name one with --drafter",
    )  # fmt: skip
