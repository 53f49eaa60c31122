import grpc
import pytest

from controller.core import errors as core
from controller.core.planning.overrides import InvalidOverrideError
from controller.service.net import errors
from controller.store.interface import StoreError, StoreUnavailableError, UnknownSequenceError

EXPECTED = {
    core.InvalidLossError: grpc.StatusCode.INVALID_ARGUMENT,
    core.InvalidReportError: grpc.StatusCode.INVALID_ARGUMENT,
    core.UnknownArmError: grpc.StatusCode.OUT_OF_RANGE,
    core.StaleReportError: grpc.StatusCode.FAILED_PRECONDITION,
    core.InvalidEngineError: grpc.StatusCode.INVALID_ARGUMENT,
    core.InvalidProfileError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownDrafterError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NoSessionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnknownEngineError: grpc.StatusCode.NOT_FOUND,
    errors.EngineTakenError: grpc.StatusCode.ALREADY_EXISTS,
    errors.TooManyEnginesError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.MeasurementConflictError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InvalidMeasurementError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NoMatchingEngineError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InvalidQuestionError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.RequestIdReusedError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SidecarFailedError: grpc.StatusCode.INTERNAL,
    errors.SlowClientError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.ProfileNotSavedError: grpc.StatusCode.INTERNAL,
    errors.ShuttingDownError: grpc.StatusCode.UNAVAILABLE,
    InvalidOverrideError: grpc.StatusCode.INVALID_ARGUMENT,
    core.ProfileMergeError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NoProfileError: grpc.StatusCode.NOT_FOUND,
    errors.NoOverrideError: grpc.StatusCode.NOT_FOUND,
    errors.PolicyNotClearedError: grpc.StatusCode.NOT_FOUND,
    errors.NoEffectError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TooManyOverridesError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.OverrideExistsError: grpc.StatusCode.ALREADY_EXISTS,
    errors.OverrideChangedError: grpc.StatusCode.ABORTED,
    errors.ForbiddenError: grpc.StatusCode.PERMISSION_DENIED,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.TooManyCallsError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    core.InvalidTrainingError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.CannotTrainError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TrainerAttachedError: grpc.StatusCode.ALREADY_EXISTS,
    errors.TooManyReportsError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnreadableRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SilentClientError: grpc.StatusCode.DEADLINE_EXCEEDED,
    UnknownSequenceError: grpc.StatusCode.INVALID_ARGUMENT,
    StoreUnavailableError: grpc.StatusCode.UNAVAILABLE,
    StoreError: grpc.StatusCode.INTERNAL,
}


# Of a start, of a recording that is decided again, and of estimates in the store, which are only
# logged: no client is ever told.
NEVER_RAISED_IN_CALLS = {
    errors.StartRefusedError,
    errors.AddressTakenError,
    core.InvalidStateError,
    core.InvalidBeliefError,
}


@pytest.mark.parametrize(("kind", "status"), EXPECTED.items())
def test_every_refusal_has_its_status(kind: type[core.SpeculationError], status: grpc.StatusCode):
    assert errors.status_code_of(kind("why")) is status


def test_a_profile_of_another_fingerprint_is_a_failed_precondition():
    error = core.ProfileMismatchError("device", "A", "B")
    assert errors.status_code_of(error) is grpc.StatusCode.FAILED_PRECONDITION


def test_no_error_of_core_or_service_is_forgotten():
    kinds = {
        kind
        for module in (core, errors)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, core.SpeculationError)
    }
    assert kinds - {
        core.SpeculationError,
        core.ProfileMismatchError,
    } - NEVER_RAISED_IN_CALLS == set(EXPECTED)


def test_an_error_that_nobody_listed_is_not_passed_off_as_another():
    assert errors.status_code_of(core.SpeculationError("?")) is grpc.StatusCode.INTERNAL


def test_a_message_is_cut_where_it_gets_long():
    assert errors.error_text(core.SpeculationError("short")) == "short"
    long = errors.error_text(core.SpeculationError("x" * 10_000))
    assert len(long) == 500
    assert long.endswith("…")
