"""Implements `controller profile`: wait, reuse or refuse, measure, write, install."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from controller.core.clock import Clock, WallClock
from controller.core.cost.profile import Profile
from controller.core.engine_spec import EngineSpec
from controller.profiling.engine_http import EngineHttp
from controller.profiling.errors import (
    EngineNotIntroducedError,
    EngineUnreachableError,
    InvalidPartialError,
    MeasurementError,
    ProfilingError,
    SidecarUnreachableError,
)
from controller.profiling.fit import doubt_reason, fit_costs, flat_drafters
from controller.profiling.load import LoadSource, Prompts
from controller.profiling.measurement import ProfileMeasurement
from controller.profiling.profile_file import (
    PartialMeasurement,
    default_path,
    drafter_identities,
    load_partial,
    partial_path,
    reusable_profile,
    save_partial,
    uncovered_choices,
    utc_now,
    write_profile,
)
from controller.profiling.progress import Reporter
from controller.profiling.report import hardware_note
from controller.profiling.schedule import ProfilingSettings
from controller.profiling.sidecar import ProfilingClient

_POLL_SECONDS = 0.5
# An engine with the shim introduces itself within this time after it answers HTTP.
_INTRODUCTION_SECONDS = 10.0
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """The engine to profile, and the file of the profile.

    output: None for a name made from the engine's identity.  engine_id: "" for the only engine.
    force: measure even if a profile exists.  prompt_text: text for prompts, "" for random words.
    command: recorded in the profile.
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
    """The result of `controller profile`.

    reused: the profile already existed.  seconds: of the measurement; 0 if reused.
    """

    profile: Profile
    path: Path
    reused: bool
    engine_ids: tuple[str, ...]
    seconds: float


async def profile_engine(
    request: ProfileRequest, reporter: Reporter, clock: Clock | None = None
) -> ProfileOutcome:
    """Measures a running engine, or reuses its profile, and installs the profile.

    If the measurement ends early, its steps are saved.  Raises ProfilingError.
    """
    clock = clock or WallClock()
    engine = EngineHttp(request.engine_url, request.api_key)
    async with ProfilingClient(request.sidecar) as sidecar:
        waiter = RetryWaiter(request.wait_seconds, clock, reporter)
        await waiter.wait_for_sidecar(sidecar)
        await waiter.wait_for_engine(engine)
        spec = await waiter.wait_for_introduction(sidecar, engine, request.engine_id)
        path = request.output or default_path(spec)
        profile = None if request.force else reusable_profile(path, spec)
        if profile is None and not request.force:
            profile = await _stored_profile(sidecar, spec, path, reporter)
        elif profile is not None:
            _note_reuse(f"{path} is this engine's profile", profile, spec, reporter)
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
            f"engine {spec.engine_id!r} has lost {loss.description} ({loss.reason}), so that it "
            "cannot be "
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
        """Measures the engine.  Raises ProfilingError, after saving the steps measured so far."""
        self._resume()
        loads = LoadSource(
            engine,
            await engine.limits(),
            await Prompts.from_engine_tokenizer(engine, self._request.prompt_text),
            self._request.settings.new_tokens,
            self._spec.fingerprint.data_parallel_size,
        )
        try:
            async with sidecar.open_measurement(self._spec.engine_id) as stream:
                await self._measurement.run(stream, loads)
        except BaseException:
            if self._measurement.cells:
                self._measurement.save()
                self._reporter.note(
                    f"the measured steps are saved in {self._partial_path}: run the same command "
                    "again to continue"
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
                f"+- {fit.context.error * 1e6:.3f} us per token"
            )
        else:
            self._reporter.note("context term: not measured, 0 is assumed")
        seconds_per_missed_token, wake_up_count = self._measurement.wake_ups.seconds_per_token(
            fit.cells, fit.kv_tokens_per_sequence, fit.context.seconds_per_kv_token
        )
        if wake_up_count:
            self._reporter.note(
                f"waking a drafter: {seconds_per_missed_token * 1e6:.0f} us per missed token "
                f"({wake_up_count} wake-ups)"
            )
        if doubt := doubt_reason(fit.cells):
            self._reporter.note(
                f"the profile is doubtful: {doubt}; other load may have disturbed it, so measure "
                "again (--force) when the machine is idle"
            )
        for flat in flat_drafters(fit.cells, self._spec.drafters):
            self._reporter.note(f"the profile is doubtful: {flat}")
        return Profile(
            fingerprint=self._spec.fingerprint,
            drafters=drafter_identities(self._spec),
            kv_tokens_per_sequence=fit.kv_tokens_per_sequence,
            seconds_per_kv_token=fit.context.seconds_per_kv_token,
            cells=fit.cells,
            catch_up_seconds_per_token=seconds_per_missed_token,
            measured_at=utc_now().isoformat(),
            command=self._request.command,
            hardware=hardware_note(self._spec.fingerprint.device),
        )

    def _resume(self) -> None:
        path = self._partial_path
        try:
            partial = load_partial(path)
        except InvalidPartialError as error:
            self._reporter.note(
                f"starting again: the interrupted measurement cannot be read: {error}"
            )
            return
        if partial is None:
            return
        if reason := partial.unusable_reason(self._spec, utc_now()):
            self._reporter.note(
                f"starting again: the interrupted measurement {path} cannot be continued: {reason}"
            )
            return
        finished_count = self._measurement.resume(partial)
        steps = sum(len(cell.seconds) for cell in partial.cells)
        self._reporter.note(
            f"continuing the measurement started {partial.started_at:%Y-%m-%d %H:%M} UTC "
            f"({path}): {finished_count} parts are done, {steps} steps are kept"
        )

    def _save(self, partial: PartialMeasurement) -> None:
        try:
            save_partial(self._partial_path, partial)
        except OSError as error:
            raise ProfilingError(f"{self._partial_path}: {error.strerror}") from error


async def _stored_profile(
    sidecar: ProfilingClient, spec: EngineSpec, path: Path, reporter: Reporter
) -> Profile | None:
    """Returns the profile in the fleet's store, if any, and writes it to the output."""
    profile = await sidecar.stored_profile(spec)
    if profile is not None:
        _note_reuse("the profile store has this engine's profile", profile, spec, reporter)
        _write(path, profile)
    return profile


def _write(path: Path, profile: Profile) -> None:
    try:
        write_profile(path, profile)
    except OSError as error:
        raise ProfilingError(f"{path}: {error.strerror}") from error


def _note_reuse(source: str, profile: Profile, spec: EngineSpec, reporter: Reporter) -> None:
    reporter.note(
        f"{source}, measured {profile.measured_at or 'at an unknown time'}: it is reused (--force "
        "measures again)"
    )
    if missing := uncovered_choices(profile, spec):
        reporter.note(f"it did not measure {', '.join(missing)}: costs there are extrapolated")


class RetryWaiter:
    """Retries until success or until the time is over.  `seconds`: for all waits together."""

    def __init__(self, seconds: float, clock: Clock, reporter: Reporter) -> None:
        self._clock = clock
        self._reporter = reporter
        self._begun_at = clock.now()
        self._deadline = self._begun_at + seconds

    async def wait_for_sidecar(self, sidecar: ProfilingClient) -> None:
        """Waits for the sidecar.  Raises SidecarUnreachableError."""
        await self._retry(
            f"the sidecar at {sidecar.address}", sidecar.engines, SidecarUnreachableError
        )

    async def wait_for_engine(self, engine: EngineHttp) -> None:
        """Waits until the engine can generate.  Raises EngineUnreachableError."""

        async def require_ready() -> None:
            if reason := await engine.not_ready_reason():
                raise EngineUnreachableError(reason)

        await self._retry(f"the engine at {engine.url}", require_ready, EngineUnreachableError)

    async def wait_for_introduction(
        self, sidecar: ProfilingClient, engine: EngineHttp, engine_id: str
    ) -> EngineSpec:
        """Returns the engine to measure.  engine_id: "" if there is only one.

        Raises EngineNotIntroducedError.
        """

        async def find_engine() -> EngineSpec:
            return choose_engine(await sidecar.engines(), engine_id, engine.url, sidecar.address)

        self._deadline = min(self._deadline, self._clock.now() + _INTRODUCTION_SECONDS)
        return await self._retry(
            "the engine's introduction to the sidecar", find_engine, NotYetIntroducedError
        )

    async def _retry(
        self, subject: str, attempt: Callable[[], Awaitable[Result]], not_yet: type[ProfilingError]
    ) -> Result:
        while True:
            try:
                return await attempt()
            except not_yet as error:
                waited = self._clock.now() - self._begun_at
                if self._clock.now() >= self._deadline:
                    text = f"{error} (waited {waited:.0f} s)" if waited >= 1 else str(error)
                    raise type(error)(text) from error
                self._reporter.waiting(f"waiting for {subject}: {error}")
            await asyncio.sleep(_POLL_SECONDS)


class NotYetIntroducedError(EngineNotIntroducedError):
    """The engine has not introduced itself yet."""


def choose_engine(
    engines: Sequence[EngineSpec], engine_id: str, url: str, address: str
) -> EngineSpec:
    """Returns the engine with this id, or the only one if the id is "".

    Raises NotYetIntroducedError if there is none, and EngineNotIntroducedError for several.
    """
    names = [spec.engine_id for spec in engines]
    for spec in engines:
        if spec.engine_id == engine_id:
            return spec
    if engine_id:
        raise NotYetIntroducedError(
            f"engine {engine_id!r} has not introduced itself to the sidecar at {address}; "
            f"introduced: {', '.join(names) or 'none'}"
        )
    if not engines:
        raise NotYetIntroducedError(
            f"no engine has introduced itself to the sidecar at {address}: the engine at {url} "
            f"must run with the shim (SPECULATION_SIDECAR={address})"
        )
    if len(engines) > 1:
        raise EngineNotIntroducedError(
            f"{len(engines)} engines have introduced themselves ({', '.join(names)}): "
            "name the one at the engine URL with --engine-id"
        )
    return engines[0]
