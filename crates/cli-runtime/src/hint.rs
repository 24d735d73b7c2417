//! What to do next after a refusal: one table, by reason first and by gRPC code where a reason says no more. It advises;
//! it does nothing.

use tonic::Code;

/// After a connection that could not be made.
pub const NOBODY_THERE: &str =
    "is pool-manager running, and is --endpoint (TARN_ENDPOINT) where it listens? https:// needs --ca";
/// After a connection that broke.
pub const BROKEN: &str =
    "the manager stopped, or does not accept this client's certificate: see its log, try again";
/// After an answer that did not come.
pub const NO_ANSWER: &str = "what was asked may still be done: ask again (a reservation with the same --request-id), or with a longer --timeout";

/// Advice by the manager's reason.
const BY_REASON: &[(&str, &str)] = &[
    ("HOST_NOT_FOUND", "`tarn get hosts` lists the hosts of this rack; new ones go into rack.toml"),
    ("EMC_NOT_FOUND", "`tarn get emcs` lists the EMCs of this rack; new ones go into rack.toml"),
    ("SLICE_NOT_FOUND", "`tarn get slices` lists every slice"),
    ("VM_NOT_FOUND", "`tarn get reservations --ended` lists VMs with memory, and those that had some"),
    ("RESERVATION_NOT_FOUND", "`tarn get reservations --ended` lists reservations, and those that ended"),
    ("MIGRATION_NOT_FOUND", "`tarn get migrations` lists the requests there are"),
    (
        "SHARES_NOT_REPORTED",
        "an agent tells after each epoch, if it shares its host among tenants at all; `tarn get hosts` shows whether it is up",
    ),
    ("REQUEST_ID_REUSED", "a request id belongs to one request for ever: choose a new one"),
    ("VM_ALREADY_RESERVED", "`tarn describe vm {vm}` shows what it has; `tarn release {vm}` gives it back"),
    (
        "HOST_NOT_SCHEDULABLE",
        "`tarn describe host {host}` says why: a cordon or drain is taken back with `tarn uncordon host {host}`, a silent host \
         needs its agent (`tarn doctor`)",
    ),
    (
        "HOST_EXPECTED",
        "its agent connects within seconds of a start: try again; `tarn doctor` if it does not",
    ),
    (
        "OUT_OF_SLICES",
        "`tarn watch capacity` shows where slices are free; draining ones come back by themselves",
    ),
    ("OUT_OF_LOCAL_MEMORY", "`tarn plan-vm` names the hosts that fit"),
    ("OUT_OF_CORES", "`tarn plan-vm` names the hosts that fit"),
    ("STORE_LOW_SPACE", "make room on the disk of the manager's store; releases work meanwhile"),
    (
        "RESERVATION_WRONG_STATE",
        "`tarn describe vm {vm}` shows its state, `tarn explain vm {vm}` how it got there",
    ),
    ("SLICE_WRONG_STATE", "`tarn explain slice {slice}` shows how it got there"),
    ("HOST_CONNECTED", "drain a host that answers: `tarn drain host {host}`"),
    ("STORE_FAILED", "repeat the request with the same --request-id: it finds out whether it was done"),
    ("STARTING", "try again in a moment"),
    (
        "ROLE_MISSING",
        "run it as a user with this role, or with --token-file (unix socket, loopback address), or --cert (https://)",
    ),
    ("TOO_MANY_WATCHERS", "end a watch that nobody reads; `tarn get rack` needs none"),
    ("OVERLOADED", "too much at once: try again in a moment"),
    ("STOPPING", "the manager is restarting or being stopped: try again in a moment"),
    ("NOT_READY_BEFORE_TIMEOUT", "nothing was lost: `tarn wait-ready` again, or `tarn explain vm {vm}`"),
];

/// What a question was about, for the commands in its advice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subjects {
    /// The host.
    pub host: Option<String>,
    /// The VM, or its reservation as r-N.
    pub vm: Option<String>,
    /// The slice.
    pub slice: Option<u32>,
}

impl Subjects {
    /// Fills in what is known; the rest stays a placeholder such as `<vm>`.
    fn fill(&self, advice: &str) -> String {
        let slice = self.slice.map(|slice| slice.to_string());
        let subjects = [("host", &self.host), ("vm", &self.vm), ("slice", &slice)];
        subjects.into_iter().fold(advice.to_owned(), |advice, (kind, name)| {
            let shown = name.clone().unwrap_or_else(|| format!("<{kind}>"));
            advice.replace(&format!("{{{kind}}}"), &shown)
        })
    }
}

/// What to do after the manager refused, if there is advice.
pub fn for_refusal(code: Code, reason: Option<&str>, subjects: &Subjects) -> Option<String> {
    let known = BY_REASON.iter().find(|(known, _)| Some(*known) == reason);
    known.map(|(_, advice)| *advice).or_else(|| by_code(code)).map(|advice| subjects.fill(advice))
}

fn by_code(code: Code) -> Option<&'static str> {
    match code {
        Code::Unavailable => Some(
            "try again in a moment (a reservation with the same --request-id); `tarn doctor` if it stays so",
        ),
        Code::PermissionDenied => {
            Some("this client's certificate does not hold that role: ask with --cert of one that does")
        }
        Code::Unauthenticated => Some("this manager wants to know who asks: --cert and --key"),
        Code::ResourceExhausted => Some("`tarn watch capacity` shows what is free"),
        Code::DeadlineExceeded => Some(NO_ANSWER),
        Code::Unimplemented => {
            Some("the manager is older than this command: `tarn doctor` compares versions")
        }
        Code::Internal | Code::Unknown | Code::DataLoss => Some("the manager's log says more"),
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
    fn advice_names_what_was_asked_about() {
        let subjects = Subjects { vm: Some("web".to_owned()), ..Subjects::default() };
        let advice = for_refusal(Code::AlreadyExists, Some("VM_ALREADY_RESERVED"), &subjects);
        let says = "`tarn describe vm web` shows what it has; `tarn release web` gives it back";
        assert_eq!(advice.as_deref(), Some(says));
        for (reason, advice) in BY_REASON {
            assert!(!advice.contains("NAME") && !advice.contains("NUMBER"), "{reason}: {advice}");
            let filled = for_refusal(Code::Unknown, Some(reason), &Subjects::default()).unwrap();
            assert!(!filled.contains('{'), "{reason}: {filled}");
        }
    }
}
