//! Commands on the server: INFO, DBSIZE, FLUSHALL, FLUSHDB, CONFIG and COMMAND.

use std::{fmt::Write as _, sync::atomic::Ordering};

use soft::{PAGE_BYTES, PoolStats};

use super::COMMANDS;
use crate::{
    call::{Call, argument},
    error::{CommandError, shortened},
    request::Request,
    server::Server,
    size::parse_size,
    store::ExpiringValues,
};

/// Version of Redis whose replies and errors this server follows. Some clients check it.
const REDIS_VERSION: &str = "7.0.0";

/// DBSIZE
pub fn dbsize(call: &mut Call<'_>, _: Request<'_>) -> Result<(), CommandError> {
    call.reply.count(call.server.store.len());
    Ok(())
}

/// FLUSHALL [ASYNC | SYNC]
pub fn flushall(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    let is_mode =
        |option: &[u8]| option.eq_ignore_ascii_case(b"ASYNC") || option.eq_ignore_ascii_case(b"SYNC");
    if !request.get(1).is_none_or(is_mode) {
        return Err(CommandError::Syntax);
    }
    call.server.store.clear();
    call.reply.status("OK");
    Ok(())
}

/// COMMAND [COUNT | DOCS ...]
pub fn command(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    let subcommand = request.get(1).unwrap_or_default().to_ascii_lowercase();
    match subcommand.as_slice() {
        b"" | b"info" | b"list" => call.reply.array(0),
        b"docs" => call.reply.map(0),
        b"count" => call.reply.count(COMMANDS.len()),
        _ => {
            let subcommand = shortened(argument(request, 1)?);
            return Err(CommandError::UnknownSubcommand { command: "COMMAND", subcommand });
        }
    }
    Ok(())
}

/// CONFIG GET parameter [parameter ...] or CONFIG SET maxmemory bytes
pub fn config(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    let subcommand = argument(request, 1)?.to_ascii_lowercase();
    match (subcommand.as_slice(), request.len()) {
        (b"get", 3..) => get_parameters(call, request),
        (b"set", 4) => {
            let name = argument(request, 2)?;
            if !name.eq_ignore_ascii_case(b"maxmemory") {
                return Err(CommandError::UnknownParameter(shortened(name)));
            }
            let bytes = parse_size(argument(request, 3)?).ok_or(CommandError::MaxMemorySyntax)?;
            call.server.memory.resize(bytes)?;
            call.reply.status("OK");
        }
        (b"get", _) => return Err(CommandError::ArgumentCount("config|get")),
        (b"set", _) => return Err(CommandError::ArgumentCount("config|set")),
        _ => {
            let subcommand = shortened(argument(request, 1)?);
            return Err(CommandError::UnknownSubcommand { command: "CONFIG", subcommand });
        }
    }
    Ok(())
}

/// Replies parameters whose name is an argument, or all for the argument `*`.
fn get_parameters(call: &mut Call<'_>, request: Request<'_>) {
    let parameters = [
        ("appendonly", "no".to_owned()),
        ("databases", "1".to_owned()),
        ("maxclients", call.server.clients_max.to_string()),
        ("maxmemory", (call.server.memory.maxmemory() * PAGE_BYTES).to_string()),
        ("maxmemory-policy", "allkeys-lru".to_owned()),
        ("save", String::new()),
    ];
    let is_requested = |name: &str| {
        let mut patterns = request.arguments_from(2);
        patterns.any(|pattern| pattern == b"*" || pattern.eq_ignore_ascii_case(name.as_bytes()))
    };
    let requested: Vec<_> = parameters.iter().filter(|(name, _)| is_requested(name)).collect();
    call.reply.map(requested.len());
    for (name, value) in requested {
        call.reply.bulk(name.as_bytes());
        call.reply.bulk(value.as_bytes());
    }
}

/// INFO [section ...]
pub fn info(call: &mut Call<'_>, request: Request<'_>) -> Result<(), CommandError> {
    let is_requested = |name: &str| {
        let is_name = |section: &[u8]| {
            let all: [&[u8]; 3] = [b"all", b"everything", b"default"];
            section.eq_ignore_ascii_case(name.as_bytes())
                || all.iter().any(|all| section.eq_ignore_ascii_case(all))
        };
        request.len() == 1 || request.arguments_from(1).any(is_name)
    };
    let sections: [(&str, Section); 7] = [
        ("Server", server_fields),
        ("Clients", client_fields),
        ("Memory", memory_fields),
        ("Stats", stats_fields),
        ("Replication", replication_fields),
        ("Soft_memory", soft_memory_fields),
        ("Keyspace", keyspace_fields),
    ];
    let mut text = String::new();
    for (name, fields) in sections.iter().filter(|(name, _)| is_requested(name)) {
        let separator = if text.is_empty() { "" } else { "\r\n" };
        // Writing to a string cannot fail.
        let _ = write!(text, "{separator}# {name}\r\n");
        for (field, value) in fields(call.server) {
            let _ = write!(text, "{field}:{value}\r\n");
        }
    }
    call.reply.text(&text);
    Ok(())
}

/// Name and value of a field of INFO.
type Field = (&'static str, String);
/// Function that returns the fields of a section of INFO.
type Section = fn(&Server) -> Vec<Field>;

fn server_fields(server: &Server) -> Vec<Field> {
    vec![
        ("redis_version", REDIS_VERSION.to_owned()),
        ("redis_mode", "standalone".to_owned()),
        ("soft_cache_version", env!("CARGO_PKG_VERSION").to_owned()),
        ("process_id", std::process::id().to_string()),
        ("uptime_in_seconds", server.uptime_s().to_string()),
    ]
}

fn client_fields(server: &Server) -> Vec<Field> {
    vec![("connected_clients", server.clients().to_string()), ("maxclients", server.clients_max.to_string())]
}

fn memory_fields(server: &Server) -> Vec<Field> {
    let PoolStats { held, .. } = server.memory.stats();
    vec![
        ("used_memory", (held * PAGE_BYTES).to_string()),
        ("used_memory_rss", resident_bytes().unwrap_or(0).to_string()),
        ("mem_clients_normal", server.buffer_bytes().to_string()),
        ("maxmemory", (server.memory.maxmemory() * PAGE_BYTES).to_string()),
        ("maxmemory_policy", "allkeys-lru".to_owned()),
    ]
}

fn stats_fields(server: &Server) -> Vec<Field> {
    let (counters, store) = (&server.counters, server.store.counts());
    let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed).to_string();
    vec![
        ("total_connections_received", count(&counters.connections)),
        ("total_commands_processed", count(&counters.commands)),
        ("rejected_connections", count(&counters.rejected)),
        ("closed_connections", count(&counters.closed)),
        ("expired_keys", store.expired.to_string()),
        ("evicted_keys", evicted_values(server).to_string()),
        ("keyspace_hits", store.hits.to_string()),
        ("keyspace_misses", store.misses.to_string()),
    ]
}

/// Returns the fields of a server without replicas, which clients of Redis read.
fn replication_fields(_: &Server) -> Vec<Field> {
    vec![("role", "master".to_owned()), ("connected_slaves", "0".to_owned())]
}

fn soft_memory_fields(server: &Server) -> Vec<Field> {
    let (PoolStats { budget, held }, usage) = (server.memory.stats(), server.store.usage());
    vec![
        ("soft_daemon", server.memory.connection().to_owned()),
        ("soft_budget_bytes", (budget * PAGE_BYTES).to_string()),
        ("soft_held_bytes", (held * PAGE_BYTES).to_string()),
        ("soft_evicted_values", evicted_values(server).to_string()),
        ("soft_unstored_values", server.store.counts().unstored.to_string()),
        ("soft_reclamations", usage.reclamations.to_string()),
    ]
}

/// Returns the number of evicted values, including new values that were evicted at once.
fn evicted_values(server: &Server) -> u64 {
    server.store.usage().evicted + server.store.counts().unstored
}

fn keyspace_fields(server: &Server) -> Vec<Field> {
    let ExpiringValues { values, mean_ttl_ms } = server.store.expiring_values();
    match server.store.len() {
        0 => Vec::new(),
        // Values may have been removed since the search.
        keys => {
            vec![("db0", format!("keys={keys},expires={},avg_ttl={mean_ttl_ms}", values.min(keys as u64)))]
        }
    }
}

/// Returns the resident memory of this process in bytes.
fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * PAGE_BYTES as u64)
}
