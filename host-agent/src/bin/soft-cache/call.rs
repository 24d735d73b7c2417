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
    /// Stores a value that is the concatenation of two parts. If the daemon provides no budget for it, the value is
    /// evicted at once.
    ///
    /// # Errors
    /// [`CommandError::BudgetRequested`] if the daemon may provide budget; no value was stored then. Another error if
    /// the key or the value is too long, or does not fit into the largest budget.
    pub fn store(&self, key: &[u8], value: [&[u8]; 2], expiry: Option<UnixMs>) -> Result<(), CommandError> {
        let (Server { store, memory, .. }, waits) = (self.server, self.session.budget_waits);
        if !memory.has_daemon() {
            return Ok(store.set(key, value, expiry)?);
        }
        match store.try_set(key, value, expiry) {
            Ok(()) => {
                if waits > 0 {
                    memory.count_success();
                }
                return Ok(());
            }
            Err(SoftError::OutOfBudget { pages }) => {
                if let Some(answer) = memory.request_budget(pages, waits) {
                    return Err(CommandError::BudgetRequested(answer));
                }
            }
            Err(_) => {} // an eviction may provide address space
        }
        match store.set(key, value, expiry) {
            Err(SoftError::OutOfBudget { pages }) if memory.can_provide(pages) => {
                match memory.request_necessary_budget(pages, waits) {
                    Some(answer) => Err(CommandError::BudgetRequested(answer)),
                    None => {
                        store.evict_new_value(key);
                        memory.log_unstored();
                        Ok(())
                    }
                }
            }
            result => Ok(result?),
        }
    }

    /// Changes the expiry time of a key. Returns whether the key has a value.
    ///
    /// # Errors
    /// As [`store`](Self::store).
    pub fn set_expiry(&self, key: &[u8], expiry: Option<UnixMs>) -> Result<bool, CommandError> {
        let Some((old, value)) = self.server.store.copy(key, self.now) else { return Ok(false) };
        if old != expiry {
            self.store(key, [&value, b""], expiry)?;
        }
        Ok(true)
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
