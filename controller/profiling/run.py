"""`controller profile` from end to end: wait, reuse or refuse, measure, write, install."""

from dataclasses import dataclass, field
from pathlib import Path

from controller.core.clock import Clock, WallClock
from controller.core.cost.profile import Profile
from controller.core.engine_spec import EngineSpec
from controller.profiling.engine_http import EngineHttp
from controller.profiling.errors import InvalidPartialError, MeasurementError, ProfilingError
from controller.profiling.fit import fit_costs, flat_drafters, why_doubtful
from controller.profiling.load import LoadSource, Prompts
from controller.profiling.measurement import ProfileMeasurement
from controller.profiling.partial import (
    Partial,
    identities,
    load_partial,
    partial_path,
    save_partial,
    utc_now,
)
from controller.profiling.profile_file import (
    default_path,
    reusable_profile,
    uncovered,
    write_profile,
)
from controller.profiling.progress import Reporter
from controller.profiling.report import hardware_note
from controller.profiling.settings import ProfilingSettings
from controller.profiling.sidecar import ProfilingClient
from controller.profiling.waiting import Waiter


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """Names what to profile, and where the profile goes.

    output: None for a name made from the engine's identity.  engine_id: "" for the only one.
    force: measure although a file is there.  prompt_text: what prompts are cut from, "" for
    random words.  command: recorded in the profile.
    """

    engine_url: str
    sidecar: str
    output: Path | None = None
    engine_id: str = ""
    settings: ProfilingSettings = field(default_factory=ProfilingSettings)
    wait_seconds: float = 30.0
    force: bool = False
    prompt_text: str = ""
    api_key: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True)
class ProfileOutcome:
    """Holds the outcome.

    reused: the profile existed already.  seconds: of the measurement, else 0.
    """

    profile: Profile
    path: Path
    reused: bool
    engine_ids: tuple[str, ...]
    seconds: float


async def profile_engine(
    request: ProfileRequest, reporter: Reporter, clock: Clock | None = None
) -> ProfileOutcome:
    """Measures a running engine, or finds that it was measured, and installs the profile.

    What is measured so far is kept, whatever ends the measurement.  Raises ProfilingError.
    """
    clock = clock or WallClock()
    engine = EngineHttp(request.engine_url, request.api_key)
    async with ProfilingClient(request.sidecar) as sidecar:
        waiter = Waiter(request.wait_seconds, clock, reporter)
        await waiter.for_sidecar(sidecar)
        await waiter.for_engine(engine)
        spec = await waiter.for_introduction(sidecar, engine, request.engine_id)
        path = request.output or default_path(spec)
        profile = None if request.force else reusable_profile(path, spec)
        if profile is None and not request.force:
            profile = await _shelved_profile(sidecar, spec, path, reporter)
        elif profile is not None:
            _tell_reuse(f"{path} is this engine's profile", profile, spec, reporter)
        reused, begun_at = profile is not None, clock.now()
        if profile is None:
            _require_drafters(spec)
            run = _ProfileRun(request, spec, path, reporter, clock)
            profile = await run.measure(engine, sidecar)
        seconds = 0.0 if reused else clock.now() - begun_at
        engine_ids = await sidecar.install(profile)
    return ProfileOutcome(profile, path, reused, tuple(engine_ids), seconds)


def _require_drafters(spec: EngineSpec) -> None:
    """Raises MeasurementError for an engine whose profile would leave a drafter out."""
    loss = next((loss for loss in spec.lost if loss.drafter), None)
    if loss is not None:
        raise MeasurementError(
            f"engine {spec.engine_id!r} has lost {loss.what} ({loss.reason}), which cannot be "
            "measured: restart the engine, then measure again"
        )


class _ProfileRun:
    """One measurement and its files."""

    def __init__(
        self,
        request: ProfileRequest,
        spec: EngineSpec,
        path: Path,
        reporter: Reporter,
        clock: Clock,
    ) -> None:
        self._request = request
        self._spec = spec
        self._path = path
        self._partial_path = partial_path(path)
        self._reporter = reporter
        self._measurement = ProfileMeasurement(
            spec, request.settings, clock, reporter, self._save, utc_now()
        )

    async def measure(self, engine: EngineHttp, sidecar: ProfilingClient) -> Profile:
        """Measures the engine.  Raises ProfilingError; what is measured by then is kept."""
        self._resume()
        loads = LoadSource(
            engine,
            await engine.limits(),
            await Prompts.of_engine(engine, self._request.prompt_text),
            self._request.settings.new_tokens,
            self._spec.fingerprint.data_parallel_size,
        )
        try:
            async with sidecar.measuring(self._spec.engine_id) as stream:
                await self._measurement.run(stream, loads)
        except BaseException:
            if self._measurement.cells:
                self._measurement.save()
                self._reporter.note(
                    f"what was measured is kept in {self._partial_path}: run the same command "
                    "again to go on"
                )
            raise
        profile = self._fit()
        _write(self._path, profile)
        self._partial_path.unlink(missing_ok=True)
        return profile

    def _fit(self) -> Profile:
        fit = fit_costs(self._measurement.cells)
        if fit.context.measured:
            self._reporter.note(
                f"context term: {fit.context.seconds_per_kv_token * 1e6:.3f} "
                f"+- {fit.context.error * 1e6:.3f} us for each token"
            )
        else:
            self._reporter.note("context term: not measured, 0 is assumed")
        waking, wakings = self._measurement.wakings.seconds_per_token(
            fit.cells, fit.kv_tokens_per_sequence, fit.context.seconds_per_kv_token
        )
        if wakings:
            self._reporter.note(
                f"waking a drafter: {waking * 1e6:.0f} us for each token that it missed "
                f"({wakings} wakings)"
            )
        if doubt := why_doubtful(fit.cells):
            self._reporter.note(
                f"the profile is doubtful: {doubt}; something else kept the machine busy, so "
                "measure again (--force) when it is quiet"
            )
        for flat in flat_drafters(fit.cells, self._spec.drafters):
            self._reporter.note(f"the profile is doubtful: {flat}")
        return Profile(
            fingerprint=self._spec.fingerprint,
            drafters=identities(self._spec),
            kv_tokens_per_sequence=fit.kv_tokens_per_sequence,
            seconds_per_kv_token=fit.context.seconds_per_kv_token,
            cells=fit.cells,
            catch_up_seconds_per_token=waking,
            measured_at=utc_now().isoformat(),
            command=self._request.command,
            hardware=hardware_note(self._spec.fingerprint.device),
        )

    def _resume(self) -> None:
        path = self._partial_path
        try:
            partial = load_partial(path)
        except InvalidPartialError as error:
            self._reporter.note(f"starts again: the interrupted measurement is unreadable: {error}")
            return
        if partial is None:
            return
        if why := partial.why_unusable(self._spec, utc_now()):
            self._reporter.note(f"starts again: {path} is an interrupted measurement, but {why}")
            return
        done = self._measurement.resume(partial)
        steps = sum(len(cell.seconds) for cell in partial.cells)
        self._reporter.note(
            f"continues the measurement begun {partial.started_at:%Y-%m-%d %H:%M} UTC "
            f"({path}): {done} parts are done, {steps} steps are kept"
        )

    def _save(self, partial: Partial) -> None:
        try:
            save_partial(self._partial_path, partial)
        except OSError as error:
            raise ProfilingError(f"{self._partial_path}: {error.strerror}") from error


async def _shelved_profile(
    sidecar: ProfilingClient, spec: EngineSpec, path: Path, reporter: Reporter
) -> Profile | None:
    """Takes what another pod, or this one before, has measured, and writes it down here too."""
    profile = await sidecar.stored(spec)
    if profile is not None:
        _tell_reuse("the profile store has this engine's profile", profile, spec, reporter)
        _write(path, profile)
    return profile


def _write(path: Path, profile: Profile) -> None:
    try:
        write_profile(path, profile)
    except OSError as error:
        raise ProfilingError(f"{path}: {error.strerror}") from error


def _tell_reuse(what: str, profile: Profile, spec: EngineSpec, reporter: Reporter) -> None:
    reporter.note(
        f"{what}, measured {profile.measured_at or 'some time ago'}: it is used as it is (--force "
        "measures again)"
    )
    if missing := uncovered(profile, spec):
        reporter.note(f"it did not measure {', '.join(missing)}: costs there are extrapolated")
