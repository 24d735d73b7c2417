//! State of the connection to the daemon: its budget, its request and its debt.

use std::{sync::Arc, time::Instant};

use rustix::{
    fd::OwnedFd,
    net::{SendFlags, Shutdown, send, shutdown},
};
use units::{Ns, limits::SOFT_DENIAL_INTERVAL};

use crate::protocol::{ClientMessage, Refusal};

/// Connection of a pool to the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Connection {
    /// The daemon provides budget.
    Connected,
    /// There is no connection. The pool keeps its budget.
    #[default]
    Lost,
    /// The daemon refuses the process. The pool gives its budget up after `units::limits::SOFT_REFUSED_TIME`.
    Refused(Refusal),
}

/// State of a connection.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) socket: Option<Arc<OwnedFd>>,
    /// Budget that the daemon has recorded after it has received all messages. The budget of the pool is never
    /// larger: it is increased later and reduced earlier.
    pub(super) recorded: u64,
    /// Largest budget that the program requests.
    budget_max: u64,
    /// Largest budget that the daemon provides.
    pub(super) daemon_max: u64,
    /// Whether a request was not answered yet.
    pub(super) is_requested: bool,
    /// Whether the request was not answered in time. No thread waits for it any more.
    pub(super) is_overdue: bool,
    /// Number of answered or lost requests.
    pub(super) answers: u64,
    /// Time and pages of the last denied request.
    pub(super) denied: Option<(Instant, u64)>,
    /// Pages of the last request.
    pub(super) requested: u64,
    /// Pages that the daemon has not recorded any more, and that the pool has not given up yet.
    pub(super) debt: u64,
    pub(super) connection: Connection,
    /// Whether the thread may hold a reference to the pool.
    pub(super) is_pool_in_use: bool,
    /// Whether the pool was dropped.
    pub(super) is_ending: bool,
    /// Whether the thread has ended.
    pub(super) has_ended: bool,
}

impl State {
    /// Creates the state without a connection.
    pub(super) fn new(budget_max: u64) -> Self {
        Self { budget_max, ..Self::default() }
    }

    /// Returns the largest budget.
    pub(super) fn maximum(&self) -> u64 {
        self.budget_max.min(self.daemon_max)
    }

    /// Returns whether a request of at most this size was denied recently.
    fn was_denied_recently(&self, pages: u64) -> bool {
        let is_recent = |at: Instant| Ns::from(at.elapsed()) < SOFT_DENIAL_INTERVAL;
        self.denied.is_some_and(|(at, denied)| pages >= denied && is_recent(at))
    }

    /// Sends a message. A connection that accepts no message is given up: the daemon always reads its messages.
    pub(super) fn send(&mut self, message: ClientMessage) -> bool {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let is_sent =
            self.socket.as_ref().is_some_and(|socket| send(socket, &message.encode(), flags).is_ok());
        if !is_sent {
            self.close();
        }
        is_sent
    }

    /// Ends the connection, also if a forked child has the socket, too. The thread notices it.
    pub(super) fn close(&mut self) {
        if let Some(socket) = self.socket.take() {
            shutdown(&socket, Shutdown::Both).ok(); // the connection may have ended already
        }
        if self.connection == Connection::Connected {
            self.connection = Connection::Lost;
        }
    }

    /// Requests pages up to the largest budget, unless as many or fewer were denied recently. Returns whether there is
    /// a request, which may be an earlier one.
    pub(super) fn request(&mut self, pages: usize, held: usize) -> bool {
        let pages = self.maximum().saturating_sub(self.recorded).min(pages as u64);
        if !self.is_requested && self.debt == 0 && pages > 0 && !self.was_denied_recently(pages) {
            self.requested = pages;
            self.is_requested = self.send(ClientMessage::Request { pages, held: held as u64 });
        }
        self.is_requested
    }

    /// Records that the pool must give pages up that the daemon has not recorded any more.
    pub(super) fn owe(&mut self, pages: u64) {
        self.recorded = self.recorded.saturating_sub(pages);
        self.debt = self.debt.saturating_add(pages);
    }

    /// Gives back budget that the pool does not have any more. Without a connection, the next one begins without
    /// it.
    pub(super) fn give_back(&mut self, pages: u64, held: u64) {
        self.recorded = self.recorded.saturating_sub(pages);
        self.send(ClientMessage::Returned { pages, held });
    }
}
