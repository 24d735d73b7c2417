//! `tarn get soft`: the size of a host's soft memory, and the processes that use it. The host's agent divides
//! soft memory among them.

use proto::v1;
use serde::Serialize;

use crate::{
    Connection, Failure, Format, print,
    shares::HostArg,
    table::{Column, Row, col, format_timestamp, mib, rows, text_or_dash, wide},
    view::non_empty,
};

/// Prints the soft memory of a host, and its clients, one per row.
pub(crate) async fn show(args: HostArg, manager: &Connection, format: Format) -> Result<(), Failure> {
    let request = v1::GetSoftMemoryRequest { host: args.host.into() };
    let soft_memory = SoftMemory::from(manager.call(manager.admin().get_soft_memory(request)).await?);
    print::value(format, &soft_memory, |all_columns| soft_memory.to_text(all_columns))?;
    let (listed, count) = (soft_memory.clients.len(), soft_memory.client_count);
    if listed < count as usize {
        let note = format!("{listed} of {count} processes are listed: those with the largest budgets");
        print::note(format, &note);
    }
    let (host, at) = (&soft_memory.host, format_timestamp(soft_memory.at_unix_ms));
    print::note(format, &format!("reported by host {host} at {at}"));
    Ok(())
}

/// Last reported state of a host's soft memory.
#[derive(Clone, Debug, Serialize)]
struct SoftMemory {
    host: String,
    at_unix_ms: u64,
    limit_bytes: u64,
    total_bytes: u64,
    free_bytes: u64,
    granted_bytes: u64,
    reclaimed_bytes: u64,
    denied_requests: u64,
    unanswered_demands: u64,
    client_count: u32,
    clients: Vec<Client>,
}

/// State of a process with soft memory.
#[derive(Clone, Debug, Serialize)]
struct Client {
    pid: u32,
    uid: u32,
    program: Option<String>,
    budget_bytes: u64,
    used_bytes: u64,
    footprint_bytes: u64,
    weight_bytes: u64,
    granted_bytes: u64,
    reclaimed_bytes: u64,
    denied_requests: u64,
    unanswered_demands: u64,
    silent: bool,
}

impl From<v1::SoftMemory> for SoftMemory {
    fn from(s: v1::SoftMemory) -> Self {
        Self {
            host: s.host,
            at_unix_ms: s.at_unix_ms,
            limit_bytes: s.limit_bytes,
            total_bytes: s.total_bytes,
            free_bytes: s.free_bytes,
            granted_bytes: s.granted_bytes,
            reclaimed_bytes: s.reclaimed_bytes,
            denied_requests: s.denied_requests,
            unanswered_demands: s.unanswered_demands,
            client_count: s.client_count,
            clients: s.clients.into_iter().map(Client::from).collect(),
        }
    }
}

impl From<v1::SoftMemoryClient> for Client {
    fn from(c: v1::SoftMemoryClient) -> Self {
        Self {
            pid: c.pid,
            uid: c.uid,
            program: non_empty(c.program),
            budget_bytes: c.budget_bytes,
            used_bytes: c.used_bytes,
            footprint_bytes: c.footprint_bytes,
            weight_bytes: c.weight_bytes,
            granted_bytes: c.granted_bytes,
            reclaimed_bytes: c.reclaimed_bytes,
            denied_requests: c.denied_requests,
            unanswered_demands: c.unanswered_demands,
            silent: c.silent,
        }
    }
}

impl Row for Client {
    const COLUMNS: &'static [Column<Self>] = &[
        col("PID", |c| c.pid.to_string()),
        col("USER", |c| c.uid.to_string()),
        col("PROGRAM", |c| text_or_dash(c.program.as_ref())),
        col("BUDGET", |c| mib(c.budget_bytes)),
        col("USED", |c| mib(c.used_bytes)),
        col("FOOTPRINT", |c| mib(c.footprint_bytes)),
        col("WEIGHT", |c| mib(c.weight_bytes)),
        col("GRANTED", |c| mib(c.granted_bytes)),
        col("RECLAIMED", |c| mib(c.reclaimed_bytes)),
        col("DENIED", |c| c.denied_requests.to_string()),
        col("STATE", |c| if c.silent { "silent" } else { "ok" }.to_owned()),
        wide("UNANSWERED", |c| c.unanswered_demands.to_string()),
    ];
}

impl SoftMemory {
    /// Formats the sizes and a table of the clients.
    fn to_text(&self, all_columns: bool) -> String {
        let [limit, total, free] = [self.limit_bytes, self.total_bytes, self.free_bytes].map(mib);
        format!("limit {limit}, total {total}, free {free}\n\n{}", rows(&self.clients, all_columns))
    }
}
