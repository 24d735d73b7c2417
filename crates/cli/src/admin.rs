//! Operator commands: `tarn cordon`, `uncordon`, `drain` and `fence`. The manager decides whether a
//! command is allowed.

use proto::v1;

use crate::{
    Connection, Failure, Format,
    args::{CordonTarget, Fence, NameAndReason, UncordonTarget},
    print, view,
};

/// Cordons a host or EMC, so that it accepts no new reservations.
pub(crate) async fn cordon(
    target: CordonTarget,
    manager: &Connection,
    format: Format,
) -> Result<(), Failure> {
    print_target_result(format, manager.call(manager.admin().cordon(v1::TargetRequest::from(target))).await?)
}

/// Uncordons a host or EMC, or returns a quarantined slice to service.
pub(crate) async fn uncordon(
    target: UncordonTarget,
    manager: &Connection,
    format: Format,
) -> Result<(), Failure> {
    print_target_result(
        format,
        manager.call(manager.admin().uncordon(v1::TargetRequest::from(target))).await?,
    )
}

/// Cordons a host or EMC and requests the migration of its VMs.
pub(crate) async fn drain(target: CordonTarget, manager: &Connection, format: Format) -> Result<(), Failure> {
    print_target_result(format, manager.call(manager.admin().drain(v1::TargetRequest::from(target))).await?)
}

/// Revokes a silent host's access to its slices.
pub(crate) async fn fence(args: Fence, manager: &Connection, format: Format) -> Result<(), Failure> {
    let request = v1::FenceRequest {
        host: args.host.into(),
        confirm_powered_off: args.confirm_powered_off,
        reason: args.reason.unwrap_or_default(),
    };
    print_target_result(format, manager.call(manager.admin().fence(request)).await?)?;
    print::note(
        format,
        "fencing is complete when `tarn get hosts` shows `fenced`; until then the host keeps its slices",
    );
    Ok(())
}

fn print_target_result(format: Format, response: v1::TargetResponse) -> Result<(), Failure> {
    print::one(format, &view::TargetResult::from(response))
}

fn host_request(args: NameAndReason) -> v1::TargetRequest {
    let target = v1::Target { host: args.name.into(), emc: String::new(), slice: None };
    v1::TargetRequest { target: Some(target), reason: args.reason.unwrap_or_default() }
}

fn emc_request(args: NameAndReason) -> v1::TargetRequest {
    let target = v1::Target { host: String::new(), emc: args.name.into(), slice: None };
    v1::TargetRequest { target: Some(target), reason: args.reason.unwrap_or_default() }
}

impl From<CordonTarget> for v1::TargetRequest {
    fn from(target: CordonTarget) -> Self {
        match target {
            CordonTarget::Host(args) => host_request(args),
            CordonTarget::Emc(args) => emc_request(args),
        }
    }
}

impl From<UncordonTarget> for v1::TargetRequest {
    fn from(target: UncordonTarget) -> Self {
        match target {
            UncordonTarget::Host(args) => host_request(args),
            UncordonTarget::Emc(args) => emc_request(args),
            UncordonTarget::Slice { slice, reason } => {
                let target = v1::Target { host: String::new(), emc: String::new(), slice: Some(slice) };
                Self { target: Some(target), reason: reason.unwrap_or_default() }
            }
        }
    }
}
