//! `tarn get`: prints a list of resources, or one resource. `describe.rs` prints details.

use proto::v1;

use crate::{
    Connection, Failure, Format,
    args::{Resource, VmFilter, VmOrReservation},
    evictions, lists, models, print, shares, soft_memory, tenants, view,
};

/// Prints the requested list or resource.
pub(crate) async fn run(resource: Resource, manager: &Connection, format: Format) -> Result<(), Failure> {
    match resource {
        Resource::Rack => print::one(format, &view::Rack::from(lists::rack(manager).await?)),
        Resource::Emcs(filter) => match filter.name {
            Some(name) => print::one(format, &emc(manager, name.into()).await?),
            None => print_list::<_, view::Emc>(format, lists::emcs(manager).await?),
        },
        Resource::Managers => print_list::<_, view::Manager>(format, lists::managers(manager).await?),
        Resource::Hosts(filter) => match filter.name {
            Some(name) => print::one(format, &host(manager, name.into()).await?),
            None => print_list::<_, view::Host>(format, lists::hosts(manager).await?),
        },
        Resource::Slices(filter) => match filter.slice {
            Some(slice) => print::one(format, &view::Slice::from(self::slice(manager, slice).await?)),
            None => print_list::<_, view::Slice>(format, lists::slices(manager, 0, u32::MAX).await?),
        },
        Resource::Reservations(filter) => match filter.target {
            Some(target) => print::one(format, &reservation(manager, target).await?),
            None => print_list::<_, view::Reservation>(
                format,
                lists::reservations(manager, filter.include_ended).await?,
            ),
        },
        Resource::Vms(VmFilter { vm: Some(vm) }) => {
            print::one(format, &view::Vm::from(find_reservation(manager, VmOrReservation::Vm(vm)).await?))
        }
        Resource::Vms(VmFilter { vm: None }) => {
            let mut reservations = lists::reservations(manager, false).await?;
            reservations.retain(|reservation| reservation.pool_bytes > 0);
            print_list::<_, view::Vm>(format, reservations)
        }
        Resource::Migrations(filter) => {
            let mut migrations = lists::migrations(manager).await?;
            migrations.retain(|m| filter.vm.as_ref().is_none_or(|vm| m.vm == vm.as_str()));
            print_list::<_, view::Migration>(format, migrations)
        }
        Resource::Models => models::list(manager, format).await,
        Resource::Shares(args) => shares::list(args, manager, format).await,
        Resource::Tenants(args) => tenants::list(args, manager, format).await,
        Resource::Evictions(args) => evictions::list(args, manager, format).await,
        Resource::SoftMemory(args) => soft_memory::show(args, manager, format).await,
        Resource::Weights(args) => shares::list_weights(args, manager, format).await,
        Resource::Alarms(filter) => print::list(format, &alarms(manager, filter.subject.as_deref()).await?),
    }
}

fn print_list<A, B: From<A> + crate::table::Row + serde::Serialize>(
    format: Format,
    items: Vec<A>,
) -> Result<(), Failure> {
    print::list(format, &items.into_iter().map(B::from).collect::<Vec<_>>())
}

/// Requests one EMC by name.
pub(crate) async fn emc(manager: &Connection, emc: String) -> Result<view::Emc, Failure> {
    Ok(manager.call(manager.admin().get_emc(v1::GetEmcRequest { emc })).await?.into())
}

/// Requests one host by name.
pub(crate) async fn host(manager: &Connection, host: String) -> Result<view::Host, Failure> {
    Ok(manager.call(manager.admin().get_host(v1::GetHostRequest { host })).await?.into())
}

/// Requests one slice by number.
pub(crate) async fn slice(manager: &Connection, slice: u32) -> Result<v1::Slice, Failure> {
    manager.call(manager.admin().get_slice(v1::GetSliceRequest { slice })).await
}

/// Requests one reservation by ID or VM.
pub(crate) async fn reservation(
    manager: &Connection,
    target: VmOrReservation,
) -> Result<view::Reservation, Failure> {
    Ok(find_reservation(manager, target).await?.into())
}

/// Requests the reservation of a VM.
pub(crate) async fn find_reservation(
    manager: &Connection,
    target: VmOrReservation,
) -> Result<v1::Reservation, Failure> {
    let target = Some(target.into());
    manager.call(manager.admin().get_reservation(v1::GetReservationRequest { target })).await
}

/// Requests the alarms, and returns all of them or those about `subject` ("host h1" or "h1").
pub(crate) async fn alarms(manager: &Connection, subject: Option<&str>) -> Result<Vec<view::Alarm>, Failure> {
    let matches = |alarm: &v1::Alarm| subject.is_none_or(|subject| matches_subject(&alarm.subject, subject));
    Ok(lists::rack(manager).await?.alarms.into_iter().filter(matches).map(view::Alarm::from).collect())
}

fn matches_subject(subject: &str, requested: &str) -> bool {
    subject == requested || subject.split_once(' ').is_some_and(|(_, name)| name == requested)
}
