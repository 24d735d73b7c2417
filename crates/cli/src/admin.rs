//! What an operator orders: cordon, uncordon, drain, fence. Whether it may be done is the manager's to say.

use proto::v1;

use crate::{
    Connection, Failure, Format,
    args::{Fence, Mended, NamedWhy, Place},
    print, view,
};

/// No new reservations there.
pub(crate) async fn cordon(place: Place, to: &Connection, format: Format) -> Result<(), Failure> {
    show(format, to.ask(to.admin().cordon(v1::TargetRequest::from(place))).await?)
}

/// Takes a cordon or drain back.
pub(crate) async fn uncordon(mended: Mended, to: &Connection, format: Format) -> Result<(), Failure> {
    show(format, to.ask(to.admin().uncordon(v1::TargetRequest::from(mended))).await?)
}

/// Cordon, and have every VM moved away.
pub(crate) async fn drain(place: Place, to: &Connection, format: Format) -> Result<(), Failure> {
    show(format, to.ask(to.admin().drain(v1::TargetRequest::from(place))).await?)
}

/// Cuts a silent host off its slices.
pub(crate) async fn fence(args: Fence, to: &Connection, format: Format) -> Result<(), Failure> {
    let request = v1::FenceRequest {
        host: args.host.into(),
        confirm_powered_off: args.confirm_powered_off,
        reason: args.reason.unwrap_or_default(),
    };
    show(format, to.ask(to.admin().fence(request)).await?)?;
    print::note(
        format,
        "it is cut off when `tarn get hosts` says `fenced`; until then its slices stay with it",
    );
    Ok(())
}

fn show(format: Format, done: v1::TargetResponse) -> Result<(), Failure> {
    print::one(format, &view::Done::from(done))
}

fn host(named: NamedWhy) -> v1::TargetRequest {
    let target = v1::Target { host: named.name.into(), emc: String::new(), slice: None };
    v1::TargetRequest { target: Some(target), reason: named.reason.unwrap_or_default() }
}

fn emc(named: NamedWhy) -> v1::TargetRequest {
    let target = v1::Target { host: String::new(), emc: named.name.into(), slice: None };
    v1::TargetRequest { target: Some(target), reason: named.reason.unwrap_or_default() }
}

impl From<Place> for v1::TargetRequest {
    fn from(place: Place) -> Self {
        match place {
            Place::Host(named) => host(named),
            Place::Emc(named) => emc(named),
        }
    }
}

impl From<Mended> for v1::TargetRequest {
    fn from(mended: Mended) -> Self {
        match mended {
            Mended::Host(named) => host(named),
            Mended::Emc(named) => emc(named),
            Mended::Slice { slice, reason } => {
                let target = v1::Target { host: String::new(), emc: String::new(), slice: Some(slice) };
                Self { target: Some(target), reason: reason.unwrap_or_default() }
            }
        }
    }
}
