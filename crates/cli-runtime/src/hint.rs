//! Hints that suggest the next step after an error. A hint is selected by the reason in the
//! manager's error, or by the gRPC code if the reason has no hint.

use tonic::Code;

/// Hint after a failed connection attempt.
pub const CONNECT_FAILED: &str =
    "check that pool-manager is running and listens on --endpoint (TARN_ENDPOINT); https:// also needs --ca";
/// Hint after a connection that broke during a request.
pub const CONNECTION_BROKEN: &str =
    "the manager stopped or rejected this client's certificate: check its log and retry";
/// Hint after a request that timed out.
pub const NO_RESPONSE: &str = "the request may still be executed: retry it (a reservation with the same --request-id) or use a longer --timeout";

/// Reason in the error of a manager that only waits to take over.
pub(crate) const NOT_LEADER: &str = "NOT_LEADER";

/// Hints by the reason in the manager's error. The placeholders `{host}`, `{vm}` and `{slice}` are
/// replaced by the names in the request.
const HINTS_BY_REASON: &[(&str, &str)] = &[
    (NOT_LEADER, "name all managers of the rack, separated by commas, in --endpoint or TARN_ENDPOINT"),
    ("HOST_NOT_FOUND", "list the hosts with `tarn get hosts`; new hosts are added in rack.toml"),
    ("EMC_NOT_FOUND", "list the EMCs with `tarn get emcs`; new EMCs are added in rack.toml"),
    ("SLICE_NOT_FOUND", "list the slices with `tarn get slices`"),
    ("VM_NOT_FOUND", "list current and ended reservations with `tarn get reservations --include-ended`"),
    (
        "RESERVATION_NOT_FOUND",
        "list current and ended reservations with `tarn get reservations --include-ended`",
    ),
    ("MIGRATION_AMBIGUOUS", "name the request with `tarn migration resolve --id`"),
    ("MIGRATION_NOT_FOUND", "list the migration requests with `tarn get migrations`"),
    (
        "SHARES_NOT_REPORTED",
        "the host's agent reports shares after each epoch if [symbiosis] is configured; check its state with `tarn get hosts`",
    ),
    (
        "TENANTS_NOT_REPORTED",
        "the host's agent reports tenants every few seconds if [tiering] is configured; check its state with `tarn get hosts`",
    ),
    (
        "EVICTIONS_NOT_REPORTED",
        "the host's agent reports evictions every few seconds if [early_eviction] is configured; check its state with `tarn get hosts`",
    ),
    (
        "SOFT_MEMORY_NOT_REPORTED",
        "the host's agent reports soft memory every two seconds if [soft_memory] is configured; check its state with `tarn get hosts`",
    ),
    ("REQUEST_ID_REUSED", "each request needs a request ID of its own: choose a new --request-id"),
    (
        "VM_ALREADY_RESERVED",
        "show its reservation with `tarn describe vm {vm}`, or release it with `tarn release {vm}`",
    ),
    (
        "HOST_NOT_SCHEDULABLE",
        "check `tarn describe host {host}`: end a cordon or drain with `tarn uncordon host {host}`, or start the agent of a \
         silent host (see `tarn doctor`)",
    ),
    (
        "HOST_EXPECTED",
        "the agent connects within seconds of a manager start: retry, or run `tarn doctor` if this persists",
    ),
    (
        "OUT_OF_SLICES",
        "show free slices with `tarn watch capacity`; draining slices become free without intervention",
    ),
    ("OUT_OF_LOCAL_MEMORY", "find hosts that fit with `tarn plan-vm`"),
    ("OUT_OF_CORES", "find hosts that fit with `tarn plan-vm`"),
    ("STORE_LOW_SPACE", "free space on the disk of the manager's store; releases still work in the meantime"),
    (
        "RESERVATION_WRONG_STATE",
        "show its state with `tarn describe vm {vm}` and its history with `tarn explain vm {vm}`",
    ),
    ("SLICE_WRONG_STATE", "show its history with `tarn explain slice {slice}`"),
    ("HOST_CONNECTED", "drain a connected host instead: `tarn drain host {host}`"),
    (
        "STORE_FAILED",
        "retry with the same --request-id: a request that was already executed returns the same result",
    ),
    ("STARTING", "retry in a moment"),
    (
        "ROLE_MISSING",
        "run as a user with this role, or use --token-file (unix socket, loopback address) or --cert (https://)",
    ),
    ("TOO_MANY_WATCHERS", "end unused watches; `tarn get rack` works without a watch"),
    ("OVERLOADED", "too many requests: retry in a moment"),
    ("STOPPING", "the manager is stopping or restarting: retry in a moment"),
    (
        "NOT_READY_BEFORE_TIMEOUT",
        "the reservation is unchanged: run `tarn wait-ready {vm}` again, or see `tarn explain vm {vm}`",
    ),
];

/// Names in a request, for the placeholders of hints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestSubjects {
    /// Name of the host.
    pub host: Option<String>,
    /// Name of the VM, or the ID of its reservation (r-N).
    pub vm: Option<String>,
    /// Number of the slice.
    pub slice: Option<u32>,
}

impl RequestSubjects {
    /// Replaces the placeholders of a hint. A name that is not set is shown as `<vm>`.
    fn fill_placeholders(&self, hint: &str) -> String {
        let slice = self.slice.map(|slice| slice.to_string());
        let subjects = [("host", &self.host), ("vm", &self.vm), ("slice", &slice)];
        subjects.into_iter().fold(hint.to_owned(), |hint, (kind, name)| {
            let shown = name.clone().unwrap_or_else(|| format!("<{kind}>"));
            hint.replace(&format!("{{{kind}}}"), &shown)
        })
    }
}

/// Returns the hint for a request that the manager rejected with this code and reason.
pub fn hint_for_rejection(code: Code, reason: Option<&str>, subjects: &RequestSubjects) -> Option<String> {
    let entry = HINTS_BY_REASON.iter().find(|(known, _)| Some(*known) == reason);
    entry.map(|(_, hint)| *hint).or_else(|| hint_for_code(code)).map(|hint| subjects.fill_placeholders(hint))
}

fn hint_for_code(code: Code) -> Option<&'static str> {
    match code {
        Code::Unavailable => Some(
            "retry in a moment (a reservation with the same --request-id), or run `tarn doctor` if this persists",
        ),
        Code::PermissionDenied => Some(
            "this client's user, token or certificate lacks the required role: use the --token-file or --cert of a \
             client with that role",
        ),
        Code::Unauthenticated => Some(
            "the manager cannot identify this client: use --token-file on a loopback address, or --cert and --key with TLS",
        ),
        Code::ResourceExhausted => Some("show free capacity with `tarn watch capacity`"),
        Code::DeadlineExceeded => Some(NO_RESPONSE),
        Code::Unimplemented => {
            Some("the manager is older than this tarn: compare their versions with `tarn doctor`")
        }
        Code::Internal | Code::Unknown | Code::DataLoss => Some("see the manager's log for details"),
        Code::Ok
        | Code::Cancelled
        | Code::InvalidArgument
        | Code::NotFound
        | Code::AlreadyExists
        | Code::FailedPrecondition
        | Code::Aborted
        | Code::OutOfRange => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hint_contains_the_names_in_the_request() {
        let subjects = RequestSubjects { vm: Some("web".to_owned()), ..RequestSubjects::default() };
        let hint = hint_for_rejection(Code::AlreadyExists, Some("VM_ALREADY_RESERVED"), &subjects);
        let expected =
            "show its reservation with `tarn describe vm web`, or release it with `tarn release web`";
        assert_eq!(hint.as_deref(), Some(expected));
        for (reason, hint) in HINTS_BY_REASON {
            assert!(!hint.contains("NAME") && !hint.contains("NUMBER"), "{reason}: {hint}");
            let filled =
                hint_for_rejection(Code::Unknown, Some(reason), &RequestSubjects::default()).unwrap();
            assert!(!filled.contains('{'), "{reason}: {filled}");
        }
    }
}
