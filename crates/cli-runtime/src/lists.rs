//! Requests for complete lists of resources. The manager returns long lists in pages. This file
//! joins the pages.

use proto::v1;
use units::limits::LIST_PAGES_MAX;

use crate::{Connection, Failure};

/// Requests all hosts of the rack.
pub async fn hosts(manager: &Connection) -> Result<Vec<v1::Host>, Failure> {
    Ok(manager.call(manager.admin().list_hosts(v1::ListHostsRequest {})).await?.hosts)
}

/// Requests all EMCs of the rack.
pub async fn emcs(manager: &Connection) -> Result<Vec<v1::Emc>, Failure> {
    Ok(manager.call(manager.admin().list_emcs(v1::ListEmcsRequest {})).await?.emcs)
}

/// Requests all running managers of the rack.
pub async fn managers(manager: &Connection) -> Result<Vec<v1::Manager>, Failure> {
    Ok(manager.call(manager.admin().list_managers(v1::ListManagersRequest {})).await?.managers)
}

/// Requests the summary of the rack.
pub async fn rack(manager: &Connection) -> Result<v1::Rack, Failure> {
    manager.call(manager.admin().get_rack(v1::GetRackRequest {})).await
}

/// Requests the slices from `first` to `last`. Slices after `last` on the same page are included.
pub async fn slices(manager: &Connection, first: u32, last: u32) -> Result<Vec<v1::Slice>, Failure> {
    let (mut slices, mut from) = (Vec::new(), first);
    for _ in 0..LIST_PAGES_MAX {
        let page =
            manager.call(manager.admin().list_slices(v1::ListSlicesRequest { from, limit: 0 })).await?;
        slices.extend(page.slices);
        match page.next {
            Some(next) if next <= from => return Err(endless_list_error("slices")),
            Some(next) if next <= last => from = next,
            _ => return Ok(slices),
        }
    }
    Err(endless_list_error("slices"))
}

/// Requests all reservations. Ended reservations are included if `ended` is set.
pub async fn reservations(manager: &Connection, ended: bool) -> Result<Vec<v1::Reservation>, Failure> {
    let (mut reservations, mut pages) = (Vec::new(), PageCursor::new("reservations"));
    loop {
        let request = v1::ListReservationsRequest { ended, after: pages.after.clone(), limit: 0 };
        let page = manager.call(manager.admin().list_reservations(request)).await?;
        reservations.extend(page.reservations);
        if !pages.advance(page.next_after)? {
            return Ok(reservations);
        }
    }
}

/// Requests all migration requests.
pub async fn migrations(manager: &Connection) -> Result<Vec<v1::Migration>, Failure> {
    let (mut migrations, mut pages) = (Vec::new(), PageCursor::new("migrations"));
    loop {
        let request = v1::ListMigrationsRequest { after: pages.after.clone(), limit: 0 };
        let page = manager.call(manager.admin().list_migrations(request)).await?;
        migrations.extend(page.migrations);
        if !pages.advance(page.next_after)? {
            return Ok(migrations);
        }
    }
}

/// Position in a paginated list. Each page starts after the last entry of the previous page.
struct PageCursor {
    resource: &'static str,
    after: String,
    pages_left: u32,
}

impl PageCursor {
    fn new(resource: &'static str) -> Self {
        Self { resource, after: String::new(), pages_left: LIST_PAGES_MAX }
    }

    /// Advances to the next page. Returns whether a next page exists.
    ///
    /// # Errors
    /// [`Failure::Protocol`] if the next page starts at the same entry as this page, or after
    /// [`LIST_PAGES_MAX`] pages.
    fn advance(&mut self, next: String) -> Result<bool, Failure> {
        self.pages_left -= 1;
        if next.is_empty() {
            return Ok(false);
        }
        if next == self.after || self.pages_left == 0 {
            return Err(endless_list_error(self.resource));
        }
        self.after = next;
        Ok(true)
    }
}

fn endless_list_error(resource: &str) -> Failure {
    Failure::Protocol(format!("the list of {resource} has no end"))
}
