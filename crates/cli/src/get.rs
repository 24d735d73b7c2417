//! `tarn get`: lists of things, or one of them. Everything about one thing is `describe`'s.

use proto::v1;

use crate::{
    Connection, Failure, Format,
    args::{Kind, Ref},
    lists, models, print, shares, view,
};

/// Prints what was asked for.
pub(crate) async fn run(kind: Kind, to: &Connection, format: Format) -> Result<(), Failure> {
    match kind {
        Kind::Rack => print::one(format, &view::Rack::from(lists::rack(to).await?)),
        Kind::Emcs(named) => match named.name {
            Some(name) => print::one(format, &emc(to, name.into()).await?),
            None => list::<_, view::Emc>(format, lists::emcs(to).await?),
        },
        Kind::Hosts(named) => match named.name {
            Some(name) => print::one(format, &host(to, name.into()).await?),
            None => list::<_, view::Host>(format, lists::hosts(to).await?),
        },
        Kind::Slices(numbered) => match numbered.slice {
            Some(slice) => print::one(format, &view::Slice::from(self::slice(to, slice).await?)),
            None => list::<_, view::Slice>(format, lists::slices(to, 0, u32::MAX).await?),
        },
        Kind::Reservations(asked) => match asked.which {
            Some(which) => print::one(format, &reservation(to, which).await?),
            None => list::<_, view::Reservation>(format, lists::reservations(to, asked.ended).await?),
        },
        Kind::Migrations(of) => {
            let mut asked = lists::migrations(to).await?;
            asked.retain(|m| of.vm.as_ref().is_none_or(|vm| m.vm == vm.as_str()));
            list::<_, view::Migration>(format, asked)
        }
        Kind::Models => models::list(to, format).await,
        Kind::Shares(of) => shares::list(of, to, format).await,
        Kind::Alarms(about) => print::list(format, &alarms(to, about.subject.as_deref()).await?),
    }
}

fn list<A, B: From<A> + crate::table::Row + serde::Serialize>(
    format: Format,
    things: Vec<A>,
) -> Result<(), Failure> {
    print::list(format, &things.into_iter().map(B::from).collect::<Vec<_>>())
}

/// One EMC.
pub(crate) async fn emc(to: &Connection, emc: String) -> Result<view::Emc, Failure> {
    Ok(to.ask(to.admin().get_emc(v1::GetEmcRequest { emc })).await?.into())
}

/// One host.
pub(crate) async fn host(to: &Connection, host: String) -> Result<view::Host, Failure> {
    Ok(to.ask(to.admin().get_host(v1::GetHostRequest { host })).await?.into())
}

/// One slice.
pub(crate) async fn slice(to: &Connection, slice: u32) -> Result<v1::Slice, Failure> {
    to.ask(to.admin().get_slice(v1::GetSliceRequest { slice })).await
}

/// One reservation.
pub(crate) async fn reservation(to: &Connection, which: Ref) -> Result<view::Reservation, Failure> {
    let target = Some(which.into());
    Ok(to.ask(to.admin().get_reservation(v1::GetReservationRequest { target })).await?.into())
}

/// Alarms, all or those about one subject: "host h1", or just "h1".
pub(crate) async fn alarms(to: &Connection, about: Option<&str>) -> Result<Vec<view::Alarm>, Failure> {
    let wanted = |alarm: &v1::Alarm| about.is_none_or(|subject| concerns(&alarm.subject, subject));
    Ok(lists::rack(to).await?.alarms.into_iter().filter(wanted).map(view::Alarm::from).collect())
}

fn concerns(subject: &str, asked: &str) -> bool {
    subject == asked || subject.split_once(' ').is_some_and(|(_, name)| name == asked)
}
