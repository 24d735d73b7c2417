//! Validates requests of schedulers and operators.

use pool::{
    ledger::{Reserve, SchedulingTarget, Target},
    record::RequestKey,
    rejection::Rejection,
};
use proto::v1 as wire;
use units::limits::{
    COMMIT_TIMEOUT_MAX, CORES_PER_HOST_MAX, LOCAL_MEMORY_MIB_PER_HOST_MAX, REASON_BYTES_MAX,
    SLICES_PER_VM_MAX, WAIT_READY_TIMEOUT_MAX,
};
use units::{Bytes, MigrationId, Name, NameError, Ns, RequestId, ReservationId, SliceId, UserId};

use crate::plan_request::Plan;

/// Error for an invalid field of a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct InvalidField {
    /// Name of the field, such as `target.vm`.
    pub field: &'static str,
    /// Invalid value and violated rule, such as "5 must be at most 4".
    pub problem: String,
}

impl InvalidField {
    /// Creates the error for a `value` that violates `rule`.
    pub fn new(field: &'static str, value: impl std::fmt::Display, rule: impl std::fmt::Display) -> Self {
        Self { field, problem: format!("{value} {rule}") }
    }
}

impl From<InvalidField> for Rejection {
    fn from(invalid: InvalidField) -> Self {
        Self::InvalidValue { field: invalid.field, value: invalid.problem, rule: "" }
    }
}

/// Validates the name of a new VM. A name that looks like a reservation ID (`r-1`) is rejected,
/// because commands accept both VM names and reservation IDs.
fn parse_new_vm_name(text: &str) -> Result<Name, InvalidField> {
    if text.parse::<ReservationId>().is_ok() {
        let rule = "must not be r- and a number, which is the form of a reservation ID";
        return Err(InvalidField::new("vm", format!("{text:?}"), rule));
    }
    parse_name("vm", text)
}

/// Validates the name of a host, VM, EMC or tenant.
///
/// # Errors
/// [`InvalidField`] if the name is empty or malformed.
pub fn parse_name(field: &'static str, text: &str) -> Result<Name, InvalidField> {
    Name::new(text).map_err(|error: NameError| InvalidField { field, problem: error.to_string() })
}

/// Validates the ID of a migration request; an empty ID is `None`.
///
/// # Errors
/// [`InvalidField`] if the ID is malformed.
pub fn parse_migration_id(text: &str) -> Result<Option<MigrationId>, InvalidField> {
    let id = (!text.is_empty()).then(|| text.parse());
    id.transpose().map_err(|problem| InvalidField { field: "id", problem })
}

/// Returns the name of the client: from its certificate with mTLS, otherwise from the request.
pub fn select_client_name(claimed: &str, certified: Option<&Name>) -> Result<Name, InvalidField> {
    match (certified, claimed) {
        (Some(name), _) => Ok(name.clone()),
        (None, "") => Ok(Name::new("anonymous").expect("a name")),
        (None, claimed) => parse_name("client", claimed),
    }
}

/// Validates the reason that an operator gives for a command, or a scheduler for an answer.
///
/// # Errors
/// [`InvalidField`] if the reason has more than [`REASON_BYTES_MAX`] bytes.
pub fn check_reason(field: &'static str, text: String) -> Result<String, InvalidField> {
    if text.len() <= REASON_BYTES_MAX {
        Ok(text)
    } else {
        Err(InvalidField::new(
            field,
            format!("{} bytes", text.len()),
            format!("must be at most {REASON_BYTES_MAX}"),
        ))
    }
}

fn check_at_most(field: &'static str, value: u64, max: u64) -> Result<u64, InvalidField> {
    if value <= max {
        Ok(value)
    } else {
        Err(InvalidField::new(field, value, format!("must be at most {max}")))
    }
}

/// Validates an amount of pool memory, and returns the number of slices. The amount must be whole
/// slices and at most [`SLICES_PER_VM_MAX`] slices.
fn parse_pool_slices(bytes: u64) -> Result<u32, InvalidField> {
    let (requested, max) = (Bytes::new(bytes), Bytes::slices(SLICES_PER_VM_MAX));
    if requested > max {
        return Err(InvalidField::new("pool_bytes", requested, format!("must be at most {max} for one VM")));
    }
    let rule = "must be whole slices: a multiple of 1GiB (1073741824)";
    requested.as_slices().ok_or_else(|| InvalidField::new("pool_bytes", bytes, rule))
}

pub(super) fn parse_local_memory(bytes: u64) -> Result<Bytes, InvalidField> {
    let local = Bytes::new(check_at_most("local_bytes", bytes, LOCAL_MEMORY_MIB_PER_HOST_MAX << 20)?);
    if local.is_whole_mib() {
        Ok(local)
    } else {
        Err(InvalidField::new("local_bytes", bytes, "must be whole MiB: a multiple of 1048576"))
    }
}

/// Validates a user ID on a host.
pub(super) fn parse_user_id(uid: u32) -> Result<UserId, InvalidField> {
    UserId::new(uid).map_err(|error| InvalidField { field: "uid", problem: error.to_string() })
}

fn check_cores(n: u32) -> Result<u32, InvalidField> {
    check_at_most("cores", n.into(), CORES_PER_HOST_MAX.into()).map(|_| n)
}

/// Validates a reservation request. `certified` is the name in the client's certificate, and
/// `commit_within` is the rack's default for the time until the commit.
///
/// # Errors
/// [`InvalidField`] with the first field that violates a rule.
pub fn parse_reserve(
    r: wire::ReserveRequest,
    certified: Option<&Name>,
    commit_within: Ns,
) -> Result<Reserve, InvalidField> {
    let id = RequestId::new(&r.request_id);
    let id = id.map_err(|error| InvalidField { field: "request_id", problem: error.to_string() })?;
    let request = RequestKey { client: select_client_name(&r.client, certified)?, id };
    let reserve = Reserve {
        request,
        host: parse_name("host", &r.host)?,
        vm: parse_new_vm_name(&r.vm)?,
        slices: parse_pool_slices(r.pool_bytes)?,
        local: parse_local_memory(r.local_bytes)?,
        cores: check_cores(r.cores)?,
        pinned: r.pinned,
        commit_within: match check_at_most(
            "commit_within_ms",
            r.commit_within_ms,
            COMMIT_TIMEOUT_MAX.as_ms(),
        )? {
            0 => commit_within,
            ms => Ns::ms(ms),
        },
        uid: r.uid.map(parse_user_id).transpose()?,
    };
    if reserve.slices == 0 && reserve.local == Bytes::ZERO && reserve.cores == 0 {
        let rule = "must be more than 0 if local_bytes and cores are 0";
        return Err(InvalidField::new("pool_bytes", 0, rule));
    }
    Ok(reserve)
}

/// Validates a reference to a reservation, which is either a reservation ID or a VM name.
///
/// # Errors
/// [`InvalidField`] unless exactly one of them is set and well-formed.
pub fn parse_reservation_ref(r: Option<wire::ReservationRef>) -> Result<Target, InvalidField> {
    let r = r.unwrap_or_default();
    match (r.reservation.as_str(), r.vm.as_str()) {
        (id, "") if !id.is_empty() => id
            .parse()
            .map(Target::Reservation)
            .map_err(|problem| InvalidField { field: "target.reservation", problem }),
        ("", vm) if !vm.is_empty() => Ok(Target::Vm(parse_name("target.vm", vm)?)),
        ("", _) => Err(InvalidField::new("target", "is empty:", "must be a reservation or a vm")),
        _ => Err(InvalidField::new("target", "has two fields:", "must be either a reservation or a vm")),
    }
}

/// Validates the timeout of a request that waits for slices; 0 ms selects [`WAIT_READY_TIMEOUT_MAX`].
///
/// # Errors
/// [`InvalidField`] if the timeout exceeds [`WAIT_READY_TIMEOUT_MAX`].
pub fn parse_timeout(ms: u64) -> Result<Ns, InvalidField> {
    match check_at_most("timeout_ms", ms, WAIT_READY_TIMEOUT_MAX.as_ms())? {
        0 => Ok(WAIT_READY_TIMEOUT_MAX),
        ms => Ok(Ns::ms(ms)),
    }
}

/// Validates the target of an operator's command, which is a host, an EMC or a slice.
///
/// # Errors
/// [`InvalidField`] unless exactly one of the three is set and well-formed.
pub fn parse_scheduling_target(target: Option<wire::Target>) -> Result<SchedulingTarget, InvalidField> {
    let t = target.unwrap_or_default();
    match (t.host.as_str(), t.emc.as_str(), t.slice) {
        (host, "", None) if !host.is_empty() => Ok(SchedulingTarget::Host(parse_name("target.host", host)?)),
        ("", emc, None) if !emc.is_empty() => Ok(SchedulingTarget::Emc(parse_name("target.emc", emc)?)),
        ("", "", Some(slice)) => Ok(SchedulingTarget::Slice(SliceId(slice))),
        ("", "", None) => Err(InvalidField::new("target", "is empty:", "must be a host, an emc or a slice")),
        _ => Err(InvalidField::new("target", "has several fields:", "must be one of host, emc and slice")),
    }
}

/// Validates a request for a placement plan of a VM.
///
/// # Errors
/// [`InvalidField`] with the first field that violates a rule.
pub fn parse_plan(r: wire::PlanVmRequest) -> Result<Plan, InvalidField> {
    let memory =
        Bytes::new(check_at_most("memory_bytes", r.memory_bytes, LOCAL_MEMORY_MIB_PER_HOST_MAX << 20)?);
    if memory == Bytes::ZERO || !memory.is_whole_mib() {
        return Err(InvalidField::new("memory_bytes", memory.get(), "must be whole MiB and more than 0"));
    }
    let vm = parse_new_vm_name(&r.vm)?;
    let (groups, counters) = super::profile::parse_profile(vm.to_string(), r.profile)?;
    Ok(Plan { vm, cores: check_cores(r.cores)?, memory, pinned: r.pinned, groups, counters })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn valid_request() -> wire::ReserveRequest {
        wire::ReserveRequest {
            request_id: "r1".into(),
            host: "h1".into(),
            vm: "v1".into(),
            pool_bytes: 4 << 30,
            ..Default::default()
        }
    }

    /// Applies `change` to a valid request, and checks that the error names `field` and contains
    /// `parts`.
    fn check_rejected(change: impl Fn(&mut wire::ReserveRequest), field: &str, parts: &[&str]) {
        let mut request = valid_request();
        change(&mut request);
        let error = parse_reserve(request, None, Ns::secs(1)).unwrap_err();
        assert_eq!(error.field, field);
        for part in parts {
            assert!(error.to_string().contains(part), "{error} does not contain {part:?}");
        }
    }

    #[test]
    fn invalid_value_is_rejected_with_field_value_and_rule() {
        assert!(parse_reserve(valid_request(), None, Ns::secs(1)).is_ok());
        check_rejected(|r| r.pool_bytes = 0, "pool_bytes", &["0", "more than 0"]);
        check_rejected(|r| r.pool_bytes = 5, "pool_bytes", &["5", "multiple of 1GiB"]);
        check_rejected(|r| r.pool_bytes = u64::MAX, "pool_bytes", &["18446744073709551615"]);
        check_rejected(|r| r.pool_bytes = 5000 << 30, "pool_bytes", &["5000GiB", "at most 4096GiB"]);
        check_rejected(|r| r.local_bytes = 1000, "local_bytes", &["1000", "whole MiB"]);
        check_rejected(|r| r.local_bytes = u64::MAX, "local_bytes", &["must be at most"]);
        check_rejected(|r| r.cores = 1_000_000, "cores", &["1000000", "at most 4096"]);
        check_rejected(|r| r.request_id.clear(), "request_id", &["must be 1 to 128"]);
        check_rejected(|r| r.request_id = "x".repeat(129), "request_id", &["must be 1 to 128"]);
        check_rejected(|r| r.host = "../etc".into(), "host", &["../etc", "must be 1 to 63"]);
        check_rejected(|r| r.vm = "a b".into(), "vm", &["a b"]);
        // `tarn release r-1` would release reservation 1, not a VM with the name "r-1".
        check_rejected(|r| r.vm = "r-1".into(), "vm", &["\"r-1\"", "must not be r- and a number"]);
        check_rejected(|r| r.commit_within_ms = u64::MAX, "commit_within_ms", &["at most"]);
        check_rejected(|r| r.uid = Some(u32::MAX), "uid", &["4294967295", "at most 4294967294"]);
    }

    #[test]
    fn request_without_uid_has_no_user() {
        let user = |uid| {
            parse_reserve(wire::ReserveRequest { uid, ..valid_request() }, None, Ns::secs(1)).unwrap().uid
        };
        assert_eq!(user(None), None);
        assert_eq!([0, 2001].map(|uid| user(Some(uid)).map(UserId::get)), [Some(0), Some(2001)]);
    }

    #[test]
    fn target_must_be_exactly_one_reference() {
        let by = |reservation: &str, vm: &str| {
            parse_reservation_ref(Some(wire::ReservationRef {
                reservation: reservation.into(),
                vm: vm.into(),
            }))
        };
        assert_eq!(by("r-7", "").unwrap(), Target::Reservation(ReservationId(7)));
        assert!(
            by("r-7", "v").is_err()
                && by("", "").is_err()
                && by("7", "").is_err()
                && parse_reservation_ref(None).is_err()
        );
    }
}
