//! Whole lists from a manager that hands them out in pages. It shows nothing.

use proto::v1;
use units::limits::LIST_PAGES_MAX;

use crate::{Connection, Failure};

/// Every host.
pub async fn hosts(to: &Connection) -> Result<Vec<v1::Host>, Failure> {
    Ok(to.ask(to.admin().list_hosts(v1::ListHostsRequest {})).await?.hosts)
}

/// Every EMC.
pub async fn emcs(to: &Connection) -> Result<Vec<v1::Emc>, Failure> {
    Ok(to.ask(to.admin().list_emcs(v1::ListEmcsRequest {})).await?.emcs)
}

/// The rack as a whole.
pub async fn rack(to: &Connection) -> Result<v1::Rack, Failure> {
    to.ask(to.admin().get_rack(v1::GetRackRequest {})).await
}

/// Every slice from `first` on, by whole pages until `last` is among them.
pub async fn slices(to: &Connection, first: u32, last: u32) -> Result<Vec<v1::Slice>, Failure> {
    let (mut slices, mut from) = (Vec::new(), first);
    for _ in 0..LIST_PAGES_MAX {
        let page = to.ask(to.admin().list_slices(v1::ListSlicesRequest { from, limit: 0 })).await?;
        slices.extend(page.slices);
        match page.next {
            Some(next) if next <= from => return Err(stuck("slices")),
            Some(next) if next <= last => from = next,
            _ => return Ok(slices),
        }
    }
    Err(stuck("slices"))
}

/// Every reservation; also those that ended, if asked.
pub async fn reservations(to: &Connection, ended: bool) -> Result<Vec<v1::Reservation>, Failure> {
    let (mut reservations, mut pages) = (Vec::new(), Pages::of("reservations"));
    loop {
        let request = v1::ListReservationsRequest { ended, after: pages.after.clone(), limit: 0 };
        let page = to.ask(to.admin().list_reservations(request)).await?;
        reservations.extend(page.reservations);
        if !pages.go_on(page.next_after)? {
            return Ok(reservations);
        }
    }
}

/// Every request to move a VM.
pub async fn migrations(to: &Connection) -> Result<Vec<v1::Migration>, Failure> {
    let (mut migrations, mut pages) = (Vec::new(), Pages::of("migrations"));
    loop {
        let request = v1::ListMigrationsRequest { after: pages.after.clone(), limit: 0 };
        let page = to.ask(to.admin().list_migrations(request)).await?;
        migrations.extend(page.migrations);
        if !pages.go_on(page.next_after)? {
            return Ok(migrations);
        }
    }
}

/// Pages that each begin after the last thing of the one before.
struct Pages {
    of: &'static str,
    after: String,
    left: u32,
}

impl Pages {
    fn of(of: &'static str) -> Self {
        Self { of, after: String::new(), left: LIST_PAGES_MAX }
    }

    /// Whether there is another page. A list that does not come to an end is a manager's fault.
    fn go_on(&mut self, next: String) -> Result<bool, Failure> {
        self.left -= 1;
        if next.is_empty() {
            return Ok(false);
        }
        if next == self.after || self.left == 0 {
            return Err(stuck(self.of));
        }
        self.after = next;
        Ok(true)
    }
}

fn stuck(of: &str) -> Failure {
    Failure::Protocol(format!("its list of {of} does not come to an end"))
}
