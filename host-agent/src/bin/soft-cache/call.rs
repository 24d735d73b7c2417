//! Arguments of the function of a command.

use soft::SoftError;
use units::UnixMs;

use crate::{
    error::CommandError, integer::parse_integer, reply::Reply, request::Request, server::Server,
    session::Session,
};

/// Execution of a command for one client.
#[derive(Debug)]
pub struct Call<'a> {
    /// State of the server.
    pub server: &'a Server,
    /// State of the connection.
    pub session: &'a mut Session,
    /// Replies to the client.
    pub reply: Reply<'a>,
    /// Current time.
    pub now: UnixMs,
}

impl Call<'_> {
    /// Stores a value that is the concatenation of two parts.
    ///
    /// # Errors
    /// [`CommandError::BudgetRequested`] if the daemon may provide budget; the store is unchanged then. Another error
    /// if the value does not fit after the eviction of all others.
    pub fn store(&self, key: &[u8], value: [&[u8]; 2], expiry: Option<UnixMs>) -> Result<(), CommandError> {
        let (server, waits) = (self.server, self.session.budget_waits);
        if server.memory.has_daemon() {
            match server.store.try_set(key, value, expiry) {
                Ok(()) => {
                    if waits > 0 {
                        server.memory.count_success();
                    }
                    return Ok(());
                }
                Err(SoftError::OutOfBudget { pages }) => {
                    if let Some(answer) = server.memory.request_budget(pages, waits) {
                        return Err(CommandError::BudgetRequested(answer));
                    }
                }
                Err(_) => {} // an eviction may provide address space
            }
        }
        Ok(server.store.set(key, value, expiry)?)
    }
}

/// Function that executes a command. On success, it wrote one reply. On an error, it wrote none.
pub type CommandFunction = fn(&mut Call<'_>, Request<'_>) -> Result<(), CommandError>;

/// Returns an argument of a command, which the check of the number of arguments guarantees.
pub fn argument<'a>(request: Request<'a>, index: usize) -> Result<&'a [u8], CommandError> {
    request.get(index).ok_or(CommandError::Syntax)
}

/// Returns an argument that is an integer.
pub fn integer_argument(request: Request<'_>, index: usize) -> Result<i64, CommandError> {
    parse_integer(argument(request, index)?).ok_or(CommandError::NotAnInteger)
}
