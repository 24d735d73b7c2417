//! Table of all commands, and their execution. Each group of commands is a file.

mod connection;
mod counters;
mod information;
mod keys;
mod strings;

use std::sync::atomic::Ordering;

use crate::{
    call::{Call, CommandFunction},
    error::CommandError,
    request::Request,
};

/// Maximum length of the name of a command.
const NAME_BYTES_MAX: usize = 16;

/// Command of the protocol.
#[derive(Clone, Copy, Debug)]
struct Command {
    /// Name in lower case.
    name: &'static str,
    /// Smallest number of arguments, including the name.
    arguments_min: usize,
    /// Largest number of arguments, including the name.
    arguments_max: usize,
    /// Whether a client can execute the command before it authenticates.
    is_open: bool,
    run: CommandFunction,
}

const fn command(name: &'static str, arguments: (usize, usize), run: CommandFunction) -> Command {
    Command { name, arguments_min: arguments.0, arguments_max: arguments.1, is_open: false, run }
}

const fn open_command(name: &'static str, arguments: (usize, usize), run: CommandFunction) -> Command {
    Command { is_open: true, ..command(name, arguments, run) }
}

/// Any number of arguments.
const MANY: usize = usize::MAX;

/// All commands, sorted by name.
const COMMANDS: &[Command] = &[
    command("append", (3, 3), strings::append),
    open_command("auth", (2, 3), connection::auth),
    command("client", (2, MANY), connection::client),
    command("command", (1, MANY), information::command),
    command("config", (2, MANY), information::config),
    command("dbsize", (1, 1), information::dbsize),
    command("decr", (2, 2), counters::decr),
    command("decrby", (3, 3), counters::decrby),
    command("del", (2, MANY), keys::del),
    command("echo", (2, 2), connection::echo),
    command("exists", (2, MANY), keys::exists),
    command("expire", (3, 3), keys::expire),
    command("flushall", (1, 2), information::flushall),
    command("flushdb", (1, 2), information::flushall),
    command("get", (2, 2), strings::get),
    open_command("hello", (1, MANY), connection::hello),
    command("incr", (2, 2), counters::incr),
    command("incrby", (3, 3), counters::incrby),
    command("info", (1, MANY), information::info),
    command("mget", (2, MANY), strings::mget),
    command("mset", (3, MANY), strings::mset),
    command("persist", (2, 2), keys::persist),
    command("pexpire", (3, 3), keys::pexpire),
    command("ping", (1, 2), connection::ping),
    command("pttl", (2, 2), keys::pttl),
    open_command("quit", (1, MANY), connection::quit),
    command("select", (2, 2), connection::select),
    command("set", (3, MANY), strings::set),
    command("setex", (4, 4), strings::setex),
    command("setnx", (3, 3), strings::setnx),
    command("strlen", (2, 2), strings::strlen),
    command("ttl", (2, 2), keys::ttl),
    command("unlink", (2, MANY), keys::del),
];

/// Lines of HTTP requests as commands. As in Redis, they close the connection: a web page can make a browser send
/// requests with commands in their bodies to a server of its host.
const HTTP_COMMANDS: [&[u8]; 2] = [b"post", b"host:"];

/// Executes a request, and writes its reply. A request without arguments has no reply. A request that lacks budget has
/// no reply either, and must be executed again after the answer in `call.session`.
pub fn execute(call: &mut Call<'_>, request: Request<'_>) {
    let Some(name) = request.get(0) else { return };
    if HTTP_COMMANDS.iter().any(|http| name.eq_ignore_ascii_case(http)) {
        (call.session.is_http, call.session.is_closing) = (true, true);
        return;
    }
    if call.session.budget_waits == 0 {
        call.server.counters.commands.fetch_add(1, Ordering::Relaxed);
    }
    let result = match find(name) {
        None if !call.session.is_authenticated => Err(CommandError::NotAuthenticated),
        None => Err(CommandError::unknown_command(request)),
        Some(command) if !command.is_open && !call.session.is_authenticated => {
            Err(CommandError::NotAuthenticated)
        }
        Some(command) if !(command.arguments_min..=command.arguments_max).contains(&request.len()) => {
            Err(CommandError::ArgumentCount(command.name))
        }
        Some(command) => (command.run)(call, request),
    };
    match result {
        Ok(()) => {}
        Err(CommandError::BudgetRequested(answer)) => call.session.awaited_answer = Some(answer),
        Err(error) => call.reply.error(&error.to_string()),
    }
}

/// Returns the command with a name in any case.
fn find(name: &[u8]) -> Option<&'static Command> {
    let mut lower = [0; NAME_BYTES_MAX];
    let lower = lower.get_mut(..name.len())?;
    lower.copy_from_slice(name);
    lower.make_ascii_lowercase();
    let lower = &*lower;
    let index = COMMANDS.binary_search_by(|command| command.name.as_bytes().cmp(lower)).ok()?;
    COMMANDS.get(index)
}

#[cfg(test)]
mod tests;
